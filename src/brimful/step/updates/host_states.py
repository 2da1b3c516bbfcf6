"""Optimizer states in host memory, brought to the device a bucket of parameters at a time, and back.

The next buckets come, and the last one goes, on streams of their own while a bucket is updated: the update is the one
that states on the device would have, bit for bit. On a CPU both are plain copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from brimful.hardware.streams import stream_for

#: Bytes of buckets that come before their turn, one at the least: several are complete at about the same time, and the
#: link is to rest at none.
AHEAD = 100_000_000
#: Buckets on their way back whose memory on the device is kept for that.
LEAVING = 2


class HostStates:
    """States of buckets, (2, N) each. arenas: in host memory, pinned for a GPU. staying: numbers of those that are on
    the device, and stay there. leaving_bytes: most of more than `LEAVING` that are on their way back."""

    def __init__(
        self, arenas: Sequence[Tensor], device: torch.device, staying: Collection[int] = (), leaving_bytes: int = 0
    ) -> None:
        self.arenas, self._device, self._staying = arenas, device, frozenset(staying)
        self._leaving_bytes = leaving_bytes
        on_gpu = device.type == "cuda"
        self._inward, self._outward = (
            stream_for(f"states {way}", device) if on_gpu else None for way in ("inward", "outward")
        )
        self._coming: dict[int, tuple[Tensor, Any]] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._done: set[int] = set()
        self._busy: list[Any] = []  # streams with copies of this step

    def fetch(self, number: int, *, ahead: int = 1) -> Tensor:
        """States of a bucket on the device. Those of the next ones begin to come. ahead: 1 or -1, where these are."""
        if number in self._staying:
            return self.arenas[number]
        self.bring(number, ahead=ahead)
        found, event = self._coming.pop(number)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return found

    def bring(self, number: int, *, ahead: int = 1) -> None:
        """Begin to bring what `fetch` returns: only this needs memory."""
        for each in (number, *self._next(number, ahead)):
            if each not in self._coming and each not in self._done and each not in self._staying:
                self._coming[each] = self._begin(each)

    def _next(self, number: int, ahead: int) -> Iterator[int]:
        """The buckets that come before their turn when it is this one's."""
        num_bytes, following = 0, range(number + ahead, len(self.arenas) if ahead > 0 else -1, ahead)
        for each in (each for each in following if each not in self._staying):
            num_bytes += self.arenas[each].nbytes
            if num_bytes > AHEAD and each != number + ahead:
                return
            yield each

    def put(self, number: int, states: Tensor) -> None:
        """Keep the new states of a bucket."""
        if number in self._staying:
            return
        self._done.add(number)
        if self._outward is None:
            self.arenas[number].copy_(states)
            return
        main = torch.cuda.current_stream(self._device)
        self._join(self._outward)
        with torch.cuda.stream(self._outward):
            self.arenas[number].copy_(states, non_blocking=True)
            self._leaving.append((states, self._outward.record_event()))
        while len(self._leaving) > LEAVING and sum(each.nbytes for each, _ in self._leaving) > self._leaving_bytes:
            main.wait_event(self._leaving.popleft()[1])

    def forget(self) -> None:
        """Drop what is on its way: copies of a capture that was refused were never made."""
        self._coming.clear()
        self._done.clear()
        self._leaving.clear()
        self._busy.clear()

    def finish(self) -> None:
        """End a step: what is launched from now on comes after all copies.

        A stream without any is left alone: a capture that it is no part of could not wait for it.
        """
        for stream in self._busy:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self.forget()

    def _begin(self, number: int) -> tuple[Tensor, Any]:
        found = torch.empty_like(self.arenas[number], device=self._device, pin_memory=False)
        if self._inward is None:
            return found.copy_(self.arenas[number]), None
        self._join(self._inward)  # the memory may have been another's
        with torch.cuda.stream(self._inward):
            found.copy_(self.arenas[number], non_blocking=True)
            return found, self._inward.record_event()

    def _join(self, stream: Any) -> None:
        """Have a stream wait for what was launched so far."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if stream not in self._busy:
            self._busy.append(stream)
