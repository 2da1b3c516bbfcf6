"""Work of several processes as the leader writes it down while a run is under way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from brimful.core.place import Place
from brimful.core.records import PeakMemory, Processes, ProcessWork
from brimful.engine.training.shared_work import SharedWork
from brimful.hardware.pulse import Beat, Pulse
from brimful.hardware.ranks import Ranks
from brimful.reports.processes_text import processes_rows, processes_text


def test_what_a_process_has_not_said_is_null() -> None:
    work = SharedWork(Ranks(Place(rank=0, count=2)))
    batch: Any = SimpleNamespace(rows=SimpleNamespace(whole=SimpleNamespace(shares=[np.array([5, 3]), np.array([7])])))
    for _ in range(4):
        work.add(batch)
    silent = Pulse(1).beat()
    said = dataclasses.replace(Pulse(0).beat(), steps_s=2.0, waited_s=0.0, tokens=24)
    found = work.found((said, silent))
    assert found is not None
    first, second = found.each
    assert (first.tokens, first.steps_s, first.waited_s, first.tokens_per_s) == (32, 2.0, 0.0, 12.0)
    assert second.tokens == 28
    assert (second.steps_s, second.waited_s, second.tokens_per_s, second.sent_s) == (None,) * 4
    assert (second.peak_bytes, second.limit_bytes) == (None, None)
    assert "; 12 tokens/s each; they waited for others 0.0 % of their steps" in processes_text(found)
    assert [row[3] for row in processes_rows(found)] == ["12", "not known"]
    assert [row[4] for row in processes_rows(found)] == ["0.0 %", "not known"]
    assert "memory" not in processes_text(found)


def test_the_process_nearest_its_limit_is_named() -> None:
    def work(peak: PeakMemory, limit: int | None) -> ProcessWork:
        return ProcessWork(host="h", device="GPU 0", tokens=1, samples=1, peak_bytes=peak, limit_bytes=limit)

    small, large = PeakMemory(allocated=1 << 30, reserved=2 << 30, nvml=3 << 30), PeakMemory(reserved=5 << 30)
    found = Processes(imbalance=1.0, each=(work(large, 80 << 30), work(small, 4 << 30)))
    said = "process 1 came the nearest to its memory's limit while training: 3.0 GiB of 4.0 GiB"
    assert said in processes_text(found)
    assert [row[-1] for row in processes_rows(found)] == ["5.0 GiB of 80.0 GiB", "3.0 GiB of 4.0 GiB"]
    on_host = Processes(imbalance=1.0, each=tuple(work(PeakMemory(resident=n << 30), None) for n in (1, 2)))
    assert processes_text(on_host).endswith("process 1 had the most memory while training: 2.0 GiB")


def test_a_beat_keeps_its_memory() -> None:
    pulse = Pulse()
    pulse.peak_bytes, pulse.limit_bytes = PeakMemory(reserved=3, components={"weights": 1}), 5
    beat = pulse.beat()
    assert Beat.from_json(beat.to_json()) == beat
