"""Work of several processes as the leader writes it down while a run is under way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from brimful.core.place import Place
from brimful.engine.training.shared_work import SharedWork
from brimful.hardware.pulse import Pulse
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
    assert "; 12 tokens/s each; they waited for others 0.0 % of their steps" in processes_text(found)
    assert [row[3] for row in processes_rows(found)] == ["12", "not known"]
    assert [row[4] for row in processes_rows(found)] == ["0.0 %", "not known"]
