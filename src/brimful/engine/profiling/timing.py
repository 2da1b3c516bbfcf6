"""Steps as training launches them, gone through to warm up, to be timed, to be recorded: the same batches each time.

The batches are the run's own, from its beginning. Weights change from pass to pass, and speed does not depend on them.
Batch 0 only gets the device going: what is timed and recorded begins with batch 1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from brimful.core.callbacks import Callbacks
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
    """One timed pass: seconds of each step; of the host launching one, and of its waiting for input, in the mean.

    sent_s, blocked_s: of `Traffic`, in the mean.
    """

    seconds: list[float]
    host_s: float
    input_wait_s: float
    sent_s: float
    blocked_s: float


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
    """Times each of `steps` steps, from the end of the one before to its own.

    On a GPU, whose clock the host reads while steps are in flight, sums of the step before them count, too.
    """
    marks, waited_s, made_s, traffic = _Marks(built.step.device), 0.0, 0.0, built.step.ranks.pulse.traffic
    launches_s: list[float] = []
    sent_s, blocked_s, counted = traffic.sent_s, traffic.blocked_s, steps + 1
    with Feed(built.source, built.step.device, stop=steps + 1, ahead=built.ahead) as feed:
        for seconds in _launches(built, feed):
            marks.set()
            if not launches_s and built.step.device.type != "cuda":
                sent_s, blocked_s, counted = traffic.sent_s, traffic.blocked_s, steps
            launches_s.append(seconds)
            waited_s, made_s = waited_s or feed.wait_s, made_s or feed.made_s
        intervals = marks.intervals()
    input_wait_s = max(0.0, feed.wait_s - waited_s) / steps
    return Round(
        seconds=intervals,
        host_s=(sum(launches_s[1:]) + feed.made_s - made_s) / steps,
        input_wait_s=input_wait_s,
        sent_s=(traffic.sent_s - sent_s) / counted,
        blocked_s=(traffic.blocked_s - blocked_s) / counted,
    )


def run_steps(built: Built, numbers: range) -> float:
    """Runs the steps of these batches; seconds from the first batch's being there to the device's end."""
    device, began = built.step.device, 0.0
    start, stop = numbers.start, numbers.stop
    with Feed(built.source, device, start=start, stop=stop, ahead=built.ahead) as feed:
        for seconds in _launches(built, feed):
            began = began or time.perf_counter() - seconds
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _launches(built: Built, feed: Feed) -> Iterator[float]:
    """Launch each step; seconds that the host was busy with it. No more are in flight than may be when it goes on."""
    flying: deque[Pending] = deque()
    for batch in feed:
        began = time.perf_counter()
        flying.append(built.step.run(batch))
        yield time.perf_counter() - began
        if len(flying) > _IN_FLIGHT:
            flying.popleft().read()


class _Marks:
    """Moments: on a GPU in its own stream of work, so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def set(self) -> None:
        moment: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            moment.record()
        self._moments.append(moment)

    def intervals(self) -> list[float]:
        """Seconds from each moment to the next, once the device has reached the last."""
        if self._on_gpu:
            self._moments[-1].synchronize()
            return [one.elapsed_time(two) / 1000 for one, two in pairwise(self._moments)]
        return [two - one for one, two in pairwise(self._moments)]
