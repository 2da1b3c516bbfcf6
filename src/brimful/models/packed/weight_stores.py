"""Stores of the weights of layers outside the device, one piece a layer: in host memory, or in a file.

A piece is taken to be copied to the device, and kept again where its layer was trained. What is taken after it was kept
is what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from brimful.hardware.file_memory import weights_file

#: Pieces of a file in pinned memory, on their way to the device, and on their way back.
_STAGED, _LEAVING = 3, 2


class Store(Protocol):
    """Pieces of bytes, by number."""

    def home(self, number: int) -> Tensor:
        """Bytes of a piece, where they are kept."""
        ...

    def take(self, number: int, following: int | None) -> Tensor:
        """The same, to copy from. following: the piece that is taken next, if that is known."""
        ...

    def taken(self, number: int, event: Any) -> None:
        """Take note of the event after which a piece was copied."""
        ...

    def keep(self, number: int, piece: Tensor, stream: Any) -> Any:
        """Keep the first bytes of a piece as they are on the device; the event after which they were copied."""
        ...

    def settle(self) -> None:
        """Wait until `home` has all that was kept, once the device has copied it."""
        ...

    def forget(self) -> None:
        """Take pieces from `home` anew: they were changed there."""
        ...


class HostStore:
    """Pieces in host memory, pinned for a GPU: each is taken when it is first asked for, and what it is filled from can
    go before the next is."""

    def __init__(self, sizes: Sequence[int], pinned: bool) -> None:
        self._sizes, self._pinned = sizes, pinned
        self._homes: dict[int, Tensor] = {}

    def home(self, number: int) -> Tensor:
        """As `Store` has it."""
        if number not in self._homes:
            self._homes[number] = torch.empty(self._sizes[number], dtype=torch.uint8, pin_memory=self._pinned)
        return self._homes[number]

    def take(self, number: int, following: int | None) -> Tensor:
        """As `Store` has it."""
        return self._homes[number]

    def taken(self, number: int, event: Any) -> None:
        """As `Store` has it."""

    def keep(self, number: int, piece: Tensor, stream: Any) -> Any:
        """As `Store` has it."""
        return _copied(self._homes[number], piece, stream)

    def settle(self) -> None:
        """As `Store` has it."""

    def forget(self) -> None:
        """As `Store` has it."""


class FileStore:
    """Pieces of a file that has no name and is gone with the process. One thread reads ahead into a few buffers, and
    writes."""

    def __init__(self, sizes: Sequence[int], pinned: bool, folder: Path) -> None:
        self._sizes, self._pinned = sizes, pinned
        self._homes: list[Tensor] = list(weights_file(folder, sum(sizes)).split(list(sizes)))
        self._buffers = self._pieces(_STAGED)
        self._copied: list[Any] = [None] * _STAGED
        self._reading: dict[int, tuple[int, Future[Tensor]]] = {}
        self._thread, self._next = ThreadPoolExecutor(1, thread_name_prefix="brimful-weights"), 0
        self._leaving: list[Tensor] = []
        self._writing: list[Future[None] | None] = [None] * _LEAVING
        self._last = 0

    def home(self, number: int) -> Tensor:
        """As `Store` has it."""
        return self._homes[number]

    def take(self, number: int, following: int | None) -> Tensor:
        """As `Store` has it, once it is read; the following piece begins to be."""
        for each in (number, following):
            if each is not None and each not in self._reading:
                self._begin(each)
        return self._reading[number][1].result()

    def taken(self, number: int, event: Any) -> None:
        """As `Store` has it."""
        place, _ = self._reading.pop(number)
        self._copied[place] = event

    def keep(self, number: int, piece: Tensor, stream: Any) -> Any:
        """As `Store` has it. The file is written by the thread that reads it: in order."""
        if not self._leaving:
            with torch.inference_mode(False):  # of an evaluation that is the first to change weights
                self._leaving = self._pieces(_LEAVING)
        self._last = place = (self._last + 1) % _LEAVING
        if (writing := self._writing[place]) is not None:
            writing.result()
        buffer = self._leaving[place][: len(piece)]
        event = _copied(buffer, piece, stream)
        if (before := self._reading.pop(number, None)) is not None:
            before[1].result()  # as in `forget`
        self._writing[place] = self._thread.submit(self._write, number, buffer, event)
        return event

    def settle(self) -> None:
        """As `Store` has it."""
        for writing in self._writing:
            if writing is not None:
                writing.result()

    def forget(self) -> None:
        """As `Store` has it."""
        for _, reading in self._reading.values():
            reading.result()  # a buffer that is being written to must not be given to another
        self._reading.clear()

    def _pieces(self, count: int) -> list[Tensor]:
        return [torch.empty(max(self._sizes), dtype=torch.uint8, pin_memory=self._pinned) for _ in range(count)]

    def _begin(self, number: int) -> None:
        used = {place for place, _ in self._reading.values()}
        place = next(each % _STAGED for each in range(self._next, self._next + _STAGED) if each % _STAGED not in used)
        self._next = place + 1
        self._reading[number] = (place, self._thread.submit(self._read, number, place))

    def _read(self, number: int, place: int) -> Tensor:
        if self._copied[place] is not None:
            self._copied[place].synchronize()
        read: Tensor = self._buffers[place][: self._sizes[number]].copy_(self._homes[number])
        return read

    def _write(self, number: int, buffer: Tensor, event: Any) -> None:
        if event is not None:
            event.synchronize()
        self._homes[number][: len(buffer)].copy_(buffer)


def _copied(to: Tensor, piece: Tensor, stream: Any) -> Any:
    """Copy a piece to the first bytes of `to`; the event after which that is done, None for at once."""
    if stream is None:
        to[: len(piece)].copy_(piece)
        return None
    stream.wait_stream(torch.cuda.current_stream(piece.device))
    with torch.cuda.stream(stream):
        to[: len(piece)].copy_(piece, non_blocking=True)
        return stream.record_event()
