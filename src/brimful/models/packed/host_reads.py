"""Finds out whether a model's code needs the host to look at numbers of the device, copies the host's own there, or
draws on the host.

Such a forward cannot be recorded as it is: the host would have to wait, and what it decided or drew would be frozen.
One layer of each kind is traced forward and backward on tensors without numbers, where looking at one is an error, and
copying to them is seen. What is looked at or copied may be the same in all batches of one shape, and is then taken for
granted (`host_decisions`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brimful.core.errors import printable
from brimful.hardware.process_settings import unchanged_random_streams
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layout import PaddedInputs, map_tensors, padded_inputs
from brimful.models.half_experts import ExpertByExpert, hold_experts_in_half, host_multiplies_experts
from brimful.models.model_stats import layer_lists
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.host_questions import HostNeededError
from brimful.models.packed.long_window import shorten_window
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of
from brimful.models.packed.replaced_buffers import places_of, replaced

#: Attributes of modules with a probability by which the host leaves out whole layers.
_DRAWN = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Answer to whether padded passes of a model can be recorded and replayed.

    why_not: the reason that they cannot; None if they can. with_decisions: they can with `HostDecisions` alone, which
    also keep buffers in place, and masks that transformers leaves out of a pass over full rows, but not of a capture.
    compilable: whether the host is needed between layers at most, and not in them. decisions: of one batch, if the host
    has to make some.
    """

    why_not: str | None = None
    with_decisions: bool = False
    compilable: bool = True
    decisions: HostDecisions | None = field(default=None, compare=False, repr=False)


@unchanged_random_streams()
def how_recorded(
    model: Any, max_length: int, *, training: bool, attention: str = "sdpa", half: torch.dtype | None = None
) -> Recording:
    """Return whether a padded pass of `model` can be recorded, and with what.

    max_length: longest sequence there can be. attention: as of `PaddedModel`. half: dtype that autocast is in, in that
    pass; weights may be held in it already. The model is not changed.
    """
    if training and (drawn := _left_out_at_random(model)):
        return Recording(why_not=f"the host draws which layers are left out ({drawn})")
    small = one_layer_of_each_kind(model).cpu().eval()
    shorten_window(small, max_length)
    small.train(training)
    if half is torch.bfloat16:
        hold_experts_in_half(small)
    if host_multiplies_experts(small):
        return Recording(why_not="the host must read how many tokens each expert has, but for products in bf16")
    try:
        # Once, as some change themselves in their first pass. What a CPU cannot compute may be traced all the same.
        with ExpertByExpert(), torch.no_grad(), _autocast(half), suppress(Exception):
            PaddedModel(small, attention)(_batches(small.config, max_length)[0])
        keeps, before = _must_be_kept(small, max_length, attention, half), _host_streams()
        why_not = _why_the_host(small, None, max_length, attention)
        if _host_streams() != before:
            return Recording(why_not="the host draws random numbers in each pass")
        if why_not is None:
            return Recording(with_decisions=keeps)
        decisions = _decisions(small, max_length, attention, half)
        if decisions is None:
            return Recording(why_not=f"{why_not}, and finds others in other batches")
        left = _why_the_host(small, decisions, max_length, attention)
        if left is not None:
            return Recording(why_not=left)
        in_layers = _why_the_host(small, decisions, max_length, attention, pause_in_layers=True)
        return Recording(with_decisions=True, compilable=in_layers is None, decisions=decisions)
    except Exception as failure:
        return Recording(why_not=f"it could not be traced: {type(failure).__name__}: {printable(failure, 100)}")


def _must_be_kept(small: Any, max_length: int, attention: str, half: torch.dtype | None) -> bool:
    """Return whether a pass replaces buffers, or leaves out masks of full rows."""
    places, asked = places_of(small), HostDecisions()
    sequences = make_sequences(small.config, max_length)
    longest = max(sequences, key=len)
    full = padded_inputs([longest] * 2, 2, len(longest), padding_id=padding_id_of(small.config))
    alone = torch.random.fork_rng(devices=[])
    with ExpertByExpert(), torch.no_grad(), _autocast(half), alone, suppress(Exception), asked.recorded(None):
        PaddedModel(small, attention)(full)
    return asked.asked_of_masks or bool(replaced(places))


