"""Seconds by a GPU's own clock, beside events around the same work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from brimful.engine.clock import Clock, StepClock
from brimful.kernels.stream_clock import StreamClock

pytestmark = pytest.mark.gpu
_CYCLES = 20_000_000  # about 10 ms


def _seconds_of(work: Callable[[], object]) -> float:
    """By events."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 1e3


@pytest.mark.parametrize("captured", [False, True])
def test_what_runs_within_is_counted(captured: bool) -> None:
    """Also in each replay of a graph, and in the slot that is named alone."""
    clock = StreamClock(torch.device("cuda", 0), slots=2)
    assert clock.seconds(0) == clock.seconds(1) == 0.0

    def work() -> None:
        with clock.running(1):
            torch.cuda._sleep(_CYCLES)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    seconds = sum(_seconds_of(work) for _ in range(3))
    assert clock.seconds(0) == 0.0
    assert 0.5 * seconds < clock.seconds(1) < 1.2 * seconds


def test_what_is_outside_is_not() -> None:
    clock = StreamClock(torch.device("cuda", 0), slots=1)
    with clock.running(0):
        torch.cuda._sleep(_CYCLES)
    seconds = _seconds_of(lambda: torch.cuda._sleep(5 * _CYCLES))
    assert 0.0 < clock.seconds(0) < 0.5 * seconds


@pytest.mark.alone
def test_steps_are_timed_by_when_they_were_done() -> None:
    """Not by when the host launched them, nor by when it hears of them; a pause between them is left out."""
    _, took = (_seconds_of(lambda: torch.cuda._sleep(_CYCLES)) for _ in range(2))  # the first one is loaded, too
    clock, rounds = Clock(), []
    steps = StepClock(clock, torch.device("cuda", 0))
    for _ in range(2):
        steps.begin()
        launched = []
        for _ in range(3):
            torch.cuda._sleep(_CYCLES)
            launched.append(steps.launched())
        time.sleep(20 * took)
        rounds.append([steps.done(each) for each in launched])
        with clock.paused():
            time.sleep(20 * took)
    for done in rounds:
        assert [later - sooner for sooner, later in itertools.pairwise(done)] == pytest.approx([took, took], rel=0.3)
    # The host heard late, by 20 less the three that there were; the pause does not count.
    assert rounds[1][0] - rounds[0][-1] == pytest.approx(18 * took, rel=0.2)
    assert rounds[1][-1] <= clock.seconds
