"""Lengths of the sequences that a loop's batches will have, by which token budgets and kernels are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from brimful.core.errors import OptionError

#: Batches that token budgets are chosen by.
_MOST_BATCHES = 2000
_FEW_LENGTHS = 64


def _lengths_N(lengths: Any) -> np.ndarray:
    """(N,) as numbers. Raises: OptionError for what has none, such as a dataset without length."""
    try:
        found = np.asarray(lengths, dtype=np.int64)
    except (TypeError, ValueError):
        found = np.zeros(0, np.int64)
    if found.ndim != 1 or not len(found) or found.min() < 1:
        raise OptionError(
            f"lengths is a {type(lengths).__name__}, and not tokens of each row",
            hint="lengths=[len(row['input_ids']) for row in rows], or leave it out where rows come as a stream",
        )
    return found


def expected_batches(lengths: Sequence[int] | np.ndarray | None, size: int, longest: int) -> list[np.ndarray]:
    """Lengths of the sequences of batches like those to come. Raises: OptionError for what holds no lengths."""
    if lengths is None:
        each = np.linspace(1, longest, min(_FEW_LENGTHS, longest)).astype(np.int64)
        return [np.full(size, length) for length in each]
    known = np.random.default_rng(0).permutation(np.minimum(_lengths_N(lengths), longest))
    return [known[start : start + size] for start in range(0, min(len(known), _MOST_BATCHES * size), size)]
