"""Whole runs in which memory runs out: they end as others do, and the record says what happened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import MemoryFullError
from failing_allocator import FailingAllocator, in_passes
from runs import checkpoints, events, save_tiny_model, single_label_rows, write_rows
from tolerances import RUN_LOSS_FP32, difference

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

SIZES = {"max_length": 48, "batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1, "num_train_epochs": 2.0}


class Heard(Callbacks):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    @property
    def out_of_memory(self) -> list[str]:
        return [said for said in self.warnings if said.startswith("memory ran out")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Rows, and a model that has no dropout: its losses do not depend on the split into micro-batches."""
    folder = tmp_path_factory.mktemp("inputs")
    return write_rows(folder / "rows.jsonl", single_label_rows(40)), save_tiny_model(folder / "model", dropout=0.0)


def train(
    inputs: tuple[Path, Path], output: Path, allocator: FailingAllocator, *, within: Any = None, **more: Any
) -> tuple[Any, Heard]:
    """within: `in_passes` to count what passes allocate alone."""
    rows, model = inputs
    heard = Heard()
    with allocator if within is None else within(allocator):
        run = brimful.train(rows, model=model, output=output, callbacks=heard, **SIZES | more)  # type: ignore[arg-type]
    return run, heard


def losses(folder: Path) -> np.ndarray:
    return np.array([event["loss"] for event in events(folder, "step")])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run with all the memory that it wants, and the number of its allocations."""
    folder, allocator = tmp_path_factory.mktemp("whole") / "run", FailingAllocator()
    train(inputs, folder, FailingAllocator())  # the equivalence check is kept
    train(inputs, folder.with_name("again"), allocator)
    return folder, allocator.num_allocations


@pytest.mark.thorough
def test_the_record_says_it_and_the_losses_are_those_of_any_run(
    inputs: tuple[Path, Path], whole: tuple[Path, int], tmp_path: Path
) -> None:
    point = int(0.6 * whole[1])  # twice: larger batches may have fitted before
    for where, points in (("step", [point, point + 20]), ("evaluation", [60])):
        folder, allocator = tmp_path / where, FailingAllocator(points)
        run, heard = train(inputs, folder, allocator, within=in_passes if where == "evaluation" else None)
        assert len(allocator.failed) == len(points)
        (found,) = run.out_of_memory
        assert found.where == where
        record = json.loads((folder / "run.json").read_text())
        assert record["status"] == "finished"
        assert record["out_of_memory"] == [vars(found)]
        (event,) = events(folder, "out_of_memory")
        assert {key: event[key] for key in vars(found)} == vars(found)
        (said,) = heard.out_of_memory
        assert f"at most {found.tokens_after:,} tokens from here on" in said
        assert difference(losses(folder), losses(whole[0])) <= 10 * RUN_LOSS_FP32


@pytest.mark.slow
def test_a_run_that_ends_for_want_of_memory_goes_on_where_it_was(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """Two steps were in flight when memory was full; they count, and the one behind them was begun anew."""
    full = [False]
    allocator = FailingAllocator(fits=lambda _: not full[0])

    class Filling(Heard):
        def progress(self, progress: Any) -> None:
            full[0] = progress.step == 6

    heard = Filling()
    ask = {"data": inputs[0], "model": inputs[1], "output": tmp_path / "run", "callbacks": heard, **SIZES}
    with allocator, pytest.raises(MemoryFullError, match="all is saved after step 8") as caught:
        brimful.train(**ask)
    assert caught.value.exit_code == 6
    assert "lower --max-length; the same is learned with --gradient-checkpointing full; " in str(caught.value.hint)
    assert "; --resume goes on" in str(caught.value.hint)
    assert checkpoints(tmp_path / "run")[-1] == 8
    assert events(tmp_path / "run")[-1]["kind"] == "stopped"
    full[0] = False
    run = brimful.train(**ask | {"resume": True, "callbacks": Heard()})
    assert run.status == "finished"
    train(inputs, tmp_path / "whole", FailingAllocator())
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_smaller_budget(
    inputs: tuple[Path, Path], whole: tuple[Path, int], tmp_path: Path
) -> None:
    """Weights bit for bit, of a run that was stopped after its budget was halved and of one that was not."""
    point = int(0.6 * whole[1])
    run, _ = train(inputs, tmp_path / "straight", FailingAllocator([point, point + 20]))
    (found,) = run.out_of_memory
    stopping = {"full": False}

    class Filling(Heard):
        def progress(self, progress: Any) -> None:
            stopping["full"] = progress.step == 7

    allocator = FailingAllocator([point, point + 20], fits=lambda _: not stopping["full"])
    ask = {"data": inputs[0], "model": inputs[1], "output": tmp_path / "run", **SIZES}
    with allocator, pytest.raises(MemoryFullError):
        brimful.train(**ask, callbacks=Filling())
    resumed = brimful.train(**ask, resume=True)
    assert [replace(each, free_bytes=found.free_bytes) for each in resumed.out_of_memory] == [found]
    one, other = weights(tmp_path / "run"), weights(tmp_path / "straight")
    assert all(torch.equal(one[name], other[name]) for name in other)
