"""Seconds of a process by phase: what it was doing, one thing at a time, from its start to its end.

docs/reference/run-folder.md says what each phase of a training is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path


class Phases:
    """Seconds by phase. The phase entered last is running.

    heard: called with the name of each phase that is entered. pieces: a context of work on pieces alike, within which
    end_piece is called after each.
    began: `time.perf_counter()` when the first phase, `start`, began; now unless given.
    """

    def __init__(self, began: float | None = None) -> None:
        self._now, self._since = "start", time.perf_counter() if began is None else began
        self._seconds: dict[str, float] = {}
        self.heard: Callable[[str], None] = lambda _: None
        self.pieces: Callable[[], AbstractContextManager[None]] = nullcontext
        self.end_piece: Callable[[], None] = lambda: None

    def enter(self, name: str) -> str:
        """Begin a phase; return the one that it ends."""
        now = time.perf_counter()
        self._seconds[self._now] = self._seconds.get(self._now, 0.0) + now - self._since
        before, self._now, self._since = self._now, name, now
        self.heard(name)
        return before

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the block as a phase; what was going on before goes on after it."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, seconds: float, to: str) -> None:
        """Count `seconds` of the running phase as another's: one that is only known afterwards."""
        self._seconds[to] = self._seconds.get(to, 0.0) + seconds
        self._since += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, in the order of their first begin."""
        self.enter(self._now)
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}


def process_began() -> float:
    """Return `time.perf_counter()` as it was when this process was started; as it is now where the system does not say.

    Source: proc(5), field 22 of /proc/self/stat, ticks since the system's start.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        if 0 <= age_s < 3600:  # of a command that is just being read
            return time.perf_counter() - age_s
    return time.perf_counter()
