"""Activations in host memory between a layer's forward and backward pass.

What a layer saves for its backward pass is copied to pinned host memory on a stream of its own, while the layers after
it run, and fetched again ahead of the backward pass. The bits are the same. On a CPU it is a plain copy.

At any time the device holds as many bytes as the layers that are not moved keep: a layer leaves when a later one needs
its place, and comes back as soon as the backward pass has left it one, so that copies have all the time that there is.
Where the last layer keeps little, what leaves has left before the last but one. At the least two layers are there
beside the one that runs forward, leaving, and beside the one that runs backward: one that goes, and one that comes.

Copies go to buffers that stay: a CUDA graph holds their addresses. So one pass is under way at a time, forward and
backward, as in a step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from brimful.models.packed.recompute import recompute

#: Smaller tensors stay: a copy costs more than the bytes are worth.
LEAST_BYTES = 64 << 10
#: Layers that are leaving the device at least beside the one that runs forward.
AHEAD = 2
#: Layers whose backward passes go by until what a layer kept is gone: gradients of its weights are made beside them.
_GOES_AFTER = 1
#: Share that sums of the same sizes may differ by.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Turns of the layers that are moved.

    leave_at: the layer at whose call each one leaves. back_at: the one at whose backward pass it begins to come back.
    """

    leave_at: tuple[int, ...]
    back_at: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[float], count: int) -> Moves:
        """Return those of the first `count` layers. sizes: bytes that each layer keeps, or shares of them."""
        room, ends = sum(sizes[count:]) * (1 + _ROUNDING), list[int]()
        for number in range(count):  # the first layer that has no room beside this one and those between
            held = itertools.accumulate(sizes[number:])
            ends.append(next((at for at, size in enumerate(held, number) if size > room), len(sizes)))
        return cls(
            leave_at=tuple(max(number + AHEAD, end) for number, end in enumerate(ends)),
            back_at=tuple(max(number + 1, end - 1 - _GOES_AFTER) for number, end in enumerate(ends)),
        )

    def most(self, sizes: Sequence[float]) -> float:
        """Most bytes that the device has of all layers' at a time."""
        moved, turns = len(self.leave_at), range(len(sizes))
        forward = (sum(sizes[k] for k in range(at + 1) if k >= moved or self.leave_at[k] > at) for at in turns)
        backward = (
            sum(
                size
                for k, size in enumerate(sizes[: at + 1 + _GOES_AFTER])
                if k >= moved or k > at or self.back_at[k] >= at
            )
            for at in turns
        )
        return max(*forward, *backward)


def offload(
    layers: nn.ModuleList, count: int, device: torch.device, sizes: Sequence[float] | None = None
) -> HostActivations:
    """Have the first `count` layers keep their activations in host memory, and no others. sizes: as `Moves.of` has
    them; None where all layers keep as much."""
    store = HostActivations(device, Moves.of(sizes or [1.0] * len(layers), count))
    recompute(list(layers), range(len(layers)))
    for number, layer in enumerate(layers):
        changed: Any = layer
        changed._gradient_checkpointing_func = partial(store.call, number, weakref.ref(layer), number < count)
    return store


