"""Bytes that each layer keeps of a token for its backward pass, and seconds that it takes forward, as measured.

Layers are called where gradient checkpointing would call them, with what a backward pass is promised looked at: each
storage once, without weights and without what is handed to all layers. Two passes of different size tell what grows
with the tokens from what does not, such as casts of weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from brimful.kernels.layout import Inputs
from brimful.models.packed.offload import AHEAD
from brimful.models.packed.recompute import keep_all, recompute

#: Passes that seconds are the least of.
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps of a token besides its input, those of its input, and its seconds forward."""

    kept: float
    input: float
    forward_s: float


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that a model keeps for its backward pass.

    layers: of a token. outside: of a token, outside of layers. fixed: whatever the tokens.
    """

    layers: tuple[LayerActivations, ...]
    outside: float
    fixed: int

    def bytes(self, tokens: int, recomputed: Collection[int] = (), offloaded: int = 0) -> float:
        """Most bytes that a micro-batch keeps at a time. recomputed: numbers of layers. offloaded: how many are.

        A layer that is recomputed is whole when its turn comes, and what later layers kept is gone by then. Those that
        are offloaded are back two layers before their turn.
        """
        own = [0.0 if number in recomputed else layer.kept for number, layer in enumerate(self.layers)]
        inputs = [layer.input for layer in self.layers]
        here = min(offloaded, len(own) - AHEAD) if offloaded else 0
        most = sum(own[here:]) + sum(inputs[here:])
        for number in recomputed:
            most = max(most, sum(own[:number]) + sum(inputs[: number + 1]) + self.layers[number].kept)
        for end in range(len(own), 0, -1) if here else ():
            first = max(0, min(here, end - AHEAD - 1))
            most = max(most, sum(own[first:end]) + sum(inputs[first:end]))
        return self.fixed + tokens * (self.outside + most)


def measure_activations(
    layers: nn.ModuleList, run: Callable[[Inputs], Tensor], sizes: Sequence[Inputs], weights: set[int],
    device: torch.device,
) -> Activations:  # fmt: skip
    """Measure a model in train mode. run: its forward pass. sizes: a smaller input and a larger one. weights: addresses
    of the storages of parameters and buffers."""
    small, large = (_Pass(len(layers), weights, device) for _ in range(2))
    try:
        for inputs, measured in zip(sizes, (small, large), strict=True):
            measured.run(layers, run, inputs)
        for _ in range(_REPEATS - 1):
            large.run(layers, run, sizes[1])
    finally:
        keep_all(list(layers))
    tokens = [inputs.num_tokens for inputs in sizes]
    more = tokens[1] - tokens[0]
    kept = [(b - a) / more for a, b in zip(small.kept, large.kept, strict=True)]
    inputs_kept = [(b - a) / more for a, b in zip(small.inputs, large.inputs, strict=True)]
    outside = (large.outside - small.outside) / more
    seconds = _alike([(type(layer).__name__, round(each)) for layer, each in zip(layers, kept, strict=True)], large.s)
    fixed = large.outside + sum(large.kept) + sum(large.inputs) - (outside + sum(kept) + sum(inputs_kept)) * tokens[1]
    return Activations(
        layers=tuple(
            LayerActivations(kept=max(k, 0.0), input=max(i, 0.0), forward_s=s / tokens[1])
            for k, i, s in zip(kept, inputs_kept, seconds, strict=True)
        ),
        outside=max(outside, 0.0),
        fixed=max(round(fixed), 0),
    )


def _alike(kinds: Sequence[object], seconds: Sequence[float]) -> list[float]:
    """Seconds of each layer, those of one kind the same: layers of one code differ by noise alone."""
    by_kind = {kind: median(s for other, s in zip(kinds, seconds, strict=True) if other == kind) for kind in set(kinds)}
    return [by_kind[kind] for kind in kinds]


class _Pass:
    """Forward passes over one input: bytes kept by layer, of inputs by layer and outside, and seconds by layer."""

    def __init__(self, depth: int, weights: set[int], device: torch.device) -> None:
        self._weights, self._device = weights, device
        self.kept, self.inputs, self.outside = [0] * depth, [0] * depth, 0
        self.s = [float("inf")] * depth

    def run(self, layers: nn.ModuleList, run: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
        """One pass more."""
        marks: list[tuple[int, Any, Any]] = []
        recompute(list(layers), range(len(layers)))
        for number, layer in enumerate(layers):
            measured: Any = layer
            measured._gradient_checkpointing_func = partial(self._call, number, marks)
        outside: dict[int, int] = {}
        with torch.enable_grad(), saved_tensors_hooks(partial(self._pack, outside, self._weights), _same):
            run(inputs)
        self.outside = sum(outside.values())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for number, began, ended in marks:
            seconds = ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
            self.s[number] = min(self.s[number], seconds)

    def _call(
        self, number: int, marks: list[tuple[int, Any, Any]], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        named = {**function.keywords} if isinstance(function, partial) else {}
        given = [leaf for leaf in pytree.tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
        places = {x.untyped_storage().data_ptr() for x in given}
        self.inputs[number] = sum(x.nbytes for x in given if x.requires_grad)
        kept: dict[int, int] = {}
        began = self._now()
        with saved_tensors_hooks(partial(self._pack, kept, self._weights | places), _same):
            found = function(*arguments)
        marks.append((number, began, self._now()))
        self.kept[number] = sum(kept.values())
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _pack(found: dict[int, int], known: set[int], x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return x.detach()


def _same(x: Tensor) -> Tensor:
    return x
