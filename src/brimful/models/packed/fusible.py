"""Counts what a compiler can fuse in the layers of a padded training step: operators that are no products of matrices,
and the bytes that they read and write.

A step that is captured and not compiled runs each of them as a kernel of its own, which takes as long as its bytes, and
a microsecond or two at the least. What that comes to differs from model to model more than anything that a
configuration says: layers of one width and number take 9 ms of it in one mixture of experts and 20 in another. So the
step itself is traced, at the shape of the run's batches, on tensors without numbers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brimful.kernels.layout import padded_inputs
from brimful.models.half_experts import hold_experts_in_half
from brimful.models.model_stats import layer_lists
from brimful.models.packed.check_inputs import make_sequences, one_layer_of_each_kind, random_sequences
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.host_reads import Recording, trace_pass
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of

#: Bytes a second of an H200, as a copy reaches it, and seconds of its smallest kernel in a graph.
_BYTES_PER_S, _KERNEL_S = 4.2e12, 2e-6
#: What no compiler fuses with what is beside it: products and attention by their names, and what moves nothing.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "scaled_dot_product", "embedding")
_MOVES_NOTHING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"})
#: Operators from which the trace is given up: a loop over tokens, which no compiler is quick with either.
_MOST = 50_000


@dataclass(frozen=True, kw_only=True)
class Fusible:
    """What can be fused in one step. seconds: of all layers' kernels on an H200. operators: of a layer, in the mean."""

    seconds: float
    operators: int


def fusible_of_step(
    model: Any, num_rows: int, length: int, recording: Recording, *, attention: str = "sdpa",
    half: torch.dtype | None = None,
) -> Fusible | None:  # fmt: skip
    """Count in a step of `num_rows` rows of `length` tokens; None where it cannot be traced. The model is not changed.

    recording: how its steps are recorded. attention: as of `PaddedModel`. half: dtype that autocast is in.
    """
    was, device = model.config._attn_implementation, torch.device("meta")
    small = one_layer_of_each_kind(model).cpu().train()
    share = sum(map(len, layer_lists(small))) / max(1, sum(map(len, layer_lists(model))))
    if half is torch.bfloat16:
        hold_experts_in_half(small)
    granted = HostDecisions(device) if recording.decisions is None else recording.decisions.on(device)
    traced_rows = len(make_sequences(small.config, length))  # as many as there are decisions of
    ids = random_sequences(small.config, [length] * traced_rows)
    inputs = padded_inputs(ids, traced_rows, length, padding_id=padding_id_of(small.config))
    counted, done = _Counted(num_rows / traced_rows), False
    try:
        with suppress(Exception):  # whatever a model's code does not do with such tensors
            trace_pass(small, PaddedModel(small, attention), granted, inputs, decided=True, watch=counted)
            done = True
    finally:
        model.config._attn_implementation = was
    layers = sum(map(len, layer_lists(small)))
    if not done or not layers:
        return None
    return Fusible(seconds=counted.seconds / share, operators=counted.operators // layers)


class _Counted(TorchDispatchMode):
    """Operators that a compiler can fuse. steps_rows: rows of the step for each that is traced."""

    def __init__(self, steps_rows: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds, self.operators, self._steps_rows = 0.0, 0, steps_rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function._overloadpacket.__name__
        if function.is_view or function.namespace == "prim" or name in _MOVES_NOTHING or _is_product(name):
            return made
        moved = sum(
            leaf.numel() * leaf.element_size() for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)
        )
        self.seconds += max(moved * self._steps_rows / _BYTES_PER_S, _KERNEL_S)
        self.operators += 1
        if self.operators > _MOST:
            raise RuntimeError("the step has more operators than are traced")
        return made


def _is_product(name: str) -> bool:
    return any(part in name for part in _PRODUCTS)
