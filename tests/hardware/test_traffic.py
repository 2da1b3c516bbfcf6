"""Seconds of sums between processes, as the host sees them and by a device's clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.hardware.traffic import BLOCKED, SENT, Traffic


class _Collective:
    """One that ends when it is told to."""

    def __init__(self) -> None:
        self.future: Any = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future

    def wait(self) -> None:
        self.future.set_result(None)


def test_time_of_collectives_under_way_together_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 13.0, 14.0, 14.0])  # the first began; waited for; it ended; waited until
    monkeypatch.setattr("brimful.hardware.traffic.time", SimpleNamespace(monotonic=lambda: next(now)))
    traffic, first, second = Traffic(), _Collective(), _Collective()
    traffic.begin(first)
    traffic.begin(second)
    second.future.set_result(None)
    traffic.wait(first)
    assert (traffic.sent_s, traffic.blocked_s, traffic.hidden_s) == (4.0, 1.0, 3.0)


def test_a_device_has_a_clock_of_its_own() -> None:
    traffic = Traffic()
    traffic.device = SimpleNamespace(seconds={SENT: 5.0, BLOCKED: 1.5}.__getitem__, start=None, stop=None)  # type: ignore[assignment]
    assert (traffic.sent_s, traffic.blocked_s, traffic.hidden_s) == (5.0, 1.5, 3.5)
