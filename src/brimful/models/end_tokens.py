"""End tokens of the rows of encoder-decoders such as BART and T5, whose head reads the last one of each row.

transformers computes rows together only where they hold as many of them; on packed rows it is the last token that is
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def end_token_of(model: Any) -> int | None:
    """The token that a classifier's head looks for; None for one that looks for none."""
    if not (model.config.is_encoder_decoder and hasattr(model, "classification_head")):
        return None
    found = getattr(model.config.get_text_config(), "eos_token_id", None)
    return found if isinstance(found, int) else None


def count_ends(ids: Sequence[np.ndarray], end_id: int) -> np.ndarray:
    """(N,) int64: end tokens of each row."""
    return np.array([np.count_nonzero(each == end_id) for each in ids], dtype=np.int64)
