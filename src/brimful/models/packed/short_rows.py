"""Rows of tens of tokens of a model with a window of thousands, which show whether rows depend on one another.

A model whose rows do is refused, and longer ones cannot change that: on a CPU they take minutes, and gigabytes each.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from brimful.core.errors import ModelError
from brimful.core.tolerances import TOLERANCES
from brimful.models.packed.alike_rows import alike_independent
from brimful.models.packed.check_inputs import BEYOND, make_sequences, padded_rows
from brimful.models.packed.long_window import QUICK, SHORT, shorten_window
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.training_check import draws_numbers, without_dropout
from brimful.models.packed.tried_row import relative_error


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """Rows of a batch, or their padding, change one another's results. alike: those of one length do not. draws: the
    model draws random numbers in train mode."""

    alike: bool
    draws: bool


def dependence_of_short_rows(small: Any, max_length: int) -> Dependence | None:
    """Return how short rows of a model in eval mode on the CPU depend on one another. None where they do not, and where
    the model is tried quickly in full, or has no short window that stands for what longer rows do."""
    if _longest(small, max_length) <= QUICK:
        return None
    windowed = copy.deepcopy(small)
    shorten_window(windowed, max_length)
    if _longest(windowed, max_length) > QUICK:
        return None
    sequences = make_sequences(small.config, SHORT + BEYOND)
    whole, padded = padded_rows(sequences, small.config), PaddedModel(small, "eager")
    with torch.no_grad(), without_dropout(small, only_of_numbers=True):
        try:
            alone = torch.cat([padded(padded_rows([sequence], small.config)).logits for sequence in sequences])
        except (ModelError, ValueError, RuntimeError, IndexError):  # of a model's own code: the check itself says what
            return None
        if relative_error(padded(whole).logits, alone) <= TOLERANCES["fp32"].logits:
            return None
        alike = alike_independent(padded, sequences)
    beyond = PaddedModel(windowed, "eager")
    with torch.no_grad(), without_dropout(windowed, only_of_numbers=True):
        alike = alike and alike_independent(beyond, make_sequences(windowed.config, max_length))
        windowed.train()
        draws = draws_numbers(partial(_logits, beyond, whole))
    return Dependence(alike=alike and not draws, draws=draws)


def _longest(small: Any, max_length: int) -> int:
    return max(map(len, make_sequences(small.config, max_length)))


def _logits(padded: PaddedModel, inputs: Any) -> torch.Tensor:
    return padded(inputs).logits
