"""`brimful.train` from Python: each task and the levers that must not change what it learns."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful
from brimful.core.callbacks import Callbacks, Progress, StepsDone
from brimful.core.errors import OptionError
from brimful.engine.fitted_step import FittedStep
from brimful.engine.training import loop
from brimful.integrations.trackers.run_log import RunLog
from runs import contents, events, learned, save_tiny_model, single_label_rows, texts, write_rows
from tolerances import MODEL_FP32, RUN_LOSS_FP32, difference

SIZES = {"max_length": 48, "batch_size": 8, "max_steps": 10, "learning_rate": 1e-3, "logging_steps": 1}
NUMBERS = np.random.default_rng(3).normal(size=60)
#: Rows of each kind of task.
TASKS: dict[str, list[dict[str, Any]]] = {
    "single label": single_label_rows(60),
    "multi-label": [
        {"text": text, "labels": [name for bit, name in enumerate("abc") if (index >> bit) & 1]}
        for index, text in enumerate(texts(60))
    ],
    "regression": [{"text": text, "label": NUMBERS[index]} for index, text in enumerate(texts(60))],
    "pairs": [
        {"text": first, "text_pair": second, "label": ("no", "yes")[index % 2]}
        for index, (first, second) in enumerate(zip(texts(60, longest=20), texts(60, 1, longest=20), strict=True))
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def plain_model(home: Path) -> Path:
    """Without dropout: masks depend on the split into micro-batches."""
    return save_tiny_model(home / "plain", dropout=0.0)


@pytest.fixture(scope="session")
def data(home: Path) -> dict[str, Path]:
    return {name: write_rows(home / f"{name.replace(' ', '-')}.jsonl", rows) for name, rows in TASKS.items()}


def losses(folder: Path) -> np.ndarray:
    return np.array([event["loss"] for event in events(folder, "step")])


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("task", TASKS)
def test_levers_that_are_exact(task: str, plain_model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    """Packed or padded, in one micro-batch or many: the same losses, and models that answer alike."""
    levers: dict[str, dict[str, Any]] = {
        "packed": {},
        "padded": {"packing": "off"},
        "split": {"token_budget": 48},
        "padded, split": {"packing": "off", "token_budget": 48},
    }
    runs = {
        name: brimful.train(data[task], model=plain_model, output=tmp_path / name, **SIZES, **lever)
        for name, lever in levers.items()
    }
    assert [run.packed for run in runs.values()] == [True, False, True, False]
    expected = losses(tmp_path / "padded")
    assert len(expected) == 10
    for name, run in runs.items():
        assert difference(losses(tmp_path / name), expected) <= RUN_LOSS_FP32, name
        assert run.metrics["loss"] == pytest.approx(runs["padded"].metrics["loss"], rel=MODEL_FP32), name
    assert runs["packed"].recipe.value("token_budget") != runs["split"].recipe.value("token_budget")


@pytest.mark.sampled
@pytest.mark.parametrize("task", TASKS)
def test_transformers_loads_what_was_saved(task: str, plain_model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    """And gives the logits of the run, by its evaluation: loss and metrics on the held-out rows."""
    evaluation = write_rows(tmp_path / "evaluation.jsonl", TASKS[task][:20])
    run = brimful.train(data[task], model=plain_model, output=tmp_path / "run", eval_data=str(evaluation), **SIZES)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    rows = TASKS[task][:20]
    both = [[row["text"] for row in rows]] + ([[row["text_pair"] for row in rows]] if task == "pairs" else [])
    encoded = tokenizer(*both, padding=True, truncation=True, max_length=48, return_tensors="pt")
    labels = torch.tensor([target(model, row) for row in rows])
    with torch.no_grad():
        answer = model(**encoded, labels=labels)
    assert float(answer.loss) == pytest.approx(run.metrics["loss"], rel=MODEL_FP32)
    if task in ("single label", "pairs"):
        assert float((answer.logits.argmax(-1) == labels).float().mean()) == pytest.approx(run.metrics["accuracy"])
    assert model.dtype == torch.float32


def target(model: Any, row: dict[str, Any]) -> Any:
    """A row's label as transformers' own loss wants it."""
    if "labels" in row:
        return [float(name in row["labels"]) for name in model.config.label2id]
    return model.config.label2id[row["label"]] if isinstance(row["label"], str) else row["label"]


@pytest.mark.slow
def test_more_tasks_than_one_learn(plain_model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    options = SIZES | {"max_steps": 60, "learning_rate": 1e-2}
    for task in ("single label", "regression"):
        brimful.train(data[task], model=plain_model, output=tmp_path / task, **options)
        found = losses(tmp_path / task)
        assert found[-5:].mean() < 0.7 * found[:5].mean(), task


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near(precision: str, plain_model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    brimful.train(data["single label"], model=plain_model, output=tmp_path / "fp32", **SIZES)
    slow = pytest.warns(UserWarning, match="fp16 takes several times as long") if precision == "fp16" else nullcontext()
    with slow:
        run = brimful.train(
            data["single label"], model=plain_model, output=tmp_path / "half", precision=precision, **SIZES
        )  # fmt: skip
    assert run.recipe.value("precision") == precision
    difference_to_fp32 = difference(losses(tmp_path / "half"), losses(tmp_path / "fp32"))
    assert 0 < difference_to_fp32 < 0.02
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "half" / "model")
    assert model.dtype == torch.float32


@pytest.mark.slow
def test_equal_seeds_equal_bits(model: Path, rows: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        brimful.train(rows, model=model, output=tmp_path / name, seed=seed, **SIZES)
    assert learned(tmp_path / "one") == learned(tmp_path / "again")
    assert learned(tmp_path / "one") != learned(tmp_path / "other")


def test_trained_on_every_row(model: Path, rows: Path, tmp_path: Path) -> None:
    run = brimful.train(rows, model=model, output=tmp_path / "run", eval_split=0.0, **SIZES)
    assert dict(run.metrics) == {}
    assert run.data["rows"] == 60
    assert events(tmp_path / "run", "evaluated") == []


def test_a_dry_run_writes_nothing(model: Path, rows: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    run = brimful.train(rows, model=model, output=tmp_path / "run", dry_run=True, report_to="tensorboard", **SIZES)
    assert (run.status, run.packed, run.steps) == ("planned", True, 0)
    assert run.recipe.value("precision") == "fp32"
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tensorboard_has_what_the_log_has(model: Path, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    brimful.train(rows, model=model, output=tmp_path / "run", report_to=["tensorboard"], eval_steps=5, **SIZES)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    found = [(point.step, point.value) for point in board.Scalars("train/loss")]
    assert found == [(e["step"], pytest.approx(e["loss"])) for e in events(tmp_path / "run", "step")]
    assert [point.step for point in board.Scalars("eval/accuracy")] == [5, 10]


def test_a_listener_hears_the_run(model: Path, rows: Path, tmp_path: Path) -> None:
    class Heard(Callbacks):
        steps: list[int] = []
        evaluated_after: list[int] = []

        def progress(self, progress: Progress) -> None:
            self.steps.append(progress.step)

        def evaluated(self, step: int, metrics: object) -> None:
            self.evaluated_after.append(step)

    heard = Heard()
    brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **SIZES | {"logging_steps": 4})
    assert (heard.steps, heard.evaluated_after) == ([1, 4, 8, 10], [7, 10])


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("ends", [{"max_steps": 5}, {"max_steps": None, "num_train_epochs": 1.0}])
def test_a_short_run_has_its_first_and_its_last_step_in_the_log(
    ends: dict[str, Any], model: Path, rows: Path, tmp_path: Path
) -> None:
    """Each with loss and rates of its own steps; gone on with, the run has no line twice."""
    brimful.train(rows, model=model, output=tmp_path / "each", **SIZES | ends)
    asked = SIZES | ends | {"logging_steps": 10, "save_steps": 2}
    run = brimful.train(rows, model=model, output=tmp_path / "run", **asked)
    each = [line["loss"] for line in events(tmp_path / "each", "step")]
    lines = events(tmp_path / "run", "step")
    assert [line["step"] for line in lines] == [1, run.steps]
    assert [line["loss"] for line in lines] == [each[0], pytest.approx(sum(each[1:]) / (run.steps - 1))]
    brimful.train(rows, model=model, output=tmp_path / "run", resume=True, **asked)
    assert events(tmp_path / "run", "step") == lines


@pytest.mark.slow
def test_a_run_that_ends_early_has_its_last_step_in_the_log(model: Path, rows: Path, tmp_path: Path) -> None:
    """With the mean of the steps since the line before; gone on with for longer, the run has no line twice."""
    asked: dict[str, Any] = SIZES | {"learning_rate": 1e-9, "eval_steps": 2, "max_steps": 20}
    asked |= {"metric_for_best_model": "accuracy", "early_stopping_patience": 1, "baselines": False}
    brimful.train(rows, model=model, output=tmp_path / "each", **asked)
    each = [line["loss"] for line in events(tmp_path / "each", "step")]
    run = brimful.train(rows, model=model, output=tmp_path / "run", **asked | {"logging_steps": 10})
    assert run.steps == len(each) == 4
    lines = events(tmp_path / "run", "step")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, each[0]), (4, pytest.approx(sum(each[1:]) / 3))]
    assert lines[-1]["samples_per_s"] > 0
    longer = asked | {"logging_steps": 10, "max_steps": 24}
    brimful.train(rows, model=model, output=tmp_path / "run", resume=True, **longer)  # and it ends early again
    assert [line["step"] for line in events(tmp_path / "run", "step")] == [1, 4, 6]


@pytest.mark.slow
def test_a_run_that_is_stopped_has_its_last_step_in_the_log_until_it_goes_on(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """Its log is then that of a run that nobody stopped, and trackers are sent no step twice."""

    class Stops(Callbacks):
        def progress(self, progress: Progress) -> None:
            if progress.step == 1:
                signal.raise_signal(signal.SIGTERM)

    asked = SIZES | {"logging_steps": 5, "baselines": False}
    brimful.train(rows, model=model, output=tmp_path / "alone", **asked)
    brimful.train(rows, model=model, output=tmp_path / "each", **asked | {"logging_steps": 1})
    with pytest.raises(brimful.Interrupted):
        brimful.train(rows, model=model, output=tmp_path / "run", callbacks=Stops(), **asked)
    last = events(tmp_path / "run")[-1]
    lines, sent = events(tmp_path / "run", "step"), dict[str, int]()
    assert (last["kind"], [line["step"] for line in lines]) == ("stopped", [1, last["step"]])
    assert 1 < last["step"] < 5
    each = [line["loss"] for line in events(tmp_path / "each", "step")][1 : last["step"]]
    assert lines[-1]["loss"] == pytest.approx(sum(each) / len(each))
    assert [line["step"] for line in events(tmp_path / "run", "time")] == [1, last["step"]]
    points = [point.step for point in RunLog(tmp_path / "run" / "events.jsonl").new(sent)]
    brimful.train(rows, model=model, output=tmp_path / "run", resume=True, **asked)
    assert learned(tmp_path / "run") == learned(tmp_path / "alone")
    later = RunLog(tmp_path / "run" / "events.jsonl").new(sent)
    points += [point.step for point in later if "train/loss" in point.values]
    assert points == [1, last["step"], 5, 10]


@pytest.mark.slow
def test_a_run_that_is_stopped_in_the_evaluation_that_ends_it_has_its_last_step_in_the_log(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that goes on makes no step: it evaluates again, and early stopping ends the run."""
    asked: dict[str, Any] = SIZES | {"learning_rate": 1e-9, "eval_steps": 2, "max_steps": 20, "logging_steps": 10}
    asked |= {"metric_for_best_model": "accuracy", "early_stopping_patience": 1, "baselines": False}
    brimful.train(rows, model=model, output=tmp_path / "alone", **asked)
    evaluate, steps = loop.TrainingLoop._evaluate, list[int]()

    def stopped_at_the_second(self: loop.TrainingLoop) -> bool:
        steps.append(self._state.applied)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self)

    monkeypatch.setattr(loop.TrainingLoop, "_evaluate", stopped_at_the_second)
    with pytest.raises(brimful.Interrupted):
        brimful.train(rows, model=model, output=tmp_path / "run", **asked)
    brimful.train(rows, model=model, output=tmp_path / "run", resume=True, **asked)
    assert steps == [2, 4, 4]
    assert learned(tmp_path / "run") == learned(tmp_path / "alone")
    alone, found = (events(tmp_path / name, "step") for name in ("alone", "run"))
    assert [(line["step"], line["loss"]) for line in found] == [(line["step"], line["loss"]) for line in alone]
    assert all(line["samples_per_s"] > 0 for line in found)


