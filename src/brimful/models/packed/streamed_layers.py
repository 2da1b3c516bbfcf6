"""Weights of layers outside the device, each brought there for its turn: for models that do not fit.

A layer's weights lie in one piece, in pinned host memory or in a file that is mapped into memory. Two pieces fit on the
device at a time: while a layer runs from one, the next layer's weights come into the other, on a stream of its own.
Products are those of weights that never leave. On a CPU pieces are copied likewise, to memory that stands for a
device's.

Parameters outside of layers, and those that layers share, stay on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Pieces on the device, and of a file in pinned memory on their way there.
_PIECES, _STAGED = 2, 3
#: Bytes that a parameter starts at a multiple of.
_ALIGNMENT = 256


def own_parameters(layers: nn.ModuleList) -> list[list[nn.Parameter]]:
    """The parameters of each layer that no other module has."""
    owners: dict[int, int] = {}
    for layer in layers:
        for parameter in set(layer.parameters()):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return [[p for p in layer.parameters() if owners[id(p)] == 1] for layer in layers]


def move_all_but(model: nn.Module, layers: nn.ModuleList, device: torch.device) -> None:
    """Move a model to a device, but for what its layers have of their own."""
    stays = {id(p) for each in own_parameters(layers) for p in each}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in stays:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def end_streaming(model: Any) -> None:
    """Give a model whose layers were streamed its weights back, in host memory. Others are left alone."""
    streamed = getattr(model, "streamed_layers", None)
    if streamed is not None:
        streamed.remove()
        model.streamed_layers = None


class StreamedLayers:
    """Weights of a model's layers, as hooks on them bring them to the device and let them go.

    folder: of a file without a name for the weights, None for host memory. num_bytes: of all that is streamed.
    fetched_bytes: copied to the device so far.
    """

    def __init__(self, layers: nn.ModuleList, device: torch.device, folder: Path | None = None) -> None:
        self._device, self._parameters = device, own_parameters(layers)
        self._places = [_places(each) for each in self._parameters]
        sizes = [end for _, end in self._places]
        self.num_bytes, self.fetched_bytes = sum(sizes), 0
        self._on_gpu = device.type == "cuda"
        self._pieces = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(_PIECES)]
        self._free: list[Any] = [None] * _PIECES
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._ready: dict[int, Any] = {}
        make = _HostStore if folder is None else _FileStore
        self._store: Any = make(sizes, self._on_gpu, folder)
        depth = range(len(self._parameters))
        # Views are made here: those of an inference pass cannot be parameters.
        self._here = [self._views(number, self._pieces[number % _PIECES]) for number in depth]
        self._home = [self._views(number, self._store.home(number)) for number in depth]
        for parameters, views in zip(self._parameters, self._home, strict=True):
            for parameter, view in zip(parameters, views, strict=True):
                parameter.data = view.copy_(parameter.data)
        self._hooks = []
        for number, layer in enumerate(layers):
            self._hooks.append(layer.register_forward_pre_hook(self._before(number)))
            self._hooks.append(layer.register_forward_hook(self._after(number), always_call=True))

    def remove(self) -> None:
        """Take the hooks off: weights are where they are kept, in memory of their own."""
        for hook in self._hooks:
            hook.remove()
        for parameters, views in zip(self._parameters, self._home, strict=True):
            for parameter, view in zip(parameters, views, strict=True):
                parameter.data = view.clone()

    def _before(self, number: int) -> Callable[..., None]:
        def arrive(*_: Any) -> None:
            if number not in self._ready:
                self._fetch(number)
            event = self._ready.pop(number)
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            self._show(number, self._here[number])
            if number + 1 < len(self._parameters):
                self._fetch(number + 1)

        return arrive

    def _after(self, number: int) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            self._show(number, self._home[number])
            if self._on_gpu:
                self._free[number % _PIECES] = torch.cuda.current_stream(self._device).record_event()
            if number + 1 == len(self._parameters):
                self._fetch(0)  # of the next pass

        return leave

    def _fetch(self, number: int) -> None:
        """Begin to bring a layer's weights to the piece that they are used from."""
        if number in self._ready:
            return
        self._ready = {n: e for n, e in self._ready.items() if n % _PIECES != number % _PIECES}
        home = self._store.take(number)
        piece = self._pieces[number % _PIECES][: len(home)]
        self.fetched_bytes += len(home)
        if self._stream is None:
            piece.copy_(home)
            self._ready[number] = None
        else:
            if self._free[number % _PIECES] is not None:
                self._stream.wait_event(self._free[number % _PIECES])
            with torch.cuda.stream(self._stream):
                piece.copy_(home, non_blocking=True)
                self._ready[number] = self._stream.record_event()
        self._store.taken(number, self._ready[number])

    def _show(self, number: int, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self._parameters[number], views, strict=True):
            parameter.data = view

    def _views(self, number: int, piece: Tensor) -> list[Tensor]:
        starts, _ = self._places[number]
        return [
            piece[start : start + p.nbytes].view(p.dtype).view(p.shape)
            for start, p in zip(starts, self._parameters[number], strict=True)
        ]


