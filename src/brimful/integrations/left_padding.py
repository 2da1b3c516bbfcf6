"""A check that a model answers rows padded on the left as it answers them without padding.

Most decoders do: their head reads the last token, and positions are distances. A head that reads the first column, or a
table of positions, does not.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.core.tolerances import TOLERANCES
from brimful.engine.sequence_lengths import DEFAULT_MAX_LENGTH
from brimful.hardware.process_settings import matmul_precision
from brimful.integrations.packed_execution import no_autocast
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind, wake
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of
from brimful.models.packed.training_check import without_dropout
from brimful.models.packed.tried_row import relative_error

_found: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def left_is_right(model: Any) -> bool:
    """Return True if rows padded on the left have the answers of rows padded on the right. Tried once for a model.

    On a copy with few layers, in fp32 on the CPU with eager attention.
    """
    if model not in _found:
        try:
            _found[model] = not model.config.is_encoder_decoder and _same(model)
        except Exception:  # a copy that cannot be made, or does not run: nothing is shown
            _found[model] = False
    return _found[model]


def _same(model: Any) -> bool:
    with torch.inference_mode(False), torch.no_grad(), no_autocast(), matmul_precision("highest"):
        small = one_layer_of_each_kind(model).to("cpu", torch.float32).eval()
        wake(small)
        sequences = [ids[:40] for ids in make_sequences(small.config, DEFAULT_MAX_LENGTH)]
        with without_dropout(small):
            plain = PaddedModel(small, "eager").model
            left, right = (_logits(plain, sequences, on_the_left=side) for side in (True, False))
    return relative_error(left, right) <= TOLERANCES["fp32"].logits


def _logits(model: Any, sequences: list[np.ndarray], *, on_the_left: bool) -> Tensor:
    longest = max(map(len, sequences))
    ids_BL = np.full((len(sequences), longest), padding_id_of(model.config), dtype=np.int64)
    mask_BL = np.zeros_like(ids_BL)
    for row, ids in enumerate(sequences):
        place = slice(longest - len(ids), None) if on_the_left else slice(len(ids))
        ids_BL[row, place], mask_BL[row, place] = ids, 1
    logits: Tensor = model(input_ids=torch.from_numpy(ids_BL), attention_mask=torch.from_numpy(mask_BL)).logits
    return logits


def is_on_the_left(mask_BL: Any) -> bool:
    """Return True if padding is on the left of some row and on the right of none. mask_BL: a tensor or an array."""
    mask = mask_BL.detach().cpu().numpy() if isinstance(mask_BL, Tensor) else np.asarray(mask_BL)
    whole = mask.ndim == 2 and mask.size
    return bool(whole and mask[:, -1].all() and not mask[:, 0].all() and (mask[:, 1:] >= mask[:, :-1]).all())
