"""The page of a run: from its folder alone, without torch, while it runs and after, with 5 labels and with 1,000."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brimful
from benches import guide_bench
from brimful.core import atomic_files
from brimful.core.evaluation import Evaluation, Mistake
from brimful.core.records import (
    Compilations,
    FirstBatch,
    LabelSpace,
    Learning,
    Lever,
    Machine,
    PeakMemory,
    Recipe,
    Run,
    TargetScale,
    to_json,
)
from brimful.engine.scoring import evaluation_of
from brimful.reports.bench_page import bench_page
from brimful.reports.classification_page import classification_page
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.run_page import _tiles, run_page
from brimful.reports.run_record import RunReport, read_record
from brimful.tasks.scoring.choose import make_scorer
from classifications import RECORD
from pages import Page
from tiny_files import save_base, write_reviews

HOSTILE = "<script>alert('x')</script>\x1b[31m \u202e&"


def names_of(number: int) -> tuple[str, ...]:
    return (HOSTILE, *(f"a label with a long name, number {i}" for i in range(1, number)))


def record(number: int) -> tuple[Run, Evaluation]:
    names, random = names_of(number), np.random.default_rng(0)
    targets = random.integers(0, number, 4 * number)
    logits = random.normal(size=(len(targets), number)).astype(np.float32)
    space = LabelSpace(task="single_label", names=names)
    scorer = make_scorer(space, targets, seed=0, resamples=0)
    scorer.add(np.arange(len(targets)), logits)
    mistakes = tuple(
        Mistake(
            row=i, truth=names[0], label=names[1], text=HOSTILE, score=0.9, truth_score=0.01, mislabelled=i % 2 == 0
        )
        for i in range(1, 9)
    )
    given: Any = {"model": "run/model", "data": "rows.csv", "command": "brimful train", "labels": space}
    evaluation = evaluation_of(scorer.result(), mistakes=mistakes, **given)
    lever = Lever(name="packing", value="packed", arithmetic="exact", reason=f"checked {HOSTILE}")
    run = Run(
        run="abc", status="finished", model=HOSTILE, options={"data": "rows.csv", "seed": 42, "report": None},
        command=f"brimful train '{HOSTILE}'", labels=space, recipe=Recipe(device="CPU", levers=(lever,)),
        machine=Machine(cpu="a CPU", num_cores=2, memory_bytes=1 << 34, versions={"torch": "2"}),
        data_fingerprint="0123456789abcdef0123", findings=("something stands out",), steps=40, train_s=2.0,
        data={
            "rows": 4 * number, "eval_rows": number, "labels": dict.fromkeys(names, 4), "eval_labels": {}, "notes": [],
            "token_lengths": {"p50": 7, "p100": 20}, "truncated_rows": 3, "max_length": 20, "duplicate_texts": 2,
            "weights": {"min": 0.5, "mean": 1.0, "max": 2.0},
        },
        samples_per_s=20.0, tokens_per_s=900.0, phases_s={"start": 1.0, "steps": 2.0, "export": 0.01},
        peak_bytes=PeakMemory(total=5 << 30, moment="backward", components={"weights": 3 << 30, "all_else": 2 << 30}),
        compilations=Compilations(captured=3),
        first_batch=FirstBatch(num_rows=4, num_tokens=30, precision="fp32", passed=True),
    )  # fmt: skip
    return run, evaluation


def write_run(folder: Path, run: Run, evaluation: Evaluation | None, num_events: int = 40) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(to_json(run), "utf-8")
    if evaluation is not None:
        (folder / "evaluation.json").write_text(to_json(evaluation), "utf-8")
    lines: list[dict[str, Any]] = [{"kind": "started", "step": 0}]
    for step in range(1, num_events + 1):
        rates = {"learning_rate": 1e-3 / step, "grad_norm": 1.0, "samples_per_s": 20.0, "memory_bytes": 3 << 30}
        loss: Any = "NaN" if step == 3 else 2.0 / step
        lines.append({"kind": "step", "step": step, "loss": loss, "num_steps": 2 * num_events, "left_s": 61.0, **rates})
        if step % 10 == 0:
            lines.append({"kind": "evaluated", "step": step, "metrics": {"loss": 1.0 / step, "accuracy": 1 - 1 / step}})
    lines.append({"kind": "skipped", "step": 40})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events.jsonl").write_text(text + '{"kind": "step", "st', "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("number", [5, 1000])
def test_everything_of_a_finished_run_is_on_its_page(tmp_path: Path, number: int) -> None:
    run, evaluation = record(number)
    path = brimful.report(write_run(tmp_path / "run", run, evaluation))
    assert path == tmp_path / "run" / "report.html"
    document = path.read_text("utf-8")
    if number == 5:
        assert document == run_page(read_record(tmp_path / "run"))  # type: ignore[arg-type]
    assert len(document) < 1_200_000
    page = Page(document)
    page.check()
    sections = ("How it learned", "How good it is", "By label", "What is mistaken", "Calibration", "Rows to look at")
    for said in (*sections, "Time", "Memory", "Data", "How it ran", "To repeat it"):
        assert said in page.text
    curves = [chart.attrib["aria-label"] for chart in page.charts if chart.attrib["aria-label"].startswith("Curve")]
    assert len(curves) == 6
    assert "Something stands out." in page.text
    assert "In its log: 1 batch was skipped, as its loss or gradient was not finite" in page.text
    assert "40 steps in 2.0 s on CPU" in page.text
    assert "weights of rows" in page.text.lower()
    assert "3 graphs captured" in page.text
    assert page.text.count("The likeliest mislabelled rows") == 1
    assert page.record["run"]["model"] == HOSTILE
    assert "\x1b" not in document
    assert "\u202e" not in document
    assert ("Confusion matrix" in page.text) == (number == 5)
    assert ("The labels with the lowest F1" in page.text) == (number == 1000)
    assert ("All 1,000 labels" in page.text) == (number == 1000)
    assert "The 30 most frequent of 1,000" in page.text or number == 5


@pytest.mark.slow
def test_a_run_under_way_has_what_there_is(tmp_path: Path) -> None:
    run, _ = record(5)
    begun = replace(run, status="running", peak_bytes=PeakMemory(), phases_s={}, samples_per_s=None, tokens_per_s=None)
    folder = write_run(tmp_path / "run", begun, None)
    text = Page(run_page(run_of(folder))).text  # as a kill leaves it
    assert "no process is at work on it: its last line is of step 40. --resume goes on." in text
    assert "left by then" not in text
    lock = atomic_files.lock_folder(folder)
    report = run_of(folder)
    os.close(lock)
    assert (report.last_step, report.num_steps) == (40, 80)
    assert report.steps[2].loss is None
    page = Page(run_page(report))
    page.check()
    assert "Step 40 of 80 on CPU" in page.text
    assert "This run has not finished: its last line is of step 40, about 1 min 01 s left by then." in page.text
    assert "after step 40" in page.text
    assert "How good it is" not in page.text
    assert "Seconds by part of the run" not in page.text  # of a log that does not say
    with (tmp_path / "run" / "events.jsonl").open("a") as log:
        for seconds in (3.0, 7.0):
            log.write(json.dumps({"kind": "time", "step": 40, "phases_s": {"data": 1.0, "steps": seconds}}) + "\n")
    page = Page(run_page(read_record(tmp_path / "run")))  # type: ignore[arg-type]
    page.check()
    assert "Seconds by part of the run, so far." in page.text
    assert "7.0 s · 87.5 %" in page.document
    for stopped, why in (({"signal": 15}, "by SIGTERM"), ({"why": "5 steps in a row were not finite"}, "5 steps in a")):
        with (tmp_path / "run" / "events.jsonl").open("a") as log:
            log.write(json.dumps({"kind": "stopped", "step": 40, **stopped}) + "\n")
        page = Page(run_page(read_record(tmp_path / "run")))  # type: ignore[arg-type]
        assert f"This run was stopped after step 40: {why}" in page.text
        assert "has not finished" not in page.text
    (tmp_path / "run" / "events.jsonl").unlink()  # before its first line
    page = Page(run_page(read_record(tmp_path / "run")))  # type: ignore[arg-type]
    page.check()
    assert "How it learned" not in page.text


def test_plans_and_limits_are_beside_what_was_measured(tmp_path: Path) -> None:
    run, evaluation = record(5)
    parts = {"weights": 3 << 30, "activations": 1 << 30}
    peak = PeakMemory(total=5 << 30, reserved=4 << 30, components=parts)
    options = {**run.options, "memory_limit": "8GiB", "activation_memory": "1.5GiB"}
    reason = "by a width of 768"
    learning = Learning(learning_rate=1e-3, num_train_epochs=3.0, num_warmup_steps=1, reason=reason)
    folder = write_run(tmp_path / "run", replace(run, options=options, peak_bytes=peak, learning=learning), evaluation)
    text = Page(run_page(run_of(folder))).text
    assert "Steps8040" in text
    assert "Peak learning rate0.001 warm-up of 1 step; chosen: by a width of 768" in text
    assert "Memory (--memory-limit)at most 8.0 GiB4.0 GiB" in text
    assert "Activations (--activation-memory)at most 1.5 GiB1.0 GiB" in text
    assert "Epochs" not in text  # the log has none to put beside
    plain = write_run(tmp_path / "plain", run, evaluation, num_events=0)
    assert "Planned and measured" not in Page(run_page(run_of(plain))).text


def test_epochs_are_those_of_the_last_step(tmp_path: Path) -> None:
    """A log has a line every few steps: a run of 84 steps ends after the line of step 80."""
    run, _ = record(5)
    learning = Learning(learning_rate=1e-3, num_train_epochs=3.0, num_warmup_steps=0)
    folder = write_run(tmp_path / "run", replace(run, steps=84, learning=learning), None, num_events=0)
    lines = [{"kind": "step", "step": 80, "num_steps": 84, "epoch": 80 / 28}, {"kind": "finished", "step": 84}]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    text = Page(run_page(run_of(folder))).text
    assert "Steps8484" in text
    assert "Epochs33" in text


def test_rates_are_those_of_the_log(tmp_path: Path) -> None:
    """A step that took long is seen."""
    run, _ = record(5)
    folder = write_run(tmp_path / "run", run, None)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text("utf-8").splitlines()[:-1]]
    logged = [line for line in lines if line["kind"] == "step"]
    logged[3]["samples_per_s"] = 2.0
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    rates = [step.samples_per_s for step in run_of(folder).steps]
    assert rates == [line["samples_per_s"] for line in logged]


def test_rows_per_second_of_a_run_that_did_not_end_are_those_of_its_whole_log(tmp_path: Path) -> None:
    """Not of its last line: 20 steps of 16 rows took 11 s. Those of steps without a line do not count."""
    run = replace(record(5)[0], status="running", samples_per_s=None)
    folder = write_run(tmp_path / "run", run, None, num_events=0)
    lines = [
        {"kind": "step", "step": 1, "samples_per_s": 16.0},
        {"kind": "step", "step": 10, "samples_per_s": 144.0},
        {"kind": "resumed", "step": 15},
        {"kind": "step", "step": 20, "samples_per_s": 80.0},
        {"kind": "step", "step": 25, "samples_per_s": 10.0},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    report = run_of(folder)
    assert [each.num_steps for each in report.steps] == [1, 9, 5, 5]
    assert report.samples_per_s == pytest.approx(20 * 16 / 11)
    assert ("Rows per second", "29.1", "900 tokens/s") in _tiles(report)
    assert brimful.compare(folder, folder).compared[0].samples_per_s == report.samples_per_s
    assert run_of(write_run(tmp_path / "ended", record(5)[0], None)).samples_per_s == 20.0  # as its record says


def test_a_run_whose_evaluation_is_lost_has_the_metrics_of_its_record(tmp_path: Path) -> None:
    """Of the saved model, which need not be that of the last evaluation."""
    run = replace(record(5)[0], metrics={"accuracy": 0.8125, "f1_macro": 0.75, "loss": None})
    folder = write_run(tmp_path / "run", run, None)
    page = Page(run_page(run_of(folder)))
    page.check()
    assert "Accuracy0.8125" in page.text
    assert "F1, mean of labels0.75" in page.text
    assert "The run has no evaluation.json any more: metrics are those of run.json" in page.text
    found = brimful.compare(folder, folder).compared[0].metrics
    assert {name: metric.value for name, metric in found.items()} == {"accuracy": 0.8125, "f1_macro": 0.75}


def test_texts_of_mistakes_are_lines_and_failures_of_trackers_are_named(tmp_path: Path) -> None:
    run, evaluation = record(5)
    (mistake, *_) = evaluation.mistakes
    evaluation = replace(evaluation, mistakes=(replace(mistake, text="Title\n\nA first\tline"),))
    folder = write_run(tmp_path / "run", run, evaluation)
    with (folder / "events.jsonl").open("a") as log:
        log.write('\n{"kind": "tracker_failed", "tracker": "wandb", "why": "away"}\n')
    text = Page(run_page(run_of(folder))).text
    assert "Title A first line" in text
    assert "1 time a tracker did not get all of the log" in text


def test_lines_of_the_log_that_were_lost_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", record(5)[0], None)
    with (folder / "events.jsonl").open("a") as log:
        log.write('\n{"kind": "events_lost", "count": 56}\n{"kind": "events_lost", "count": 1}\n')
    assert "57 log lines could not be written" in Page(run_page(run_of(folder))).text


def test_a_loss_of_scaled_targets_says_so(tmp_path: Path) -> None:
    """Beside a mean squared error of 7 a loss of 1 would be another figure of the same rows."""
    run, _ = record(5)
    scaled = replace(run, target_scale=TargetScale(centers=(4.6,), spread=2.7))
    assert "Targets are scaled to a mean of 0" in Page(run_page(run_of(write_run(tmp_path / "a", scaled, None)))).text
    assert "Targets are scaled" not in Page(run_page(run_of(write_run(tmp_path / "b", run, None)))).text


def run_of(folder: Path) -> RunReport:
    report = read_record(folder)
    assert isinstance(report, RunReport)
    return report


def test_long_logs_are_drawn_as_means(tmp_path: Path) -> None:
    run, evaluation = record(5)
    report = read_record(write_run(tmp_path / "run", run, evaluation, num_events=1234))
    assert isinstance(report, RunReport)
    assert len(report.steps) == 300
    assert report.steps[-1].step == 1234
    assert report.steps[0].loss == pytest.approx(
        np.mean([2.0, 1.0, 0.5])
    )  # of steps 1, 2 and 4: that of 3 is no number
    assert all(math.isfinite(each.grad_norm or 0.0) for each in report.steps)


def test_an_evaluation_has_its_page(tmp_path: Path) -> None:
    _, evaluation = record(5)
    (tmp_path / "evaluation.json").write_text(to_json(evaluation), "utf-8")
    (tmp_path / "other.json").write_text(to_json(evaluation), "utf-8")
    one = brimful.report(tmp_path)
    other = brimful.report(tmp_path / "other.json", tmp_path / "page.html")
    assert one.read_bytes() == other.read_bytes()
    page = Page(one.read_text("utf-8"))
    page.check()
    assert "The most confident mistakes" in page.text


@pytest.mark.thorough
def test_records_may_be_given_as_files(tmp_path: Path) -> None:
    """Each makes the page of its kind: that of a run in its folder, others anywhere."""
    run, evaluation = record(5)
    folder = write_run(tmp_path / "run", run, evaluation)
    assert brimful.report(folder / "run.json").read_bytes() == brimful.report(folder, tmp_path / "a.html").read_bytes()
    assert (folder / "report.html").is_file()
    classified = replace(RECORD, model="a model")
    bench = guide_bench()
    pages = {
        "bench": (to_json(bench), bench_page(bench)),
        "classified": (to_json(classified), classification_page(classified)),
        "evaluated": (to_json(evaluation), evaluation_page(evaluation)),
    }
    for name, (text, page) in pages.items():
        (tmp_path / f"{name}.json").write_text(text, "utf-8")
        made = brimful.report(tmp_path / f"{name}.json", tmp_path / f"{name}.html")
        assert made.read_text("utf-8") == page


@pytest.mark.parametrize(
    ("given", "output", "said"),
    [
        ("nothing", None, "there is no such folder"),
        ("rows.json", "nothing/page.html", "no folder that this user may write into"),
        ("model", None, "it is no record, but a part of a run"),
        (".", None, "there is no record of a run or of an evaluation"),
        (".", "page.txt", "--output page.txt is no name of a page"),
        ("rows.json", None, "it is no record of an evaluation"),
        ("other.json", None, "it is no record of an evaluation (it lacks what one has)"),
        ("trained.json", None, "it is the record of a run alone"),
        ("compared.json", None, "it is the record of a comparison alone"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, output: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "trained.json").write_text(to_json(record(5)[0]), "utf-8")  # as --json of train prints it
    (tmp_path / "compared.json").write_text('{"compared": [], "paired": []}')
    if given == "model":
        (tmp_path / "model").mkdir()
        (tmp_path / "run.json").write_text("{}")
    with pytest.raises(brimful.InputError) as caught:
        brimful.report(tmp_path / given / "x" if given == "nothing" else given, output)
    assert said in str(caught.value)
    assert caught.value.hint


@pytest.mark.slow
def test_a_real_run_by_the_command_line_and_without_torch(tmp_path: Path) -> None:
    base, rows = save_base(tmp_path / "base"), write_reviews(tmp_path / "reviews.csv")
    page = tmp_path / "run" / "page.html"  # in a folder that the run makes
    brimful.train(
        rows, model=base, output=tmp_path / "run", report=str(page), max_steps=4, logging_steps=1, max_length=32,
        device="cpu", baselines=False,
    )  # fmt: skip
    report = read_record(tmp_path / "run")
    assert isinstance(report, RunReport)
    assert [each.step for each in report.steps] == [1, 2, 3, 4]
    assert all(each.memory_bytes for each in report.steps)
    assert report.evaluation is not None
    assert all(each.text and each.truth != each.label for each in report.evaluation.mistakes)
    code = (
        "import sys\nfrom brimful.cli.commands import run\n"
        "assert run(['report', 'run', '-o', 'again.html']) == 0\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "again.html\n"
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()