@pytest.mark.slow
def test_steps_are_told_of_between_logged_lines(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them where each takes long enough, on a CPU as soon as they are computed."""

    class Heard(Callbacks):
        def __init__(self) -> None:
            self.steps: list[StepsDone] = []

        def stepped(self, steps: StepsDone) -> None:
            self.steps.append(steps)

    found = []
    for seconds in (math.inf, 0.0):
        monkeypatch.setattr(loop, "_STEPS_EVERY_S", seconds)
        heard, given = Heard(), SIZES | {"logging_steps": 100}
        brimful.train(rows, model=model, output=tmp_path / f"{seconds}", callbacks=heard, **given)
        found.append(heard.steps)
    assert found[0] == []
    assert [steps.done for steps in found[1]] == [*range(1, 11)]
    assert found[1][0].loss is None
    assert found[1][-2].loss == pytest.approx(math.log(3), abs=0.5)
    assert found[1][-1].left_s == 0
    assert all(steps.num_steps == 10 and steps.steps_per_s > 0 for steps in found[1])


def test_rates_of_logged_lines_are_of_their_own_steps(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the loop hears of several at once, before an evaluation: none took less than it did."""
    real, longest = FittedStep.run, 0.02

    def slow(self: Any, batch: Any) -> Any:
        time.sleep(longest)
        return real(self, batch)

    monkeypatch.setattr(FittedStep, "run", slow)
    given = SIZES | {"logging_steps": 1, "eval_steps": 3}
    run = brimful.train(rows, model=model, output=tmp_path / "run", **given)
    lines = events(tmp_path / "run", "step")
    seconds = [SIZES["batch_size"] / line["samples_per_s"] for line in lines]
    assert len(lines) == 10
    assert min(seconds[:5]) >= longest  # of whole batches
    assert sum(seconds[:5]) <= run.train_s


@pytest.mark.slow
def test_the_record_repeats_the_run(model: Path, rows: Path, tmp_path: Path) -> None:
    run = brimful.train(rows, model=model, output=tmp_path / "run", **SIZES)
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert record["metrics"] == dict(run.metrics)
    assert record["options"]["max_steps"] == 10
    again = {name: value for name, value in record["options"].items() if name not in ("data", "model", "output")}
    brimful.train(rows, model=model, output=tmp_path / "again", **again)
    assert learned(tmp_path / "again") == learned(tmp_path / "run")


def test_an_option_there_is_not(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="learning_rte") as caught:
        brimful.train(rows, model=model, output=tmp_path / "run", learning_rte=1.0)
    assert "learning_rate" in str(caught.value.hint)


@pytest.mark.thorough
def test_a_machine_without_triton(tmp_path: Path) -> None:
    """torch for CPUs comes without it."""
    modules = "brimful.engine.training.train, brimful.engine.profiling.profile"
    code = f"import sys; sys.modules['triton'] = None; import {modules}; print('whole')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "whole\n", done.stderr


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:no evaluation row", "ignore:.* different labels in different rows")
def test_many_labels(plain_model: Path, tmp_path: Path) -> None:
    """Nearly as many classes as rows, where the task is given; and 60 numbered classes, with a warning."""
    rows = [{"text": text, "label": f"L{i}"} for i, text in enumerate(texts(1100))]
    data = write_rows(tmp_path / "many.jsonl", [*rows, *rows[:100]])
    run = brimful.train(data, model=plain_model, output=tmp_path / "a", max_steps=1, max_length=32, task="single_label")
    assert run.labels.num_outputs == 1100
    assert run.metrics["accuracy"] is not None
    numbered = [{"text": text, "label": i % 60} for i, text in enumerate(texts(240))]
    data = write_rows(tmp_path / "numbered.jsonl", numbered)
    with pytest.warns(UserWarning, match=r"60 whole numbers, 0 to 59: taken as classes.*--task regression"):
        run = brimful.train(data, model=plain_model, output=tmp_path / "b", max_steps=1, max_length=32)
    assert (run.labels.task, run.labels.num_outputs) == ("single_label", 60)


def test_the_default_dtype_is_the_processs(plain_model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    """Whatever it is, a run learns the same bits, and leaves it."""

    def learn(name: str) -> Path:
        asked: Any = {**SIZES, "max_steps": 3, "device": "cpu", "baselines": False}
        brimful.train(data["single label"], model=plain_model, output=tmp_path / name, callbacks=Callbacks(), **asked)
        return tmp_path / name

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = learn("fp64")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert learned(found) == learned(learn("fp32"))
