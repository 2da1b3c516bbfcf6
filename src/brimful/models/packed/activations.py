"""Bytes that each layer keeps of a token for its backward pass, and seconds that it takes forward, as measured.

Layers are called where gradient checkpointing would call them, with what a backward pass is promised looked at: each
storage once, without weights and without what is handed to all layers. What one layer keeps is gone before the next
one's turn. Two passes of different size tell what grows with the tokens from what does not, such as casts of weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from brimful.kernels.layout import Inputs
from brimful.kernels.remade import Ending, Maker, Remade
from brimful.models.packed.offload import AHEAD, Moves
from brimful.models.packed.recompute import keep_all, recompute
from brimful.models.packed.remade_layers import told
from brimful.models.packed.ways import Way

#: Passes that seconds are the least of.
_REPEATS = 3
#: Cycles that a GPU waits before each measurement, about 2 ms: the host has launched all of it by then, and what is
#: measured is the GPU's time alone.
_LAUNCHING = 4_000_000


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps of a token besides its input, those of its input, and its seconds forward.

    remade: bytes less where results of activation functions are made again, in remade_s. ending: bytes that its last
    function needs of a first call, ending_s: seconds that a second call takes less with them.
    """

    kept: float
    input: float
    forward_s: float
    remade: float = 0.0
    remade_s: float = 0.0
    ending: float = 0.0
    ending_s: float = 0.0

    def left(self, way: Way) -> float:
        """Bytes of a token that are kept besides the input."""
        return (self.kept, self.kept - self.remade, min(self.ending, self.kept), 0.0)[way]

    def again_s(self, way: Way) -> float:
        """Seconds of a token for what is computed again."""
        return (0.0, self.remade_s, max(0.0, self.forward_s - self.ending_s), self.forward_s)[way]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that a model keeps for its backward pass.

    layers: of a token. outside: of a token, outside of layers. fixed: whatever the tokens.
    """

    layers: tuple[LayerActivations, ...]
    outside: float
    fixed: int

    def bytes(self, tokens: int, ways: Mapping[int, Way] | None = None, offloaded: int = 0) -> float:
        """Most bytes that a micro-batch keeps at a time. ways: of layers, by number, that are not kept whole.
        offloaded: how many are.

        A layer that is computed again is whole when its turn comes, and what later layers kept is gone by then. Those
        that are offloaded come and go as `Moves` has it.
        """
        ways = ways or {}
        own = [layer.left(ways.get(number, Way.KEPT)) for number, layer in enumerate(self.layers)]
        inputs = [layer.input for layer in self.layers]
        moved = min(offloaded, len(own) - AHEAD) if offloaded else 0
        sizes = [sum(pair) for pair in zip(own, inputs, strict=True)]
        most = Moves.of(sizes, moved).most(sizes) if moved else sum(sizes)
        before = [0.0, *itertools.accumulate(sizes)]
        for number in ways:
            most = max(most, before[number] + inputs[number] + self.layers[number].kept)
        return self.fixed + tokens * (self.outside + most)


def measure_activations(
    layers: nn.ModuleList, run: Callable[[Inputs], Tensor], sizes: Sequence[Inputs], weights: set[int],
    device: torch.device,
) -> Activations:  # fmt: skip
    """Measure a model in train mode. run: its forward pass. sizes: a smaller input and a larger one. weights: addresses
    of the storages of parameters and buffers."""
    small, large = (_Pass(len(layers), weights, device, timed=timed) for timed in (False, True))
    try:
        small.run(layers, run, sizes[0])
        for _ in range(_REPEATS):
            large.run(layers, run, sizes[1])
    finally:
        keep_all(list(layers))
    tokens = [inputs.num_tokens for inputs in sizes]
    more = tokens[1] - tokens[0]
    found = []
    for layer, fewer, most in zip(layers, small.layers, large.layers, strict=True):
        grown = {name: max(0.0, (most.bytes[name] - fewer.bytes[name]) / more) for name in most.bytes}
        taken = {name: s / tokens[1] for name, s in most.seconds.items()}
        kind = (type(layer).__name__, round(grown["kept"]))
        found.append((kind, {**grown, **taken, "ending_s": taken["forward_s"] - taken["ending_s"]}))
    alike = _alike(found, ("forward_s", "remade_s", "ending_s"))
    outside = (large.outside - small.outside) / more
    by_token = outside + sum(each["kept"] + each["input"] for each in alike)
    fixed = large.outside + sum(each.bytes["kept"] + each.bytes["input"] for each in large.layers)
    return Activations(
        layers=tuple(LayerActivations(**each) for each in alike),
        outside=max(outside, 0.0),
        fixed=max(round(fixed - by_token * tokens[1]), 0),
    )


def _alike(found: Sequence[tuple[object, dict[str, float]]], names: Sequence[str]) -> list[dict[str, float]]:
    """Measurements with the seconds of each layer, those of one kind the same: layers of one code differ by noise
    alone."""
    return [
        {**measured, **{n: max(0.0, median(other[n] for of, other in found if of == kind)) for n in names}}
        for kind, measured in found
    ]


class _LayerMeasured:
    """Bytes and seconds of one layer in passes over one input: the least seconds of all of them."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(("kept", "input", "remade", "ending"), 0)
        self.seconds = dict.fromkeys(("forward_s", "remade_s", "ending_s"), float("inf"))


