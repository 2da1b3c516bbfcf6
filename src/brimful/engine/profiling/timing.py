"""Steps as training launches them, gone through to warm up, to be timed, to be recorded: the same batches each time.

The batches are the run's own, from its beginning. Weights change from pass to pass, and speed does not depend on them.
Batch 0 only gets the device going: what is timed and recorded begins with batch 1.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from brimful.core.callbacks import Callbacks
from brimful.data.batches.batch import Batch
from brimful.data.batches.prefetch import Feed
from brimful.engine.assemble import Built
from brimful.step.step import Pending

#: Steps that may be in flight while the host goes on: as in training.
_IN_FLIGHT = 2
#: Passes in which new shapes are captured, at most: one meets them, one captures them, one finds nothing new.
_MOST_PASSES = 5
#: Steps that warm a CPU up.
_CPU_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Round:
    """One timed pass: seconds of each step; of the host launching one, and of its waiting for input, in the mean."""

    seconds: list[float]
    host_s: float
    input_wait_s: float


def warm_up(built: Built, steps: int, callbacks: Callbacks) -> None:
    """Runs steps until nothing is compiled or captured any more; says so if that does not end."""
    step = built.step
    if step.device.type != "cuda":
        run_steps(built, range(_CPU_WARM_UP))
        return
    captured = -1
    for _ in range(_MOST_PASSES):
        run_steps(built, range(steps + 1))
        before, captured = captured, step.num_graphs
        if captured == before:
            return
    callbacks.warning("shapes are still being captured: these are not the times of a steady run")


def time_steps(built: Built, steps: int) -> Round:
    """Times each of `steps` steps, from the end of the one before to its own."""
    device, flying = built.step.device, _Flying()
    marks = _Marks(device)
    host_s = waited_s = 0.0
    with Feed(built.source, device, stop=steps + 1) as feed:
        for batch in feed:
            seconds = flying.launch(built, batch)
            marks.set()
            flying.wait()
            if batch.number == 0:
                waited_s = feed.wait_s
            else:
                host_s += seconds
        seconds_of_each = marks.intervals()
    return Round(seconds=seconds_of_each, host_s=host_s / steps, input_wait_s=max(0.0, feed.wait_s - waited_s) / steps)


def run_steps(built: Built, numbers: range) -> float:
    """Runs the steps of these batches; seconds from the first batch's being there to the device's end."""
    device, flying, began = built.step.device, _Flying(), 0.0
    with Feed(built.source, device, start=numbers.start, stop=numbers.stop) as feed:
        for batch in feed:
            began = began or time.perf_counter()
            flying.launch(built, batch)
            flying.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class _Flying:
    """Steps that the device may not have done yet."""

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()

    def launch(self, built: Built, batch: Batch) -> float:
        """Launches a step; seconds that the host was busy with it."""
        began = time.perf_counter()
        self._pending.append(built.step.run(batch))
        return time.perf_counter() - began

    def wait(self) -> None:
        """Waits until no more are under way than may be."""
        if len(self._pending) > _IN_FLIGHT:
            self._pending.popleft().read()


class _Marks:
    """Moments: on a GPU in its own stream of work, so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []

    def set(self) -> None:
        if self._device.type != "cuda":
            self._moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def intervals(self) -> list[float]:
        """Seconds from each moment to the next, once the device has reached the last."""
        if self._device.type != "cuda":
            return [float(seconds) for seconds in np.diff(self._moments)]
        torch.cuda.synchronize(self._device)
        return [one.elapsed_time(two) / 1000 for one, two in zip(self._events, self._events[1:], strict=False)]
