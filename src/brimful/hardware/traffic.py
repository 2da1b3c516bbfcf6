"""Seconds in which sums are on their way between processes, and those of them in which this one did something else."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Protocol

#: Slots of a device's clock: sums on their way, and streams that wait for them.
SENT, BLOCKED = range(2)


class DeviceClock(Protocol):
    """A clock that a device's streams start and stop."""

    def start(self, slot: int) -> None: ...

    def stop(self, slot: int) -> None: ...

    def seconds(self, slot: int) -> float:
        """Seconds so far. Waits for nothing."""


class Traffic:
    """Collectives that were begun, and may be under way together.

    device: the clock of those of a GPU, which the host does not see.
    """

    def __init__(self) -> None:
        self._lock, self._since, self._count = threading.Lock(), 0.0, 0
        self._under_way = set[int]()
        self._sent_s = self._blocked_s = 0.0
        self.device: DeviceClock | None = None

    def begin(self, work: Any) -> int:
        """Take account of a collective that was begun just now, and return its number."""
        with self._lock:
            if not self._under_way:
                self._since = time.monotonic()
            number = self._count = self._count + 1
            self._under_way.add(number)
        with suppress(RuntimeError):  # one that has failed by now
            work.get_future().add_done_callback(lambda _: self._end(number))
        return number

    def _end(self, number: int) -> None:
        """Take account of an end, which whoever waits may see before the thread that tells of it."""
        with self._lock:
            if number in self._under_way:
                self._under_way.remove(number)
                if not self._under_way:
                    self._sent_s += time.monotonic() - self._since

    def wait(self, work: Any, number: int) -> None:
        """Wait for a collective, with nothing else to do."""
        began = time.monotonic()
        work.wait()
        self._end(number)
        self._blocked_s += time.monotonic() - began

    @property
    def sent_s(self) -> float:
        """Seconds in which at least one was under way. Others that come to it late are waited for meanwhile."""
        return self._sent_s + (0.0 if self.device is None else self.device.seconds(SENT))

    @property
    def blocked_s(self) -> float:
        """Those of them in which this process did nothing else."""
        return self._blocked_s + (0.0 if self.device is None else self.device.seconds(BLOCKED))
