"""Counts what a compiler can fuse in the layers of a padded training step: operators other than products of matrices,
and the bytes that they read and write.

A step that is captured and not compiled runs each of them as a kernel of its own, which takes as long as its bytes, and
a microsecond or two at the least. No size in a configuration tells how many there are: four layers of one width come to
9 ms in one mixture of experts and to 20 in another. So a micro-batch of the run is traced on tensors without numbers,
one layer of each kind.

Bytes are those of fp32, whatever the run's precision: autocast halves some and adds casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brimful.hardware.process_settings import unchanged_random_streams
from brimful.kernels.layout import padded_inputs
from brimful.models.half_experts import hold_experts_in_half
from brimful.models.model_stats import layer_lists
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind, random_sequences
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.host_reads import Recording, trace_pass
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of

#: Bytes a second of an H200, as a copy reaches it, and seconds of its smallest kernel in a graph.
_BYTES_PER_S, _KERNEL_S = 4.2e12, 2e-6
#: What no compiler fuses with what is beside it: products and attention, by a part of their names; and what moves
#: nothing.
_PRODUCTS = ("mm", "convolution", "scaled_dot_product", "embedding")
_MOVES_NOTHING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"})
#: Operators from which the trace is given up, after ten seconds: a loop over tokens, which no compiler is quick with.
_MOST = 15_000


@dataclass(frozen=True, kw_only=True)
class Fusible:
    """Kernels of one micro-batch that can be fused. seconds: of all layers' on an H200. operators: of a layer, in the
    mean of those that were traced, as a compiler meets it, with transformers' own scans of states."""

    seconds: float
    operators: int


def fusible_of_pass(
    model: Any, num_rows: int, length: int, recording: Recording, *, attention: str = "sdpa",
    half: torch.dtype | None = None,
) -> Fusible | None:  # fmt: skip
    """Count in a forward and backward pass over `num_rows` rows of `length` tokens; None where it cannot be traced. The
    model is not changed.

    recording: how its steps are recorded. attention: as of `PaddedModel`. half: dtype that experts multiply in.
    """
    device, lists = torch.device("meta"), layer_lists(model)
    small = one_layer_of_each_kind(model).cpu().train()
    if half is torch.bfloat16:
        hold_experts_in_half(small)
    granted = HostDecisions(device) if recording.decisions is None else recording.decisions.on(device)
    traced_rows = len(make_sequences(small.config, length))  # as many as there are decisions of
    ids = random_sequences(small.config, [length] * traced_rows)
    inputs = padded_inputs(ids, traced_rows, length, padding_id=padding_id_of(small.config))

    def counted(execution: PaddedModel) -> Fusible | None:
        operators = _Counted(layer_lists(small), num_rows / traced_rows)
        with operators.layers_seen():
            trace_pass(small, execution, granted, inputs, decided=True, watch=operators)
        return operators.of_all([len(layers) for layers in lists])

    with suppress(Exception), unchanged_random_streams():  # whatever a model's code does not do with such tensors
        execution = PaddedModel(small, attention)
        found = counted(execution)
        if found is None or execution.scans is None:
            return found
        as_compiled = counted(PaddedModel(small, attention, own_scans=False))
        return as_compiled and replace(found, operators=as_compiled.operators)
    return None


class _Counted(TorchDispatchMode):
    """Operators that a compiler can fuse, by the layer that they are in.

    A backward operator is in the layer whose forward pass made its node: nodes are numbered in their order. steps_rows:
    rows of the micro-batch for each that is traced.
    """

    def __init__(self, lists: list[nn.ModuleList], steps_rows: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = [(number, layer) for number, layers in enumerate(lists) for layer in layers]
        self._steps_rows = steps_rows
        self._within: int | None = None
        self._nodes: list[tuple[range, int]] = []
        self._seconds, self._operators = [0.0] * len(self._layers), [0] * len(self._layers)

    @contextmanager
    def layers_seen(self) -> Iterator[None]:
        """Within, layers tell when they begin and end."""
        handles = []
        for place, (_, layer) in enumerate(self._layers):
            handles.append(layer.register_forward_pre_hook(lambda *_, place=place: self._begin(place)))
            handles.append(layer.register_forward_hook(lambda *_, place=place: self._end(place)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def of_all(self, lengths: list[int]) -> Fusible | None:
        """Of lists of layers of these lengths, of which the first ones were traced; None where no layer ran.

        The last one that was traced stands for the others.
        """
        seconds, ran = 0.0, [place for place, operators in enumerate(self._operators) if operators]
        for number, length in enumerate(lengths):
            places = [place for place in ran if self._layers[place][0] == number]
            if places:
                seconds += sum(self._seconds[place] for place in places)
                seconds += self._seconds[places[-1]] * (length - len(places))
        if not ran:
            return None
        return Fusible(seconds=seconds, operators=round(sum(self._operators) / len(ran)))

    def _begin(self, place: int) -> None:
        self._within, self._first = place, _next_node()

    def _end(self, place: int) -> None:
        self._within = None
        self._nodes.append((range(self._first, _next_node()), place))

    def _place(self) -> int | None:
        """The layer that the operator is in, if it is in one."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._within
        number = node._sequence_nr()
        return next((place for numbers, place in self._nodes if number in numbers), None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = function(*args, **(kwargs or {})), function._overloadpacket.__name__
        if function.is_view or function.namespace == "prim" or name in _MOVES_NOTHING or _is_product(name):
            return made
        if (place := self._place()) is None:
            return made
        moved = sum(
            leaf.numel() * leaf.element_size() for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)
        )
        self._seconds[place] += max(moved * self._steps_rows / _BYTES_PER_S, _KERNEL_S)
        self._operators[place] += 1
        if sum(self._operators) > _MOST:
            raise RuntimeError("a pass has more operators than are traced")
        return made


def _next_node() -> int:
    """Number of the autograd node that is made next, in this thread."""
    with torch.enable_grad():
        made = torch.ones((), requires_grad=True) * 1
    assert made.grad_fn is not None
    return made.grad_fn._sequence_nr() + 1


def _is_product(name: str) -> bool:
    return any(part in name for part in _PRODUCTS)