#: Devices of tensors without numbers, and what weights are cast to. Only such as are not on the CPU show what is copied
#: to them; some operators are for half precision there, and some for the CPU only.
_TRACED = (("meta", None), ("meta", torch.bfloat16), ("cpu", None))


def _why_the_host(
    small: Any, decisions: HostDecisions | None, max_length: int, attention: str, *, pause_in_layers: bool = False
) -> str | None:
    """Return what the host is needed for in one pass, backward too where the model is in training; None for nothing.

    decisions: made of such a pass before. pause_in_layers: they are not for what is in layers.
    """
    failure: Exception | None = None
    for name, dtype in _TRACED:
        device, traced = torch.device(name), copy.deepcopy(small).to(dtype)
        execution = PaddedModel(traced, attention)
        if pause_in_layers:
            for layer in (layer for layers in layer_lists(traced) for layer in layers):
                layer._compiled_call_impl = layer._call_impl
        granted = HostDecisions(device) if decisions is None else decisions.on(device)
        try:
            inputs = _batches(traced.config, max_length)[0]
            trace_pass(traced, execution, granted, inputs, decided=decisions is not None)
        except HostNeededError as needed:
            return str(needed)
        except (DataDependentOutputException, DynamicOutputShapeException) as read:
            return f"the host must look at numbers of the device in each pass ({printable(read.func)})"
        except Exception as failed:  # whatever a model's code does not do with such tensors
            failure = failed
            continue
        return None
    assert failure is not None
    raise failure


def trace_pass(
    traced: Any, execution: PaddedModel, granted: HostDecisions, inputs: PaddedInputs, *, decided: bool,
    watch: AbstractContextManager[Any] | None = None,
) -> None:  # fmt: skip
    """One pass on tensors without numbers, backward too where the model is in training. Its own tensors are replaced.

    decided: the host's decisions are `granted`, and none are refused in the forward pass. watch: is entered for it.
    """
    device, backward = granted.device, traced.training
    host: Any = _HostIsReal()
    watch = nullcontext() if watch is None else watch
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, host, torch.set_grad_enabled(backward):

        def without_numbers(tensor: Tensor) -> Tensor:
            found: Tensor = mode.from_tensor(tensor.detach().to(device))
            return found

        for module in traced.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    there = nn.Parameter(without_numbers(parameter), requires_grad=parameter.requires_grad)
                    module._parameters[name] = there
            module._buffers.update({n: without_numbers(b) for n, b in module._buffers.items() if b is not None})
        given = map_tensors(inputs, without_numbers)
        with watch:
            with granted.traced(None) if decided else granted.refused():
                logits = execution(given, ForwardContext(outside=granted.paused)).logits
            if backward:
                with granted.refused():
                    logits.sum().backward()  # type: ignore[no-untyped-call]


class _HostIsReal(TorchDispatchMode):
    """Operators that neither are given tensors without numbers nor make some work with numbers, as in a capture."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if on_host and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _autocast(half: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", half, enabled=half is not None)


def _decisions(small: Any, max_length: int, attention: str, half: torch.dtype | None) -> HostDecisions | None:
    """Return those of one batch, None if another one of the same shape does not have the same, or its own logits."""
    first, other = _batches(small.config, max_length)
    found, execution = HostDecisions(), PaddedModel(small, attention)
    try:
        with ExpertByExpert(), torch.no_grad(), _autocast(half), torch.random.fork_rng(devices=[]):
            with found.recorded(None):
                execution(first)
            torch.default_generator.manual_seed(0)
            expected = execution(other).logits
            torch.default_generator.manual_seed(0)
            with found.granted(None) as truths:
                logits = execution(other).logits
    except RuntimeError:
        return None
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
    """State of the streams that host code draws from. What torch draws for tensors without numbers is not among it: a
    graph has the device draw that at each replay."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    own = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), own, kind, keys.tobytes(), *rest  # type: ignore[union-attr]
