"""A run's words on its compilations, against torch's compiler and a step that captures."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from brimful.core.records import Compilations
from brimful.engine.compilations import CompilationWatch
from brimful.step.step import Step


class _Step:
    num_graphs = 0


@pytest.fixture
def step() -> Any:
    return _Step()


def test_nothing_is_made(step: Any) -> None:
    watch = CompilationWatch(cast(Step, step))
    watch.look(1)
    watch.look(2)
    assert watch.found == Compilations()


def test_graphs_and_the_batch_of_the_last_one(step: Any) -> None:
    watch = CompilationWatch(cast(Step, step))
    for consumed, graphs in enumerate([0, 1, 2, 2, 3, 3, 3], 1):
        step.num_graphs = graphs
        watch.look(consumed)
    assert watch.found == Compilations(captured=3, last_captured=5)


def test_what_is_compiled_again_counts_again(step: Any) -> None:
    @torch.compile(backend="eager", dynamic=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double(torch.ones(3))  # another's: before this run began
    watch = CompilationWatch(cast(Step, step))
    double(torch.ones(5))  # another shape is no reason
    watch.look(1)
    assert watch.found == Compilations()
    double(torch.ones(5, dtype=torch.float64))
    watch.look(2)
    double(torch.ones(7, dtype=torch.float64))
    watch.look(3)
    assert watch.found == Compilations(traced=1, last_traced=2)
