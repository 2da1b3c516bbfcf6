"""Rows of one length, which have no padding: whether each has the result in their company that it has alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from brimful.core.errors import ModelError
from brimful.core.tolerances import TOLERANCES
from brimful.models.packed.check_inputs import padded_rows
from brimful.models.packed.packed_forward import PaddedModel


def alike_independent(padded: PaddedModel, sequences: Sequence[np.ndarray]) -> bool:
    """Return whether rows of one length do not influence one another: three of each length that the model takes."""
    config, tried = padded.model.config, False
    with torch.no_grad():
        for sequence in sequences:
            rows = [np.concatenate([sequence[:1], np.roll(sequence[1:-1], by), sequence[-1:]]) for by in (0, 1, 2)]
            try:
                alone = torch.cat([padded(padded_rows([row], config)).logits for row in rows])
            except (ModelError, ValueError, RuntimeError, IndexError):  # too short for some
                continue
            together, tried = padded(padded_rows(rows, config)).logits, True
            error = (together - alone).norm() / alone.norm().clamp_min(1e-30)
            if not float(error) <= TOLERANCES["fp32"].logits:
                return False
    return tried