class _Pass:
    """Forward passes over one input: what layers keep, and what is kept outside of them."""

    def __init__(self, depth: int, weights: set[int], device: torch.device, *, timed: bool) -> None:
        self._weights, self._device, self._timed = weights, device, timed
        self.layers, self.outside = [_LayerMeasured() for _ in range(depth)], 0

    def run(self, layers: nn.ModuleList, run: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
        """One pass more."""
        marks: list[tuple[int, str, Any, Any]] = []
        recompute(list(layers), range(len(layers)))
        for number, layer in enumerate(layers):
            measured: Any = layer
            measured._gradient_checkpointing_func = partial(self._call, number, layer, marks)
        outside: dict[int, int] = {}
        with torch.enable_grad(), saved_tensors_hooks(partial(self._pack, outside, self._weights), _same):
            run(inputs)
        self.outside = sum(outside.values())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for number, name, began, ended in marks:
            seconds = ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
            known = self.layers[number].seconds
            known[name] = min(known[name], seconds)

    def _call(
        self, number: int, layer: nn.Module, marks: list[tuple[int, str, Any, Any]], function: Callable[..., Any],
        *arguments: Any,
    ) -> Any:  # fmt: skip
        named = {**function.keywords} if isinstance(function, partial) else {}
        given = [leaf for leaf in pytree.tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
        known = self._weights | {x.untyped_storage().data_ptr() for x in given}
        kept, makers = dict[int, int](), dict[int, Maker]()
        remade, ending = Remade(), Ending(keeps=True)

        def pack(x: Tensor) -> Tensor:
            if (maker := remade.maker(x)) is not None:
                makers[x.untyped_storage().data_ptr()] = maker
            return self._pack(kept, known, x)

        def timed(name: str, call: Callable[[], Any]) -> None:
            if self._device.type == "cuda":
                torch.cuda._sleep(_LAUNCHING)  # type: ignore[no-untyped-call]
            began = self._now()
            call()
            marks.append((number, name, began, self._now()))

        with remade.listening(), told(layer), ending.active(again=False), saved_tensors_hooks(pack, _same):
            found = function(*arguments)
        ending.settle(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))
        found = pytree.tree_map(_leaf, found)
        measured = self.layers[number].bytes
        measured["kept"], measured["ending"] = sum(kept.values()), sum(each.nbytes for each in ending.kept)
        measured["input"] = sum(x.nbytes for x in given if x.requires_grad)
        inputs = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for m in makers.values() for x in m.inputs
        }
        more = sum(size for place, size in inputs.items() if place not in kept and place not in known)
        measured["remade"] = max(0, sum(kept.get(place, 0) for place in makers) - more)
        if not self._timed:
            return found
        timed("remade_s", lambda: [maker.make() for maker in makers.values()])
        with saved_tensors_hooks(torch.Tensor.detach, _same):
            timed("forward_s", lambda: function(*arguments))
            with ending.active(again=True):
                timed("ending_s", lambda: function(*arguments))
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


def _leaf(result: Any) -> Any:
    """A result without its graph, and what that keeps."""
    return result.detach().requires_grad_(result.requires_grad) if isinstance(result, Tensor) else result
