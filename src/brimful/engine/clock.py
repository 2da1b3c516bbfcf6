"""A stopwatch that can be paused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds that passed while it was not paused. Runs from the start."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._since: float | None = time.perf_counter()  # None while it is paused

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that passes inside does not count."""
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()
