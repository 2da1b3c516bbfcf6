"""A stopwatch that can be paused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds that passed while it was not paused. Runs from the start."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before, self._since = seconds, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that passes inside does not count."""
        self._before = self.seconds
        try:
            yield
        finally:
            self._since = time.perf_counter()