class HostActivations:
    """Buffers of one model's layers, and the pass that uses them. num_bytes: of host memory."""

    def __init__(self, device: torch.device, moves: Moves) -> None:
        self.num_bytes = 0
        self._device, self._moves = device, moves
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._layers: dict[int, _Layer] = {}
        self._number = -1

    def call(
        self, number: int, layer: weakref.ref[nn.Module], moved: bool, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call a layer: in the place of Hugging Face's function for gradient checkpointing. moved: False to keep all
        on the device."""
        if number <= self._number:
            self._layers = {}  # another pass: what was saved before it must not be read any more
        self._number = number
        for each, at in enumerate(self._moves.leave_at):
            if at == number and (left := self._layers.get(each)) is not None:
                left.leave()
        if not moved:
            return self._hooked(number, function(*arguments))
        module = layer()
        assert module is not None
        weights = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers())}
        self._layers[number] = saved = _Layer(self, number, weights)
        with saved_tensors_hooks(saved.pack, _unpack):
            return self._hooked(number, function(*arguments))

    def _hooked(self, number: int, results: Any) -> Any:
        """Results of a layer whose gradient, when it comes, says that the layer's turn has come."""
        layers = self._layers
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._bring(layers, number))
        return results

    def is_worth(self, x: Tensor, weights: set[int]) -> bool:
        """True for a tensor that is to be moved."""
        return (
            type(x) in (Tensor, nn.Parameter)  # a tensor that is traced has neither bytes nor an address
            and x.device.type == self._device.type
            and x.nbytes >= LEAST_BYTES
            and x.layout == torch.strided
            and x.untyped_storage().data_ptr() not in weights
        )

    def out(self, storage: Tensor, number: int, place: int) -> tuple[Tensor, Any]:
        """Copy bytes to the buffer of a place in a layer; the buffer, and the event after which it holds them."""
        host = self._buffer(number, place, storage.nbytes)[: storage.nbytes]
        if self._stream is None:
            host.copy_(storage)
            return host, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(storage, non_blocking=True)
            return host, self._stream.record_event()

    def back(self, host: Tensor) -> tuple[Tensor, Any]:
        """Copy bytes to the device; a tensor of them, and the event after which it has them."""
        found = torch.empty(host.nbytes, dtype=torch.uint8, device=self._device)
        if self._stream is None:
            return found.copy_(host), None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what had this memory before may use it yet
        with torch.cuda.stream(self._stream):
            found.copy_(host, non_blocking=True)
            return found, self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Have the current stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def fetch(self, layer: _Layer) -> None:
        """Begin to bring back a layer that a backward pass has come to, and those that come next."""
        if self._layers.get(layer.number) is not layer:
            raise RuntimeError("activations were saved by an earlier pass, and another one has taken their place")
        if not layer.is_fetched:
            layer.is_fetched = True
            self._bring(self._layers, layer.number)

    def _bring(self, layers: dict[int, _Layer], number: int) -> None:
        if layers is self._layers:
            for each, at in reversed(list(enumerate(self._moves.back_at[: number + 1]))):
                if at >= number and (layer := layers.get(each)) is not None:
                    layer.come_back()

    def _buffer(self, number: int, place: int, num_bytes: int) -> Tensor:
        """The smallest buffer that holds as many bytes. Graphs may have the address of any that there ever was."""
        found = self._buffers.setdefault((number, place), [])
        fitting = [each for each in found if each.nbytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda each: each.nbytes)
        found.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None))
        self.num_bytes += num_bytes
        return found[-1]


class _Layer:
    """Storages that one layer saved in one pass. Those that no backward pass needs any more are gone.

    is_fetched: whether a backward pass has come to it.
    """

    def __init__(self, store: HostActivations, number: int, weights: set[int]) -> None:
        self.store, self.number, self._weights = store, number, weights
        self._saved: weakref.WeakValueDictionary[tuple[int, int], _Storage] = weakref.WeakValueDictionary()
        self._num_places, self._is_back, self.is_fetched = 0, False, False

    def pack(self, x: Tensor) -> Any:
        """Take in a tensor; several of one storage are views of one copy."""
        if not self.store.is_worth(x, self._weights):
            return x.detach()  # an output would keep the graph that keeps it
        key = (x.untyped_storage().data_ptr(), x._version)
        storage = self._saved.get(key)
        if storage is None:
            storage = self._saved[key] = _Storage(self, x, self._num_places)
            self._num_places += 1
        return _View(storage, x)

    def leave(self) -> None:
        """Give the device's memory back, once copies are there."""
        for storage in list(self._saved.values()):
            storage.leave()

    def come_back(self) -> None:
        """Bring all back that is needed yet."""
        if not self._is_back:
            self._is_back = True
            for storage in list(self._saved.values()):
                storage.come_back()


class _Storage:
    """The bytes of a storage: on the device, in host memory or on their way."""

    def __init__(self, layer: _Layer, x: Tensor, place: int) -> None:
        self.layer = layer
        self._bytes: Tensor | None = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        self._host, self._event = layer.store.out(self._bytes, layer.number, place)

    def leave(self) -> None:
        self.layer.store.wait(self._event)
        self._bytes = self._event = None

    def come_back(self) -> None:
        if self._bytes is None:
            self._bytes, self._event = self.layer.store.back(self._host)

    def read(self) -> Tensor:
        """(bytes) on the device."""
        self.layer.store.fetch(self.layer)
        self.layer.store.wait(self._event)  # of the copy that left, too: a capture must end with all streams joined
        self._event = None
        assert self._bytes is not None
        return self._bytes


class _View:
    """A tensor, as a view of bytes."""

    def __init__(self, storage: _Storage, x: Tensor) -> None:
        self._storage, self._dtype = storage, x.dtype
        self._size, self._stride, self._offset = x.size(), x.stride(), x.storage_offset()

    def tensor(self) -> Tensor:
        plain = torch.empty(0, dtype=self._dtype, device=self._storage.read().device)
        return plain.set_(self._storage.read().untyped_storage(), self._offset, self._size, self._stride)


def _unpack(saved: Any) -> Tensor:
    found: Tensor = saved.tensor() if isinstance(saved, _View) else saved
    return found
