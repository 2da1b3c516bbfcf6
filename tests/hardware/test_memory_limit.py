"""A limit of memory, and room that it leaves, on a GPU that is pretended."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from brimful.core.errors import OptionError
from brimful.hardware import device_memory
from brimful.hardware.device_memory import hold_limit

GPU = torch.device("cuda")
MB = 1 << 20


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Parts that torch is given of a GPU of 8,000 MB, of which the process has 700, 100 of them torch's."""
    found: list[float] = []

    class Properties:
        total_memory = 8000 * MB

    monkeypatch.setattr(device_memory, "process_bytes", lambda _: 700 * MB)
    monkeypatch.setattr(device_memory, "_load_libraries", lambda _: None)
    told: dict[str, Any] = {
        "init": lambda: None,
        "memory_reserved": lambda _: 100 * MB,
        "get_device_properties": lambda _: Properties(),
        "get_per_process_memory_fraction": lambda _: 1.0,
        "set_per_process_memory_fraction": lambda fraction, _: found.append(fraction),
    }
    for name, call in told.items():
        monkeypatch.setattr(torch.cuda, name, call)
    return found


@pytest.mark.parametrize(("limit", "margin"), [(1000, 64), (3200, 100), (16000, 256)])
def test_room_is_left_for_what_the_driver_loads(limit: int, margin: int, fractions: list[float]) -> None:
    assert hold_limit(GPU, limit * MB) == (600 * MB, margin * MB)
    assert fractions[-1] == pytest.approx(min(1.0, (limit - 600 - margin) / 8000))


def test_a_limit_that_leaves_torch_nothing_is_refused(fractions: list[float]) -> None:
    """Before the first step 192 MB are to come."""
    said = re.escape("--memory-limit is 790MB, and 600.0 MiB are in use outside torch")
    with pytest.raises(OptionError, match=said), device_memory.device_memory(GPU, "790MB", "default"):
        pass
    assert fractions[-1] == 1.0
    with device_memory.device_memory(GPU, "1GB", "default"):
        assert 0 < fractions[-1] < 0.03