class _HostStore:
    """Pieces in host memory, pinned for a GPU."""

    def __init__(self, sizes: Sequence[int], pinned: bool, _: Path | None) -> None:
        self._homes = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def home(self, number: int) -> Tensor:
        """Bytes of a piece, where they are kept."""
        return self._homes[number]

    def take(self, number: int) -> Tensor:
        """The same, to copy from."""
        return self._homes[number]

    def taken(self, number: int, event: Any) -> None:
        """Take note of the event after which a piece was copied."""


class _FileStore:
    """Pieces of a file that has no name and is gone with the process, read ahead into a few buffers by a thread."""

    def __init__(self, sizes: Sequence[int], pinned: bool, folder: Path | None) -> None:
        self._sizes = sizes
        with tempfile.NamedTemporaryFile(dir=folder, prefix="brimful-weights-") as file:
            file.truncate(sum(sizes))
            mapped = torch.from_file(file.name, shared=True, size=sum(sizes), dtype=torch.uint8)
        self._homes: list[Tensor] = list(mapped.split(list(sizes)))
        self._buffers = [torch.empty(max(sizes), dtype=torch.uint8, pin_memory=pinned) for _ in range(_STAGED)]
        self._copied: list[Any] = [None] * _STAGED
        self._reading: dict[int, tuple[int, Future[Tensor]]] = {}
        self._reader, self._next = ThreadPoolExecutor(1, thread_name_prefix="brimful-weights"), 0

    def home(self, number: int) -> Tensor:
        """As `_HostStore` has it."""
        return self._homes[number]

    def take(self, number: int) -> Tensor:
        """As `_HostStore` has it, once it is read; the next piece begins to be."""
        following = (number + 1) % len(self._sizes)
        for each in (number, following):
            if each not in self._reading:
                self._begin(each)
        return self._reading[number][1].result()

    def taken(self, number: int, event: Any) -> None:
        """As `_HostStore` has it."""
        place, _ = self._reading.pop(number)
        self._copied[place] = event

    def _begin(self, number: int) -> None:
        used = {place for place, _ in self._reading.values()}
        place = next(each % _STAGED for each in range(self._next, self._next + _STAGED) if each % _STAGED not in used)
        self._next = place + 1
        self._reading[number] = (place, self._reader.submit(self._read, number, place))

    def _read(self, number: int, place: int) -> Tensor:
        if self._copied[place] is not None:
            self._copied[place].synchronize()
        read: Tensor = self._buffers[place][: self._sizes[number]].copy_(self._homes[number])
        return read


def _places(parameters: Sequence[Tensor]) -> tuple[list[int], int]:
    """Bytes that each parameter starts at in its layer's piece, and where the last one ends."""
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, max(end, _ALIGNMENT)
