"""Texts that hold the padding token itself: RoBERTa and MPNet number positions without it, others do not.

In Hugging Face's RoBERTa the literal `<pad>` in a text has the position of padding, and tokens behind it stand one
place earlier. The equivalence check finds out which rule a model has; nothing here knows a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.models.packed.check_inputs import make_sequences, packed_row, padded_rows
from brimful.models.packed.packed_forward import PackedForm, PackedModel, PaddedModel

#: Fewest tokens of a sequence with padding tokens in its middle and at its end.
_LEAST = 8


def with_padding_rule(
    small: Any, form: PackedForm, max_length: int, equal: Callable[[Tensor, Tensor], bool]
) -> PackedForm | None:
    """Return the form with the rule by which sequences that hold padding tokens are read as the plain model reads them;
    None if neither rule does that.

    small: in eval mode. equal: whether logits are those expected.
    """
    text = small.config.get_text_config()
    padding_id = getattr(text, "pad_token_id", None)
    if not isinstance(padding_id, int) or not 0 <= padding_id < text.vocab_size or max_length < _LEAST:
        return form
    ended = small.config.is_encoder_decoder  # its head looks for an end token
    sequences = holding_padding(make_sequences(small.config, max_length), padding_id, at_ends=not ended)
    with torch.no_grad():
        padded = PaddedModel(small, "eager")
        plain = torch.cat([padded(padded_rows([sequence], small.config)).logits for sequence in sequences])
        rules = (False, True) if form.first_position == padding_id + 1 else (False,)
        for skips_padding in rules:
            tried = replace(form, skips_padding=skips_padding)
            row = packed_row(sequences, small.config, max_length)
            found = PackedModel(small, tried, plain=True)(row).logits[: len(sequences)]
            if equal(found, plain):
                return tried
    return None


def holding_padding(sequences: Sequence[np.ndarray], padding_id: int, *, at_ends: bool = True) -> list[np.ndarray]:
    """Copies of the sequences that are long enough, with padding tokens in them, and at the end of every second one
    if `at_ends`."""
    found = [sequence.copy() for sequence in sequences if len(sequence) >= _LEAST]
    for number, sequence in enumerate(found):
        sequence[[3, 5]] = padding_id
        if number % 2 and at_ends:
            sequence[-1] = padding_id
    return found
