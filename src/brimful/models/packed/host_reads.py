"""Finds out whether a model's code needs the host to look at numbers of the device, or draws on the host.

Such a forward cannot be recorded as it is: the host would have to wait, and what it decided or drew would be frozen.
One layer of each kind is traced forward and backward on tensors without numbers, where looking at one is an error. What
is looked at may be the same in all batches of one shape, and is then taken for granted (`host_decisions`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
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
from brimful.kernels.layout import PaddedInputs, map_tensors, padded_inputs
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of

#: Attributes of modules with a probability by which the host leaves out whole layers.
_DRAWN = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Answer to whether padded passes of a model can be recorded and replayed.

    why_not: the reason that they cannot; None if they can. with_decisions: they can with `HostDecisions` alone.
    """

    why_not: str | None = None
    with_decisions: bool = False


def how_recorded(model: Any, max_length: int, *, training: bool) -> Recording:
    """Return whether a padded pass of `model` can be recorded, and with what.

    max_length: longest sequence there can be. The model is not changed.
    """
    if training and (drawn := _left_out_at_random(model)):
        return Recording(why_not=f"the host draws which layers are left out ({drawn})")
    was = model.config._attn_implementation
    small = one_layer_of_each_kind(model).cpu().train(training)
    try:
        before = _host_streams()
        why_not = _what_is_read(copy.deepcopy(small), None, max_length, backward=training)
        if _host_streams() != before:
            return Recording(why_not="the host draws random numbers in each pass")
        if why_not is None or not training:
            return Recording(why_not=why_not)
        decisions = _decisions(small, max_length)
        if decisions is None:
            return Recording(why_not=f"{why_not}, and finds others in other batches")
        left = _what_is_read(small, decisions, max_length, backward=True)
        return Recording(why_not=left, with_decisions=left is None)
    except Exception as failure:  # whatever a model's code does not do with such tensors
        return Recording(why_not=f"it could not be traced: {type(failure).__name__}: {printable(failure, 100)}")
    finally:
        model.config._attn_implementation = was


def _what_is_read(small: Any, decisions: HostDecisions | None, max_length: int, *, backward: bool) -> str | None:
    """Return what the host must know of the device in one pass, None if nothing, with tensors that have no numbers.

    decisions: made of such a pass before. The module's own tensors are replaced.
    """
    inputs = _batches(small.config, max_length)[0]
    execution = PaddedModel(small)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(backward):
        for module in small.modules():
            owned: tuple[Any, ...] = (module._parameters, module._buffers)
            for tensors in owned:
                tensors.update({name: mode.from_tensor(t) for name, t in tensors.items() if t is not None})
        try:
            with nullcontext() if decisions is None else decisions.granted(None):
                logits = execution(map_tensors(inputs, mode.from_tensor)).logits
            if backward:
                logits.sum().backward()  # type: ignore[no-untyped-call]
        except (DataDependentOutputException, DynamicOutputShapeException) as read:
            return f"the host must look at numbers of the device in each pass ({printable(read.func)})"
    return None


def _decisions(small: Any, max_length: int) -> HostDecisions | None:
    """Return those of one batch, None if another one of the same shape does not have the same, or its own logits."""
    first, other = _batches(small.config, max_length)
    found, execution, modes = HostDecisions(), PaddedModel(small), small.training
    small.eval()
    try:
        with torch.no_grad():
            with found.recorded(None):
                execution(first)
            expected = execution(other).logits
            with found.granted(None) as truths:
                logits = execution(other).logits
    except RuntimeError:
        return None
    finally:
        small.train(modes)
    return found if all(map(bool, truths)) and torch.equal(logits, expected) else None


def _batches(config: Any, max_length: int) -> tuple[PaddedInputs, PaddedInputs]:
    """Two batches of one shape; the first one has a longer sequence than the other. All end as they should."""
    sequences = make_sequences(config, max_length)
    longest, padding_id = max(map(len, sequences)), padding_id_of(config)
    others = [sequence[-max(2, len(sequence) - 3) :] for sequence in sequences[::-1]]
    return tuple(padded_inputs(each, len(each), longest, padding_id=padding_id) for each in (sequences, others))  # type: ignore[return-value]


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
