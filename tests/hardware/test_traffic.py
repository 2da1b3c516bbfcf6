"""Seconds of sums between processes, as the host sees them and by a device's clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.hardware.pulse import Pulse
from brimful.hardware.traffic import BLOCKED, SENT, Traffic


class _Collective:
    """One that ends when it is told to."""

    def __init__(self) -> None:
        self.future: Any = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future

    def wait(self) -> None:
        self.future.set_result(None)


class _Late(_Collective):
    """One whose end is told after whoever waits for it goes on."""

    def wait(self) -> None:
        pass


def test_time_of_collectives_under_way_together_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 13.0, 14.0, 14.0])  # the first began; waited for; it ended; waited until
    monkeypatch.setattr("brimful.hardware.traffic.time", SimpleNamespace(monotonic=lambda: next(now)))
    traffic, first, second = Traffic(), _Collective(), _Collective()
    number = traffic.begin(first)
    traffic.begin(second)
    second.future.set_result(None)
    traffic.wait(first, number)
    assert (traffic.sent_s, traffic.blocked_s) == (4.0, 1.0)


def test_what_was_waited_for_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that says so may be late, and another collective be under way by then."""
    now = iter([10.0, 11.0, 12.0, 12.0, 20.0, 25.0, 26.0, 26.0])
    monkeypatch.setattr("brimful.hardware.traffic.time", SimpleNamespace(monotonic=lambda: next(now)))
    traffic, first, second = Traffic(), _Late(), _Late()
    traffic.wait(first, traffic.begin(first))
    number = traffic.begin(second)
    first.future.set_result(None)
    traffic.wait(second, number)
    second.future.set_result(None)
    assert (traffic.sent_s, traffic.blocked_s) == (2.0 + 6.0, 1.0 + 1.0)


def test_a_device_has_a_clock_of_its_own() -> None:
    traffic = Traffic()
    traffic.device = SimpleNamespace(seconds={SENT: 5.0, BLOCKED: 1.5}.__getitem__, start=None, stop=None)  # type: ignore[assignment]
    assert (traffic.sent_s, traffic.blocked_s) == (5.0, 1.5)


def test_sums_of_the_first_step_are_not_counted() -> None:
    """Nor those of a checkpoint: they wait for processes that compile, or write, and steps alone have seconds."""
    counted, pulse = {SENT: 0.0, BLOCKED: 0.0}, Pulse()
    pulse.traffic.device = SimpleNamespace(seconds=counted.__getitem__, start=None, stop=None)  # type: ignore[assignment]
    for work, sent, blocked in (
        (lambda: pulse.begin(1), 30.0, 20.0),
        (lambda: pulse.begin(2), 5.0, 1.0),
        (lambda: pulse.enter("saving"), 7.0, 7.0),
        (lambda: pulse.begin(3), 0.5, 0.25),
    ):
        work()
        counted[SENT] += sent
        counted[BLOCKED] += blocked
    pulse.move()
    assert (pulse.beat().sent_s, pulse.beat().hidden_s) == (5.5, 4.25)
