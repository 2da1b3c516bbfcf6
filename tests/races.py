"""A race detector by vector clocks: accesses to ranges of memory that nothing puts in order, whatever their timing was.

An actor is a stream of a GPU or a thread of the host. Its clock says of each actor how much is sure to be done before
what the actor does next. An access comes after another one if the clock of who makes it has seen that one. torch's own
sanitizer for GPUs (torch/cuda/_sanitizer.py) knows tensors by where they begin, and neither threads nor memory that is
given out again.
"""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

Clock = dict[str, int]
Lines = tuple[tuple[CodeType, int], ...]
_OURS = (f"{Path('src', 'brimful')}/", f"{Path(__file__).parent}/")
_HERE = tuple(str(Path(__file__).with_name(name)) for name in ("races.py", "pretend_streams.py", "pretend_gpu.py"))


def join(clock: Clock, other: Clock) -> None:
    """Have a clock see what another one has seen."""
    for name, count in other.items():
        if clock.get(name, 0) < count:
            clock[name] = count


class Actor:
    """A stream or a thread. clock: what is sure to be done before what it does next, its own work so far included."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self.name, self.clock = name, dict(clock or {})

    def tick(self) -> int:
        """Count one more piece of work."""
        self.clock[self.name] = count = self.clock.get(self.name, 0) + 1
        return count


@dataclass(frozen=True, slots=True)
class Work:
    """An actor's work number `count`. lines: of ours that led to it, the innermost first."""

    actor: str
    count: int
    lines: Lines


@dataclass(frozen=True, slots=True)
class Access:
    """A use of the bytes from start to end."""

    start: int
    end: int
    writes: bool
    work: Work

    def __str__(self) -> str:
        lines = (f"{Path(code.co_filename).name}:{line} ({code.co_name})" for code, line in self.work.lines)
        does = "writes" if self.writes else "reads"
        return f"{self.work.actor} {does} bytes {self.start} to {self.end} in {', '.join(lines) or 'other code'}"


@dataclass(slots=True)
class Memory:
    """A storage, and who used it. place: "device", "pinned" or "host".

    pool: the stream that a device's memory was allocated on. born: uses of what was given back to that pool before: any
    of it may be this. known_to: who came after those. recorded: streams that the allocator waits for before it gives
    this to others. uses: the last of each actor.
    """

    place: str = "host"
    pool: str = ""
    born: Clock = field(default_factory=dict)
    known_to: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)
    uses: Clock = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)


class Races:
    """All memory, and accesses to it that were in no order. found: what is wrong, a line each.

    num_crossings: accesses by another actor than the one before, which were in order.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.num_crossings = 0
        self.lock = threading.RLock()
        self._memories: dict[int, Memory] = {}
        self._given_back: dict[str, Clock] = {}  # by pool, uses of memory that is free
        self._reported = set[tuple[Any, ...]]()

    def memory(self, tensor: Tensor) -> Memory:
        """The memory of a tensor; that of the host, where nothing is known of it."""
        storage = tensor.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None:
            found = self._memories[storage._cdata] = Memory()
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
        return found

    def known(self, tensor: Tensor) -> Memory | None:
        """The same, None where nothing is known."""
        return self._memories.get(tensor.untyped_storage()._cdata)

    def allocate(self, tensor: Tensor, place: str, pool: str) -> None:
        """Take note of a new storage."""
        with self.lock:
            memory = self.memory(tensor)
            memory.place, memory.pool = place, pool
            if place == "device":
                memory.born = dict(self._given_back.get(pool, {}))

    def _free(self, key: int) -> None:
        with self.lock:
            memory = self._memories.pop(key)
            if memory.place == "device":  # pinned memory is given out again when copies are done (CachingHostAllocator)
                uses = {name: count for name, count in memory.uses.items() if name not in memory.recorded}
                join(self._given_back.setdefault(memory.pool, {}), uses)

    def access(self, tensor: Tensor, clock: Clock, work: Work, *, writes: bool) -> None:
        """Take note of a use of all bytes between the first and the last of a tensor. clock: of who makes it."""
        if not tensor.numel() or tensor.layout != torch.strided:
            return
        start = tensor.storage_offset() * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        now = Access(start, start + (last + 1) * tensor.itemsize, writes, work)
        memory = self.memory(tensor)
        if memory.born and work.actor not in memory.known_to:
            memory.known_to.add(work.actor)
            late = [name for name, seen in memory.born.items() if clock.get(name, 0) < seen]
            if late:
                said = f"{now}, in memory that {', '.join(late)} may use yet for what had it before"
                self._report(said, work.actor, work.lines, *late)
        memory.uses[work.actor] = work.count
        kept = [before for before in memory.accesses if self._stays(before, now, clock)]
        kept.append(now)
        memory.accesses = kept

    def _stays(self, before: Access, now: Access, clock: Clock) -> bool:
        """Check that a use comes after one before. True where later uses must be compared with that one, too."""
        if before.end <= now.start or now.end <= before.start:
            return True
        one, other = before.work, now.work
        if before.writes or now.writes:
            if clock.get(one.actor, 0) < one.count:
                said = f"{now}, and nothing has it come after: {before}"
                self._report(said, other.actor, other.lines, one.actor, one.lines)
            elif one.actor != other.actor:
                self.num_crossings += 1
        is_within = now.start <= before.start and before.end <= now.end
        return not (is_within and (now.writes or (not before.writes and one.actor == other.actor)))

    def _report(self, said: str, *key: Any) -> None:
        """Report what is wrong, once for the same lines."""
        if key not in self._reported:
            self._reported.add(key)
            self.found.append(said)


#: Lines that a use is told by.
_MOST = 3


def lines_of_ours() -> Lines:
    """The innermost lines of the package and its tests that led here."""
    found = list[tuple[CodeType, int]]()
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < _MOST:
        if _is_ours(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@cache
def _is_ours(file: str) -> bool:
    return any(ours in file for ours in _OURS) and file not in _HERE
