"""A stopwatch that can be paused, and the times by it at which a device had done what the host launched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


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


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that was launched: an event behind it on a GPU, and the clock's seconds by then."""

    event: torch.cuda.Event | None
    seconds: float


class StepClock:
    """Seconds of a clock at which each step was done, however late the host hears of it.

    On a GPU they are told by its own events, as the host is some steps ahead and hears of several at once before an
    evaluation; on a CPU a step is done when it is launched.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._on_gpu = clock, device.type == "cuda"
        self._last = self.launched()

    def begin(self) -> None:
        """Begin anew where the device has nothing to do."""
        self._last = self.launched()

    def launched(self) -> Launched:
        """Mark the end of what was launched by now."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Launched(event=event, seconds=self._clock.seconds)

    def done(self, step: Launched) -> float:
        """Seconds at which a step was done. Waits for it. To be asked of each step in turn."""
        seconds = step.seconds
        if step.event is not None and self._last.event is not None:
            step.event.synchronize()
            seconds = self._last.seconds + self._last.event.elapsed_time(step.event) / 1e3
        self._last = Launched(event=step.event, seconds=seconds)
        return seconds
