"""Seconds of a process by phase."""

from __future__ import annotations

import time

from brimful.core.phases import Phases, process_began


def test_phases_share_out_all_the_time_there_was() -> None:
    began = time.perf_counter() - 100.0
    phases = Phases(began)
    assert phases.enter("data") == "start"
    with phases.during("tokens"):
        time.sleep(0.01)
    phases.enter("steps")
    time.sleep(0.02)
    phases.move(0.015, "capture")
    found, passed = phases.seconds, time.perf_counter() - began
    assert list(found) == ["start", "data", "tokens", "capture", "steps"]
    assert found["start"] >= 100
    assert found["tokens"] >= 0.01
    assert found["capture"] == 0.015
    assert found["steps"] >= 0.005
    assert -0.01 < passed - sum(found.values()) < 1  # each is rounded to a millisecond


def test_a_phase_ends_where_its_block_raises() -> None:
    phases = Phases()
    try:
        with phases.during("evaluation"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert phases.enter("saving") == "start"


def test_a_process_began_before_its_first_line() -> None:
    assert 0 <= time.perf_counter() - process_began() < 24 * 3600
