"""Parts of gradients in memory that processes reach: a pass that was left is begun again with all others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.step.reduce import buckets
from brimful.step.reduce.scattered import PeerParts


@pytest.mark.parametrize("leaves", [False, True], ids=["none left", "one left"])
def test_each_bucket_is_met_for_once_a_pass(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """A capture that failed may have met for some, and the next pass may fail before it begins any."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    parameters, met = [torch.nn.Parameter(torch.zeros(16)) for _ in range(2)], list[int]()
    cut = buckets.cut_buckets([16, 16], 2)
    memory = torch.zeros(cut[-1].end)
    gradients: Any = SimpleNamespace(own=memory, all_R=[memory, memory.clone()], meet=lambda: met.append(1))
    ranks: Any = SimpleNamespace(
        rank=0, count=2, leads=True, pulse=SimpleNamespace(traffic=SimpleNamespace(device=None))
    )
    given: Any = (lambda _: None, lambda *_: None, lambda _: torch.float32)
    sums = PeerParts(ranks, parameters, cut, gradients, *given, overlap=True)
    if leaves:
        sums.arm()
        parameters[1].sum().backward()  # completes the first bucket alone
        sums.disarm()
        assert len(met) == 1
        met.clear()
    sums.finish()
    assert len(met) == len(cut) == 2
