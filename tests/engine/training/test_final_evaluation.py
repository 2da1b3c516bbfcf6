"""The evaluation that ends a training: of the saved weights, from the passes that the run made anyway."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brimful as package
from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.evaluation import Evaluation
from brimful.core.records import LabelSpace, Run, from_json
from brimful.data.writers import sorted_rows
from brimful.engine.scoring import truth_column
from brimful.engine.training import evaluations
from brimful.engine.training.evaluations import Evaluations
from brimful.engine.training.final_evaluation import RowScores, losses_in
from brimful.reports.terminal import Terminal
from brimful.tasks.answers import AnswerForm
from brimful.tasks.label_rows import LabelRows
from pages import Page
from runs import single_label_rows, texts, write_rows


class Passes:
    """Counts passes over the evaluation rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("evaluate_rows", "predict"):
            monkeypatch.setattr(evaluations, name, self._counted(getattr(evaluations, name)))

    def _counted(self, function: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self.count += 1
            return function(*given, **named)

        return counted


def train(model: Path, folder: Path, **options: Any) -> Run:
    data, held_out = folder / "rows.jsonl", folder / "held-out.jsonl"
    if not data.exists():
        write_rows(data, single_label_rows(60))
        write_rows(held_out, single_label_rows(40, seed=1))
    given = {"batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-3, "eval_data": held_out, **options}
    return package.train(data, model=model, output=folder / "run", **{"callbacks": Callbacks(), **given})


def evaluation(folder: Path) -> Evaluation:
    return from_json(Evaluation, (folder / "run" / "evaluation.json").read_text("utf-8"))


def evaluated_again(folder: Path) -> Evaluation:
    """The saved model by `evaluate`, which is fp32 here as training is."""
    exact: dict[str, Any] = {"precision": "fp32", "verify": 0, "num_workers": 0}
    return package.evaluate(folder / "run" / "model", folder / "held-out.jsonl", callbacks=Callbacks(), **exact)


def values(record: Evaluation) -> dict[str, float | None]:
    return {name: metric.value for name, metric in record.metrics.items()}


@pytest.mark.slow
def test_it_is_that_of_the_saved_model_without_another_pass(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    run = train(model, tmp_path)
    assert passes.count == 2  # one an epoch
    record = evaluation(tmp_path)
    assert {name: run.metrics[name] for name in ("accuracy", "f1_macro")} == pytest.approx(
        {name: values(record)[name] for name in ("accuracy", "f1_macro")}
    )
    again = package.evaluate(
        tmp_path / "run" / "model",
        tmp_path / "held-out.jsonl",
        verify=0,
        num_workers=0,
        precision="fp32",
        callbacks=Callbacks(),
    )
    assert values(again) == pytest.approx(values(record), rel=1e-4)
    assert [each.name for each in record.baselines] == ["constant", "tfidf_linear"]
    assert run.baselines == {each.name: each.metrics for each in record.baselines}
    assert run.findings == record.findings
    rows = [json.loads(line) for line in (tmp_path / "held-out.jsonl").read_text("utf-8").splitlines()]
    answers = pq.read_table(tmp_path / "run" / "predictions.parquet").to_pylist()
    assert [(row["row"], row["truth"]) for row in answers] == [(i + 1, row["label"]) for i, row in enumerate(rows)]
    right = sum(row["truth"] == row["label"] for row in answers) / len(answers)
    assert right == pytest.approx(run.metrics["accuracy"])


@pytest.mark.slow
def test_of_the_best_model_where_it_is_not_the_last(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    calls = iter([0.1, 0.9, 0.9])  # the first evaluation stays the best
    original = Evaluations._is_best

    def first_is_best(found: Any) -> bool:
        state = found._run.state
        state.metrics = {**state.metrics, "loss": next(calls)}
        return original(found)

    monkeypatch.setattr(Evaluations, "_is_best", first_is_best)
    run = train(model, tmp_path, num_train_epochs=3, metric_for_best_model="loss", baselines=False)
    assert passes.count == 3
    record = evaluation(tmp_path)
    assert run.metrics["accuracy"] == pytest.approx(values(record)["accuracy"])
    again = package.evaluate(
        tmp_path / "run" / "model",
        tmp_path / "held-out.jsonl",
        verify=0,
        num_workers=0,
        precision="fp32",
        callbacks=Callbacks(),
    )
    assert values(again) == pytest.approx(values(record), rel=1e-4)
    assert record.baselines == ()


@pytest.mark.slow
def test_a_resumed_run_makes_a_pass_where_it_has_no_scores(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, tmp_path)
    first = evaluation(tmp_path)
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text("utf-8").replace('"status": "finished"', '"status": "running"'), "utf-8")
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "run" / "evaluation.json").unlink()
    passes = Passes(monkeypatch)
    train(model, tmp_path, resume=True)
    assert passes.count == 1
    assert values(evaluation(tmp_path)) == pytest.approx(values(first))


def test_without_evaluation_rows_there_is_no_record(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, eval_data=None, eval_split=0.0)
    assert not (tmp_path / "run" / "evaluation.json").exists()
    assert run.baselines == {}


def test_a_model_that_reads_less_than_the_linear_one_is_said_to(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, max_length=3, max_steps=1, num_train_epochs=None, learning_rate=1e-9)
    found = [finding for finding in run.findings if "linear model" in finding]
    assert len(found) == 1
    assert "90.0 % of the training rows are cut at 3 tokens, which the linear model reads whole" in found[0]
    assert "try a longer --max-length" in found[0]


def test_evaluation_rows_that_are_trained_on_are_the_first_finding(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", single_label_rows(60))
    write_rows(tmp_path / "held-out.jsonl", [*single_label_rows(10), *single_label_rows(30, seed=1)])
    run = train(model, tmp_path, max_steps=1, num_train_epochs=None, baselines=False, callbacks=Terminal())
    shared = run.data["eval_texts_in_train"]
    assert shared >= 10
    assert run.findings[0].startswith(f"{shared} of 40 evaluation rows have the text of a training row (")
    assert f"warning: {run.findings[0]}" in capsys.readouterr().err
    saved = from_json(Run, (tmp_path / "run" / "run.json").read_text("utf-8"))
    assert (saved.findings, evaluation(tmp_path).findings) == (run.findings, run.findings)
    page = Page(package.report(tmp_path / "run").read_text("utf-8"))
    assert f"{run.findings[0]}." in page.text


def test_python_hears_findings_once_the_model_is_saved(model: Path, tmp_path: Path) -> None:
    """Each once, of the caller's line; a filter that makes errors of them costs no model."""
    given: dict[str, Any] = {"max_steps": 1, "num_train_epochs": None, "callbacks": None, "baselines": False}
    with pytest.warns(package.FindingWarning) as heard:
        run = train(model, tmp_path, **given)
    assert len(run.findings) >= 1
    assert [str(warning.message) for warning in heard] == list(run.findings)
    assert {warning.filename for warning in heard} == {__file__}
    shutil.rmtree(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(package.FindingWarning, match=re.escape(run.findings[0])):
            train(model, tmp_path, **given)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert from_json(Run, (tmp_path / "run" / "run.json").read_text("utf-8")).status == "finished"


def test_python_hears_findings_of_a_training_that_is_not_evaluated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "learning_findings", lambda *given: ["nothing is learned"])
    with pytest.warns(package.FindingWarning) as heard:
        run = train(model, tmp_path, max_steps=1, num_train_epochs=None, callbacks=None, eval_data=None, eval_split=0.0)
    assert run.findings == ("nothing is learned",)
    assert [str(warning.message) for warning in heard] == ["nothing is learned"]


class Warned(Callbacks):
    """Keeps warnings, and does something as each step is told of."""

    def __init__(self, each_step: Callable[[], None] = lambda: None) -> None:
        self.said: list[str] = []
        self._each_step = each_step

    def progress(self, progress: object) -> None:
        self._each_step()

    def warning(self, text: str) -> None:
        self.said.append(text)


def test_a_lost_log_does_not_cost_the_model(model: Path, tmp_path: Path) -> None:
    """With evaluation rows, and without."""
    for split in (0.1, 0.0):
        output = tmp_path / f"run-{split}"
        log = output / "events.jsonl"
        callbacks = Warned(lambda log=log: log.unlink(missing_ok=True))
        given = {"batch_size": 8, "max_steps": 3, "logging_steps": 1, "eval_split": split, "baselines": False}
        data = write_rows(tmp_path / "rows.jsonl", single_label_rows(60))
        assert package.train(data, model=model, output=output, callbacks=callbacks, **given).status == "finished"
        assert (output / "model" / "model.safetensors").exists()
        assert any(said.endswith("nothing is said of its losses") for said in callbacks.said)


def test_damaged_lines_of_the_log_are_counted_and_left_out(tmp_path: Path) -> None:
    log, callbacks = tmp_path / "events.jsonl", Warned()
    whole = [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "evaluated", "step": 2, "metrics": {"loss": "nan"}}]
    damaged = [b'{"kind": "step", "st', b"[]", b'{"kind": "step", "step": 3, "loss": null}', b"\xff\xfe", b"\0" * 9]
    log.write_bytes(b"\n".join([*damaged, *(json.dumps(event).encode() for event in whole)]))
    assert losses_in(log, callbacks) == ([(1, 0.5)], [])
    assert "is damaged: 5 of its 7 lines cannot be read" in callbacks.said[0]


def test_lines_of_the_first_and_the_last_step_alone_are_no_losses_of_a_course(tmp_path: Path) -> None:
    """Beside means of ten steps they are of one or two, and far off."""
    log = tmp_path / "events.jsonl"
    for steps, whole in (([1, 10, 20, 30, 32], [10, 20, 30]), ([1, 2, 3], [1, 2, 3]), ([1, 7], [7]), ([], [])):
        lines = [{"kind": "step", "step": step, "loss": 0.5} for step in steps]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        assert losses_in(log, Warned()) == ([(step, 0.5) for step in whole], [])


def answered(folder: Path, num_rows: int, num_labels: int) -> tuple[RowScores, Any, list[int], pa.Table]:
    """Scores of random logits of rows of several labels, in no order; their rows; bytes that pyarrow has after each
    window; and all answers at once."""
    draw = np.random.default_rng(0)
    names = tuple(f"label {i}" for i in range(num_labels))
    space = LabelSpace(task="multi_label", names=names, values={name: i for i, name in enumerate(names)})
    targets = LabelRows.of_blocks([(draw.random((num_rows, num_labels)) < 0.02).astype(np.uint8)], num_labels)
    numbers = np.arange(num_rows)
    examples = SimpleNamespace(rows=SimpleNamespace(starts=(0,), files=("a",)), row_numbers=numbers)
    part: Any = SimpleNamespace(examples=examples, targets_N=targets)
    logits = draw.standard_normal((num_rows, num_labels)).astype(np.float32)
    scores = RowScores(SimpleNamespace(space=space, evaluation=part), 0, folder)  # type: ignore[arg-type]
    held, before = [], pa.total_allocated_bytes()
    for rows in np.array_split(draw.permutation(num_rows), num_rows // 50):
        scores.add(rows, logits[rows])
        held.append(pa.total_allocated_bytes() - before)
    columns = AnswerForm(space=space).columns(logits)
    return scores, part, held, pa.table({"row": numbers + 1, "truth": truth_column(space, targets)} | columns)


def test_answers_in_memory_do_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 rows that are given 100 labels each: 3.4 MB of names alone, of which a fifth may be held."""
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 1 << 18)
    scores, part, held, expected = answered(tmp_path, 2_000, 200)
    assert max(held) < 700_000
    scores.write(tmp_path / "answers.parquet", part)
    assert pq.read_table(tmp_path / "answers.parquet").equals(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.parquet"]


def train_on_several_labels(model: Path, folder: Path, **options: Any) -> Run:
    labels = ("low", "middle", "high", "odd")
    rows = [{"text": text, "label": [labels[i % 3], *labels[3:][: i % 2]]} for i, text in enumerate(texts(60))]
    folder.mkdir()
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "held-out.jsonl", rows[::-2])
    return train(model, folder, **options)


@pytest.mark.slow
def test_all_is_the_same_where_answers_wait_in_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the best evaluation and of the last one wait beside each other."""
    given: dict[str, Any] = {"max_steps": 4, "eval_steps": 2, "num_train_epochs": None, "baselines": False}
    given |= {"metric_for_best_model": "loss"}
    train_on_several_labels(model, tmp_path / "held", **given)
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    train_on_several_labels(model, tmp_path / "spilled", **given)
    held, spilled = (vars(evaluation(tmp_path / name)) for name in ("held", "spilled"))
    of_the_folder = ("model", "data", "command", "predictions", "recipe", "machine")
    assert {n: v for n, v in held.items() if n not in of_the_folder} == {
        n: v for n, v in spilled.items() if n not in of_the_folder
    }
    files = [tmp_path / name / "run" / "predictions.parquet" for name in ("held", "spilled")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(pq.read_table(files[0])) == 30


@pytest.mark.slow
def test_a_disk_without_room_for_answers_costs_these_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*given: Any) -> int:
        (tmp_path / "run" / "predictions.parquet").write_bytes(b"of an evaluation before")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    callbacks, whole = Warned(), atomic_files.write_all
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    monkeypatch.setattr(sorted_rows, "atomic_files", full := SimpleNamespace(**vars(atomic_files)))
    full.write_all = is_full
    run = train(model, tmp_path, callbacks=callbacks, baselines=False)
    assert (run.status, atomic_files.write_all) == ("finished", whole)
    assert values(evaluation(tmp_path))["accuracy"] == pytest.approx(run.metrics["accuracy"])
    assert not (tmp_path / "run" / "predictions.parquet").exists()
    assert evaluation(tmp_path).predictions is None
    (said,) = (text for text in callbacks.said if "not saved" in text)
    assert said.startswith(f"the answers to its 40 rows are not saved: cannot write {tmp_path / 'run'}: No space left")
    assert evaluation(tmp_path).notes == (said,)
    assert f"T{said[1:]}." in Page(package.report(tmp_path / "run").read_text("utf-8")).text


class Kept(RowScores):
    """Scores that somebody keeps. files: open ones of the run's folder, as each begins."""

    all: ClassVar[list[RowScores]] = []
    files: ClassVar[list[int]] = []

    def __init__(self, prepared: Any, seed: int, folder: Path, *given: Any) -> None:
        super().__init__(prepared, seed, folder, *given)
        self.all.append(self)
        self.files.append(num_open(folder))


def num_open(folder: Path) -> int:
    """Files without a name in a folder that this process has open."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Kept]]:
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    monkeypatch.setattr(evaluations, "RowScores", Kept)
    yield Kept
    Kept.all.clear()
    Kept.files.clear()


@pytest.mark.slow
def test_files_of_answers_end_with_their_use(model: Path, tmp_path: Path, kept: type[Kept]) -> None:
    """Those of the last evaluation before the next one begins, and the last ones before the model is saved."""
    at_export = []

    class Listener(Warned):
        def evaluation(self, record: Evaluation) -> None:
            at_export.append(num_open(tmp_path / "run"))

    train(model, tmp_path, num_train_epochs=3, baselines=False, callbacks=Listener())
    assert (kept.files, at_export, len(kept.all)) == ([0, 0, 0], [0], 3)
    assert len(pq.read_table(tmp_path / "run" / "predictions.parquet")) == 40


@pytest.mark.slow
@pytest.mark.parametrize("when", ["evaluated", "evaluation"])
def test_files_of_answers_end_with_a_training_that_fails(
    model: Path, tmp_path: Path, kept: type[Kept], when: str
) -> None:
    """Within an evaluation, and after one, while the error still has the frames of the training."""

    class Fails(Warned):
        def evaluated(self, step: int, metrics: Any) -> None:
            if when == "evaluated":
                raise ZeroDivisionError

    if when == "evaluation":
        add = kept.add
        windows = []

        def fails(self: Kept, *given: Any) -> None:
            add(self, *given)
            windows.append(num_open(tmp_path / "run"))
            raise ZeroDivisionError

        kept.add = fails  # type: ignore[method-assign]
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            train(model, tmp_path, baselines=False, callbacks=Fails())
    finally:
        if when == "evaluation":
            del kept.add
            assert windows == [1]
    assert num_open(tmp_path / "run") == 0
    assert len(kept.all) == 1
    assert caught.value.__traceback__ is not None
