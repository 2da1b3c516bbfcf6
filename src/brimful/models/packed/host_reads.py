"""Finds out whether a model's code needs the host to look at numbers of the device, or draws on the host.

Such a forward cannot be recorded: the host would have to wait, and what it decided or drew would be frozen. One layer
of each kind is traced forward and backward on tensors without numbers, where looking at one is an error.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from brimful.core.errors import printable
from brimful.kernels.layout import map_tensors
from brimful.models.packed.check_inputs import make_check_inputs, one_layer_of_each_kind
from brimful.models.packed.packed_forward import PaddedModel

#: Attributes of modules with a probability by which the host leaves out whole layers.
_DRAWN = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")


def why_not_recorded(model: Any, max_length: int, *, training: bool) -> str | None:
    """Return the reason that a padded pass of `model` cannot be recorded and replayed; None if there is none.

    max_length: longest sequence there can be. The model is not changed.
    """
    if training and (drawn := _left_out_at_random(model)):
        return f"the host draws which layers are left out ({drawn})"
    was = model.config._attn_implementation
    small = one_layer_of_each_kind(model).cpu().train(training)
    try:
        before = _host_streams()
        _trace(small, max_length, backward=training)
        return None if _host_streams() == before else "the host draws random numbers in each pass"
    except (DataDependentOutputException, DynamicOutputShapeException) as read:
        return f"the host must look at numbers of the device in each pass ({printable(read.func)})"
    except Exception as failure:  # whatever a model's code does not do with such tensors
        return f"it could not be traced: {type(failure).__name__}: {printable(failure, 100)}"
    finally:
        model.config._attn_implementation = was


def _trace(small: nn.Module, max_length: int, *, backward: bool) -> None:
    """One pass on tensors without numbers. The module's own are replaced by such."""
    inputs = make_check_inputs(small.config, max_length)
    execution = PaddedModel(small)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(backward):
        for module in small.modules():
            owned: tuple[Any, ...] = (module._parameters, module._buffers)
            for tensors in owned:
                tensors.update({name: mode.from_tensor(t) for name, t in tensors.items() if t is not None})
        logits = execution(map_tensors(inputs, mode.from_tensor)).logits
        if backward:
            logits.sum().backward()  # type: ignore[no-untyped-call]


def _left_out_at_random(model: nn.Module) -> str | None:
    for module in model.modules():
        found: Mapping[str, Any] = vars(module)
        for name in _DRAWN:
            if isinstance(found.get(name), float) and found[name] > 0:
                return f"{name} {found[name]:g}"
    return None


def _host_streams() -> tuple[object, ...]:
    """State of the streams that host code draws from, other than torch's: that one draws nothing for such tensors."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, keys.tobytes(), *rest  # type: ignore[union-attr]
