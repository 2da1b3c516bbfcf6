"""Memory of a GPU that runs out: at chosen allocations, and for real, under a limit. Graphs are freed, captured again.

About 90 seconds on an H100 or H200: python -m pytest tests/gpu/test_out_of_memory_on_gpu.py -m gpu
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import brimful
from brimful.core.callbacks import Callbacks, Progress
from brimful.core.errors import MemoryFullError
from failing_allocator import FailingAllocator, in_passes
from gpu.word_models import save_word_model
from runs import events

pytestmark = pytest.mark.gpu

WORDS = [f"word{i}" for i in range(200)]
#: Losses of a run in fp32 whose batches were split otherwise: order of sums, grown by as many steps.
LOSS = 1e-3


def save_rows(path: Path, number: int, longest: int) -> Path:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(number):
            words = draw.choices(WORDS, k=draw.randrange(longest // 4, longest))
            file.write(json.dumps({"text": " ".join(words), "label": f"class {words[0][-1]}"}) + "\n")
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(rows, model) of few steps, without dropout."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    save_word_model(folder / "model", WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return save_rows(folder / "rows.jsonl", 360, 40), folder / "model"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(rows, model) whose batch of 256 needs more than 3 GB for the activations of a single micro-batch."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    save_word_model(folder / "model", WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return save_rows(folder / "rows.jsonl", 1600, 120), folder / "model"


def train(inputs: tuple[Path, Path], output: Path, **options: Any) -> brimful.Run:
    asked = {"device": "cuda", "precision": "fp32", "max_length": 128, "learning_rate": 1e-4, "logging_steps": 1}
    options = {"callbacks": Callbacks()} | options
    return brimful.train(inputs[0], model=inputs[1], output=output, **asked | options)


class _Began(Callbacks):
    """Notes how much was allocated when the first step was done."""

    def __init__(self, allocator: FailingAllocator) -> None:
        self._allocator = allocator
        self.at: int | None = None

    def progress(self, progress: Progress) -> None:
        if self.at is None:
            self.at = self._allocator.num_allocations


def losses(folder: Path) -> np.ndarray:
    return np.array([event["loss"] for event in events(folder, "step")])


@contextmanager
def limited_to(num_bytes: int) -> Iterator[None]:
    """Within, torch's allocator has no more than that beside what is in use."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + num_bytes) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("execution", ["eager", "captured"])
def test_wherever_it_runs_out_training_learns_the_same(
    execution: str, small: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two points before the first step is done, where checks begin again, and six in three epochs: steps, captures,
    evaluations, copies for checkpoints."""
    options = {"execution": execution, "num_train_epochs": 3.0, "batch_size": 32}
    train(small, tmp_path / "first", **options)  # its check and what is timed once are kept
    began = _Began(whole := FailingAllocator())
    with whole:
        train(small, tmp_path / "whole", callbacks=began, **options)
    assert began.at is not None
    expected, where = losses(tmp_path / "whole"), []
    points = [*np.linspace(0, began.at, 4)[1:3], *np.linspace(began.at, whole.num_allocations, 8)[1:-1]]
    for number, point in enumerate(points):
        with (allocator := FailingAllocator([round(float(point))])):
            run = train(small, tmp_path / str(number), **options)
        print(execution, began.at, allocator.failed, run.out_of_memory, run.compilations)
        assert run.status == "finished"
        where += [found.where for found in run.out_of_memory]
        assert all(found.tokens_after <= found.tokens_before for found in run.out_of_memory)
        np.testing.assert_allclose(losses(tmp_path / str(number)), expected, rtol=LOSS)
        if execution == "captured" and run.out_of_memory and number < 5:
            assert run.compilations.captured > 0  # again, after what was captured before was freed
    if execution == "captured":
        assert {"capture", "step", "evaluation"} <= set(where)
    else:
        assert len(where) >= 5


def test_wherever_it_runs_out_answers_are_the_same(small: tuple[Path, Path], tmp_path: Path) -> None:
    """Eight points in windows, in the plain model of --verify and in captures among them."""
    train(small, tmp_path / "run", num_train_epochs=1.0)
    ask = {"device": "cuda", "precision": "fp32", "logits": True, "execution": "captured", "token_budget": 2048}

    def classify(name: str, allocator: FailingAllocator) -> tuple[np.ndarray, Any]:
        with in_passes(allocator):
            output = tmp_path / f"{name}.parquet"
            record = brimful.classify(tmp_path / "run" / "model", small[0], output=output, callbacks=Callbacks(), **ask)
        return np.array(pq.read_table(tmp_path / f"{name}.parquet")["logits"].to_pylist()), record

    expected, _ = classify("whole", whole := FailingAllocator())
    told = 0
    for number, share in enumerate(np.linspace(0.02, 0.99, 8)):
        at = max(1, round(float(share) * whole.num_allocations))
        found, record = classify(str(number), allocator := FailingAllocator([at]))
        print(allocator.failed, record.out_of_memory)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        told += len(record.out_of_memory)
    assert told == 8


@pytest.mark.alone
@pytest.mark.parametrize("execution", ["eager", "captured", "compiled"])
def test_a_limit_is_met_by_a_smaller_budget(execution: str, large: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"execution": execution, "max_steps": 20, "batch_size": 256, "eval_split": 0.1, "token_budget": 32768}
    free = train(large, tmp_path / "free", **options)
    assert free.out_of_memory == ()
    needed = free.peak_bytes.reserved or 0
    with limited_to(needed // 3):
        run = train(large, tmp_path / "limited", **options)
    print(execution, needed, run.peak_bytes, run.out_of_memory, run.compilations)
    assert run.out_of_memory
    assert run.out_of_memory[-1].tokens_after <= run.out_of_memory[0].tokens_before // 2
    np.testing.assert_allclose(losses(tmp_path / "limited"), losses(tmp_path / "free"), rtol=LOSS)
    assert (run.peak_bytes.reserved or 0) < needed


@pytest.mark.alone
def test_nothing_is_lost_where_not_even_one_row_fits(large: tuple[Path, Path], tmp_path: Path) -> None:
    """It ends with one error, and memory that its graphs had can be used again."""
    options = {"execution": "captured", "max_steps": 4, "batch_size": 256, "token_budget": 32768}
    least = train(large, tmp_path / "least", **options | {"token_budget": 128}).peak_bytes.reserved  # a row at a time
    assert least is not None
    before = torch.cuda.memory_allocated()
    with limited_to(least // 2), pytest.raises(MemoryFullError) as caught:
        train(large, tmp_path / "run", **options)
    print(caught.value, caught.value.hint)
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + (32 << 20)
    if (tmp_path / "run" / "run.json").exists():  # unless weights alone did not fit
        assert train(large, tmp_path / "run", **options, resume=True).status == "finished"
