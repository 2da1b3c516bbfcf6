"""`brimful compare`: folders of runs, evaluations and benches, on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brimful
from benches import guide_bench
from brimful.core import atomic_files
from brimful.core.comparison import Comparison
from brimful.core.errors import DataError, OptionError
from brimful.core.evaluation import Evaluation
from brimful.core.records import Learning, Lever, Machine, Recipe, from_json, to_json
from brimful.reports.comparison_page import comparison_page
from brimful.reports.comparison_text import comparison_text
from classifications import RECORD
from commands import Brimful, call
from pages import Page
from reports.test_run_page import HOSTILE, names_of, record, write_run

HERE = Path(__file__).parents[2]


def write_side(
    folder: Path, *, wrong: Sequence[int] = (), rows: Sequence[int] = range(1, 41), seed: int = 42, **changes: Any
) -> Path:
    """A run that answers some of its rows wrongly."""
    run, evaluation = record(5)
    names = names_of(5)
    run = replace(run, options={**run.options, "seed": seed}, **changes)
    write_run(folder, run, evaluation)
    truths = [names[row % 5] for row in rows]
    given = [names[(row + (row in wrong)) % 5] for row in rows]
    pq.write_table(pa.table({"row": rows, "truth": truths, "label": given}), folder / "predictions.parquet")
    return folder


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    lever = Lever(name="packing", value="off", arithmetic="exact", reason="asked")
    first = write_side(tmp_path / "first", wrong=range(1, 21))
    other = write_side(
        tmp_path / "other", wrong=[1, 2, 33], seed=7, samples_per_s=30.0, recipe=Recipe(device="CPU", levers=(lever,)),
        machine=Machine(cpu="a CPU", num_cores=4, memory_bytes=1 << 34, versions={"torch": "3"}),
    )  # fmt: skip
    found = brimful.compare(first, other)
    assert [each.name for each in found.compared] == ["first", "other"]
    differing = {(each.part, each.name): each.values for each in found.differences}
    assert differing == {
        ("learned", "--seed"): ("42", "7"),
        ("run", "packing"): ("packed", "off"),
        ("machine", "torch"): ("2", "3"),
        ("machine", "CPU cores"): ("2", "4"),
    }
    (pair,) = found.paired
    assert (pair.num_rows, pair.only_first, pair.only_other) == (40, 1, 18)
    assert pair.metrics[0].difference == pytest.approx(17 / 40)
    assert found.notes == ()
    text = comparison_text(found)
    for said in (
        "other less first, on the same 40 rows",
        "+0.4250",
        "better",
        "first 1, other 18 rows",
        "30, x 1.50",
    ):
        assert said in text
    assert from_json(Comparison, to_json(found)) == found


def test_what_was_chosen_is_compared_with_what_was_asked_for(tmp_path: Path) -> None:
    chosen = Learning(learning_rate=1e-4, num_train_epochs=5.0, num_warmup_steps=4, reason="by a width of 768")
    first, same = (write_side(tmp_path / name, learning=chosen) for name in ("first", "same"))
    for folder, rate, warmup in ((tmp_path / "asked", 1e-4, 4), (tmp_path / "higher", 2e-4, 0)):
        write_side(folder, learning=replace(chosen, learning_rate=rate, num_warmup_steps=warmup))
        run = json.loads((folder / "run.json").read_text("utf-8"))
        run["options"] |= {"learning_rate": rate, "warmup_steps": warmup, "num_train_epochs": 5.0}
        (folder / "run.json").write_text(json.dumps(run), "utf-8")
    assert brimful.compare(first, same, tmp_path / "asked").differences == ()
    found = brimful.compare(first, tmp_path / "higher", tmp_path / "asked")
    assert [(each.name, each.values) for each in found.differences] == [
        ("--learning-rate", ("0.0001 (chosen)", "0.0002", "0.0001")),
        ("--warmup-steps", ("4 (chosen)", "0", "4")),
    ]
    assert "What was learned: what differs" in comparison_text(found)


def test_what_cannot_be_paired_is_said(tmp_path: Path) -> None:
    first = write_side(tmp_path / "first")
    part = write_side(tmp_path / "part", rows=range(21, 61))
    elsewhere = write_side(tmp_path / "elsewhere", data_fingerprint="another")
    without = write_side(tmp_path / "without")
    (without / "predictions.parquet").unlink()
    found = brimful.compare(first, part, elsewhere, without)
    assert [(pair.first, pair.other, pair.num_rows) for pair in found.paired] == [(0, 1, 20)]
    said = "\n".join(found.notes)
    assert "part and first have 20 rows of 40 and 40 in common" in said
    assert "elsewhere and first were evaluated on rows of different data" in said
    assert "not saved in without" in said
    page = Page(comparison_page(found)).text
    assert "first, part, elsewhere and without" in page
    assert "Elsewhere and first were evaluated on rows of different data: their answers are not paired." in page


def test_evaluations_of_one_file_by_two_paths_are_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, evaluation = record(5)
    for name, data in (("one", "rows.csv"), ("two", str(tmp_path / "rows.csv"))):
        (write_side(tmp_path / name) / "run.json").unlink()
        (tmp_path / name / "evaluation.json").write_text(to_json(replace(evaluation, data=data)), "utf-8")
    found = brimful.compare("one", "two")
    assert (found.notes, [pair.num_rows for pair in found.paired]) == ((), [40])


def test_a_run_beside_an_evaluation_differs_in_what_both_have(tmp_path: Path) -> None:
    _, evaluation = record(5)
    run = write_side(tmp_path / "run")
    (write_side(tmp_path / "evaluation") / "run.json").unlink()
    evaluation = replace(evaluation, options={"seed": 7, "resamples": 10})
    (tmp_path / "evaluation" / "evaluation.json").write_text(to_json(evaluation), "utf-8")
    found = brimful.compare(run, tmp_path / "evaluation")
    assert {each.name for each in found.differences} == {"--seed", "--model"}
    assert "may be of other rows" in found.notes[0]


def test_a_damaged_log_is_one_line(tmp_path: Path) -> None:
    folder = write_side(tmp_path / "run")
    (folder / "events.jsonl").write_text('{"kind": "step", "step": "x"}\n', "utf-8")
    with pytest.raises(DataError, match="it is no log of a run"):
        brimful.compare(folder, folder)


def test_rows_to_evaluate_on_are_what_counts_not_those_trained_on(tmp_path: Path) -> None:
    first = write_side(tmp_path / "first", data_fingerprint="train-1+held-out")
    other = write_side(tmp_path / "other", data_fingerprint="train-2+held-out")
    assert len(brimful.compare(first, other).paired) == 1


def test_a_run_under_way_has_its_last_evaluation(tmp_path: Path) -> None:
    first, other = write_side(tmp_path / "first"), write_side(tmp_path / "other", status="running", samples_per_s=None)
    for name in ("evaluation.json", "predictions.parquet"):
        (other / name).unlink()
    lock = atomic_files.lock_folder(other)
    assert brimful.compare(first, other).compared[1].status == "running"
    os.close(lock)
    found = brimful.compare(first, other)
    assert found.compared[1].status == "unfinished"  # nobody is at work there
    assert found.compared[1].metrics["accuracy"].value == pytest.approx(1 - 1 / 40)
    assert found.compared[1].steps == 40
    assert found.compared[1].samples_per_s == 20.0
    assert found.paired == ()


def test_evaluations_are_compared_too(tmp_path: Path) -> None:
    def write(folder: Path, model: str) -> Path:
        write_side(folder)
        (folder / "run.json").unlink()
        record = from_json(Evaluation, (folder / "evaluation.json").read_text("utf-8"))
        (folder / "evaluation.json").write_text(to_json(replace(record, model=model)), "utf-8")
        return folder / "evaluation.json"

    found = brimful.compare(write(tmp_path / "a", "one"), write(tmp_path / "b", "another"))
    assert [each.kind for each in found.compared] == ["evaluation", "evaluation"]
    assert [(each.name, each.values) for each in found.differences] == [("--model", ("one", "another"))]
    assert found.paired[0].num_rows == 40
    text = comparison_text(found)
    assert "What was evaluated: what differs" in text
    assert "What was learned" not in text
    assert "What was evaluated" in Page(comparison_page(found)).text


@pytest.mark.slow
def test_the_command_without_torch(tmp_path: Path) -> None:
    folders = [str(write_side(tmp_path / name)) for name in ("first", "other")]
    page = tmp_path / "page.html"
    program = (
        "import sys; from brimful.cli.commands import run; "
        f"assert run(['compare', *{folders!r}, '--json', '--html', {str(page)!r}]) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compared"][0]["name"] == "first"
    assert done.stderr == f"page: {page}\n"
    assert page.is_file()


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ([], "brimful compare needs A B", "run-a run-b"),
        (["one"], "two folders or more", "run-a run-b"),
        (["nothing", "there"], "nothing: there is no such folder", "--output"),
        ([str(HERE), "there"], "there is no record", "run.json"),
        (["a", "b", "--html", "page.txt"], "no name of a page", ".html"),
    ],
)
def test_mistakes(words: list[str], said: str, hint: str) -> None:
    brimful_command: Brimful = call
    found = brimful_command("compare", *words)
    assert found.code == 2
    first, second = found.err.splitlines()
    assert said in first
    assert hint in second
    assert found.out == ""


def test_the_page_is_whole_and_escaped(tmp_path: Path) -> None:
    first = write_side(tmp_path / "<b>run", wrong=[1])
    other = write_side(tmp_path / "other", model=f"another {HOSTILE}", seed=3)
    document = comparison_page(brimful.compare(first, other))
    page = Page(document)
    page.check()
    assert "<b>run" not in document
    for said in ("<b>run", "Loss of training.", "Accuracy of the evaluation rows.", "McNemar", "What differs".lower()):
        assert said in page.text
    assert "\x1b" not in document
    assert "\u202e" not in document
    assert [chart.attrib["role"] for chart in page.charts] == ["img"] * len(page.charts)
    assert page.record["paired"][0]["num_rows"] == 40
    assert comparison_page(brimful.compare(first, other)) == document


def test_many_runs_fit_on_a_page(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / str(number)).mkdir()
        write_side(tmp_path / str(number) / "run", seed=number)
    found = brimful.compare(*(tmp_path / str(number) / "run" for number in range(8)))
    assert [each.name for each in found.compared] == [f"{number}/run" for number in range(8)]
    Page(comparison_page(found)).check()


def test_records_may_be_given_as_files(tmp_path: Path) -> None:
    first, other = write_side(tmp_path / "first"), write_side(tmp_path / "other", seed=7)
    found = brimful.compare(first / "run.json", other / "run.json")
    assert found.paired == brimful.compare(first, other).paired != ()
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(to_json(guide_bench()), "utf-8")  # as --json of bench prints it
    found = brimful.compare(tmp_path / "one.json", tmp_path / "two.json")
    assert {each.kind for each in found.compared} == {"bench"}
    assert found.rows
    with pytest.raises(DataError, match="a bench is not compared with a run"):
        brimful.compare(tmp_path / "one.json", first)
    (tmp_path / "pass.json").write_text(to_json(RECORD), "utf-8")
    with pytest.raises(DataError, match="it is the record of a classification alone") as caught:
        brimful.compare(first, tmp_path / "pass.json")
    assert "brimful evaluate" in (caught.value.hint or "")


def test_long_names_are_told_apart_and_small_ratios_are_not_nothing(tmp_path: Path) -> None:
    ends = ("start " * 9 + "one", "start " * 9 + "two", "start " * 4 + "here " + "end " * 9, "start " * 4 + "end " * 9)
    slow = {"a": 1000.0, "b": 3.4}
    for folder, rate in slow.items():
        (tmp_path / folder).mkdir()
        rows = [{"work": name, "samples_per_s": rate} for name in ends]
        (tmp_path / folder / "results.json").write_text(json.dumps(rows), "utf-8")
    found = brimful.compare(*(tmp_path / folder for folder in slow))
    text = comparison_text(found)
    shown = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  start")]
    assert len(set(shown)) == 4
    assert max(map(len, shown)) <= 36
    assert "3.4, x 0.0034" in text
    assert "x 0.0034" in comparison_page(found)


LOGS = [
    {"work": "tweets", "side": "hf", "samples_per_s": 10.0, "samples_per_s_range": [9.0, 11.0], "nvml_bytes": 1 << 30},
    {"work": "tweets", "side": "brimful", "samples_per_s": 40.0, "peak_reserved_bytes": 1 << 30},
    {"model": "bart", "side": "hf", "error": "CUDA out of memory"},
]


def test_benches_are_compared_row_by_row(tmp_path: Path) -> None:
    measured = {"samples_per_s": 20.0, "block_rates": [19.0, 22.0], "loss": 0.5, "peak_bytes": {"resident": 2 << 30}}
    work = {"batch_size": 8, "device": "CPU", "machine": {"cpu": "a CPU", "versions": {"torch": "2"}}}
    bench: dict[str, Any] = {
        "model": "m",
        "options": {"seed": 1, "output": "x"},
        "workload": work,
        "rows": [
            {"row": {"side": "trainer", "name": "plain"}, "status": "measured", "measured": measured},
            {"row": {"side": "brimful", "name": "plain"}, "status": "out_of_memory", "reason": "memory ran out"},
        ],
    }
    faster = json.loads(json.dumps(bench))
    faster |= {"model": "n", "options": {"seed": 1, "output": "y"}}
    faster["workload"] |= {"batch_size": 16}
    faster["rows"][0]["measured"]["samples_per_s"] = 30.0
    alone = {"row": {"side": "brimful", "name": "alone"}, "status": "measured", "measured": measured}
    faster |= {"rows": [*faster["rows"], alone], "recommended": "brimful: alone"}
    for name, content in {"a": bench, "b": faster, "c": LOGS}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(content), "utf-8")
    found = brimful.compare(tmp_path / "a", tmp_path / "b")
    differing = {each.name: each.values for each in found.differences}
    assert differing == {"--model": ("m", "n"), "batch size": ("8", "16")}
    plain, failed, alone_there = found.rows
    assert alone_there.figures[0] is None
    assert (plain.name, failed.name) == ("trainer: plain", "brimful: plain")
    assert plain.figures[0] is not None
    assert (plain.figures[0].low, plain.figures[0].high, plain.figures[0].peak_bytes) == (19.0, 22.0, 2 << 30)
    text = comparison_text(found)
    said = "the benches measured other work (--model, batch size): ratios between them say little of how it ran"
    assert text.splitlines()[0] == f"warning: {said}"
    assert "20 (19 to 22)" in text
    assert (brimful.compare(tmp_path / "a", tmp_path / "b", seed=7).command or "").endswith(" --seed 7")
    assert text.count("x 1.50") == 1
    assert text.count(", x ") == 2  # speed and memory of the row that both have, none against another bench
    assert "x: times the figure of a" in text
    assert "recommended  –    brimful: alone" in text
    assert "memory ran out" in text
    page = Page(comparison_page(found))
    page.check()
    assert "2 benches side by side" in page.text
    assert f"T{said[1:]}." in page.text
    for same in (("a", "a"), ("a", "c")):  # what a log is of is not known
        assert brimful.compare(*(tmp_path / each for each in same)).warnings == ()
    logged = brimful.compare(tmp_path / "c", tmp_path / "c")
    assert [row.name for row in logged.rows] == ["tweets · hf", "tweets · brimful", "bart · hf"]
    assert [each.name for each in logged.compared] == ["c", "c (2)"]
    assert logged.rows[2].figures[0] is not None
    assert logged.rows[2].figures[0].reason == "CUDA out of memory"
    with pytest.raises(DataError, match="a bench is not compared with a run"):
        brimful.compare(tmp_path / "a", write_side(tmp_path / "run"))
    (tmp_path / "run" / "run.json").unlink()  # its evaluation is there
    run, evaluation = tmp_path / "run", "run is an evaluation"
    for order, said, hint in (
        (("a", run), f"a bench is not compared with an evaluation: a is a bench, {evaluation}", "benches with benches"),
        (
            (run, "a"),
            f"a bench is not compared with an evaluation: {evaluation}, a is a bench",
            "evaluations with eval",
        ),
    ):
        with pytest.raises(DataError, match=said) as caught:
            brimful.compare(*(tmp_path / each for each in order))
        assert (caught.value.hint or "").startswith(f"compare {hint}")
    for text in ("{}", "[]", '{"rows": []}'):
        (tmp_path / "a" / "results.json").write_text(text, "utf-8")
        with pytest.raises(DataError, match="it has no rows of a bench"):
            brimful.compare(tmp_path / "a", tmp_path / "b")


def test_rows_that_others_disturbed_are_marked(tmp_path: Path) -> None:
    bench = guide_bench()
    work = replace(bench.workload, device="CPU", num_threads=2)
    for name, cores, waiting in (("calm", 1.9, None), ("busy", 0.5, None), ("late", 1.9, 0.3)):
        (row, *_) = bench.rows
        assert row.measured is not None
        rows = (replace(row, measured=replace(row.measured, cores=cores, waiting=waiting)),)
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(to_json(replace(bench, workload=work, rows=rows)), "utf-8")
    found = brimful.compare(tmp_path / "calm", tmp_path / "busy")
    assert "10 (9 to 11)  10* (9 to 11), x 1.00" in comparison_text(found)
    assert [note.partition(":")[0] for note in found.notes] == ["rows marked * in busy"]
    assert "x 1.00*" in comparison_page(found)
    found = brimful.compare(tmp_path / "calm", tmp_path / "late")
    assert [note.partition(":")[0] for note in found.notes] == ["rows marked * in late"]


def test_a_row_that_a_budget_cut_short_says_so(tmp_path: Path) -> None:
    bench = guide_bench()
    for name, cut_short in (("whole", False), ("cut", True)):
        rows = (replace(bench.rows[0], cut_short=cut_short),)
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(to_json(replace(bench, rows=rows)), "utf-8")
    found = brimful.compare(tmp_path / "whole", tmp_path / "cut")
    assert "10 (9 to 11)  10 (9 to 11, cut short), x 1.00" in comparison_text(found)
    assert "9 to 11, cut short" in comparison_page(found)


def test_the_committed_benches_can_be_read() -> None:
    logged = sorted((HERE / "benchmarks").rglob("results.json"))
    files = [file for file in logged if '_per_s"' in file.read_text("utf-8")]
    assert files
    found = brimful.compare(*(file.parent for file in files))
    assert all(any(f is not None and (f.samples_per_s or f.reason) for f in row.figures) for row in found.rows)
    assert any(f is not None and f.samples_per_s for row in found.rows for f in row.figures)


def test_one_folder_is_a_mistake_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="two folders or more"):
        brimful.compare(tmp_path)
