"""Counts what a run compiles and captures: once for layers of a kind and for a token budget, and then no more."""

from __future__ import annotations

import dataclasses
import sys

from brimful.core.records import Compilations
from brimful.step.step import Step


class CompilationWatch:
    """Compilations and captures in this process since this object was made."""

    def __init__(self, step: Step) -> None:
        self._step, self._traced_before = step, _num_traced()
        self.found = Compilations()

    def look(self, consumed: int) -> bool:
        """Look after a step was launched, the last of `consumed` batches; return whether it made any."""
        before = self.found
        traced, captured = _num_traced() - self._traced_before, self._step.num_graphs
        if traced != self.found.traced:
            self.found = dataclasses.replace(self.found, traced=traced, last_traced=consumed)
        if captured != self.found.captured:
            self.found = dataclasses.replace(self.found, captured=captured, last_captured=consumed)
        return self.found is not before


def _num_traced() -> int:
    """Graphs that torch's compiler has made in this process; none where it was never loaded, which takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
