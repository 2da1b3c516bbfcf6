"""Rows of one length, which have no padding: whether each has the result in their company that it has alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from brimful.core.errors import ModelError
from brimful.core.tolerances import TOLERANCES
from brimful.models.packed.check_inputs import FEW, MANY, padded_rows, random_sequences
from brimful.models.packed.packed_forward import PaddedModel


def alike_independent(padded: PaddedModel, sequences: Sequence[np.ndarray]) -> bool:
    """Return whether rows of one length do not influence one another: three of each length that the model takes, and
    many of the shortest one."""
    config, tried = padded.model.config, False
    with torch.no_grad():
        for sequence in sorted(sequences, key=len):
            rows = [np.concatenate([sequence[:1], np.roll(sequence[1:-1], by), sequence[-1:]]) for by in (0, 1, 2)]
            try:
                alone = torch.cat([padded(padded_rows([row], config)).logits for row in rows])
            except (ModelError, ValueError, RuntimeError, IndexError):  # too short for some
                continue
            if not _equal(padded(padded_rows(rows, config)).logits, alone):
                return False
            if not tried and _mixes_many(padded, len(sequence)):
                return False
            tried = True
    return tried


def _mixes_many(padded: PaddedModel, length: int) -> bool:
    """Return whether the results of many rows are others than those of the same rows, a few at a time."""
    config = padded.model.config
    rows = random_sequences(config, [length] * MANY)
    few = [padded(padded_rows(rows[start : start + FEW], config)).logits for start in range(0, MANY, FEW)]
    return not _equal(padded(padded_rows(rows, config)).logits, torch.cat(few))


def _equal(together: Tensor, apart: Tensor) -> bool:
    error = (together - apart).norm() / apart.norm().clamp_min(1e-30)
    return float(error) <= TOLERANCES["fp32"].logits
