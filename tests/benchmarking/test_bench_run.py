"""A bench as a whole: rows are kept and not repeated, what does not fit is said, other work is refused."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

import brimful
from benches import figures, guide_bench, recipe
from brimful.benchmarking import needed, process
from brimful.benchmarking import run as bench_run
from brimful.benchmarking.choosing import waited_less
from brimful.benchmarking.folder import BenchFolder
from brimful.benchmarking.process import KILLED, Ended, Watch, memory_kills, run_plan
from brimful.benchmarking.told import check_measured
from brimful.benchmarking.worker import measure
from brimful.cli.commands import run
from brimful.core.atomic_files import TEMPORARY
from brimful.core.bench import RECOMMENDED, Bench, read_bench
from brimful.core.callbacks import Callbacks
from brimful.core.options.bench import BenchOptions
from brimful.core.records import PeakMemory, json_text
from brimful.reports.bench_text import bench_text, cells
from pages import Page
from tiny_files import save_base, write_reviews

WORK = asdict(guide_bench().workload)


class Plans:
    """Processes of rows that answer at once. done: rows that were begun. turns: of a row, rate and cores by turn.
    blocks: of a row, rates of its blocks by turn. stops: what a row raises. steps: that it says it has done.
    cut: blocks after which a row was cut short, by turn."""

    def __init__(self, **ends: Ended) -> None:
        self.done: list[str] = []
        self.ends, self.wall_s = ends, 1.0
        self.work: dict[str, Any] = WORK
        self.more: dict[str, Any] = {}
        self.turns: dict[str, list[tuple[float, float]]] = {}
        self.blocks: dict[str, list[tuple[float, ...]]] = {}
        self.stops: dict[str, Callable[[], object]] = {}
        self.steps = 1
        self.cut: dict[str, list[int]] = {}
        self.until: list[float | None] = []

    def __call__(self, plan: Mapping[str, Any], watch: Watch, *, limit_s: float | None, folder: Path) -> Ended:
        json.dumps(plan)
        row = plan["row"]
        if row is None:
            return Ended(found=json.loads(json_text({"workload": self.work, "notes": []})), wall_s=1.0)
        self.done.append(f"{row['side']}: {row['name']}")
        watch.told(self.steps)
        if stop := self.stops.pop(self.done[-1], None):
            stop()
        if row["name"] in self.ends:
            return self.ends[row["name"]]
        more: dict[str, Any] = {"recipe": recipe(("packing", "packed", "exact"))} if row["side"] == "brimful" else {}
        rate = 50.0 if row["side"] == "brimful" else 20.0
        if turns := self.turns.get(self.done[-1]):
            rate, more["cores"] = turns.pop(0)
        more["block_rates"] = (0.97 * rate, rate, 1.03 * rate)
        if blocks := self.blocks.get(self.done[-1]):
            more["block_rates"] = blocks.pop(0)
            rate = median(more["block_rates"])
        cut = (self.cut.get(self.done[-1]) or [0]).pop(0)
        if cut:
            more |= {"block_rates": tuple(rate + i for i in range(-cut // 2 + 1, cut // 2 + 1)), "loss": None}
        self.until.append(plan["until"])
        found = figures(rate, 4, flops_per_s=1e13, **{**self.more, **more})
        return Ended(
            found={"measured": json.loads(json_text(asdict(found))), "notes": ["mind"], "cut_short": cut > 0},
            wall_s=self.wall_s, nvml_bytes=1 << 31,
        )  # fmt: skip


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    given = Plans(checkpointing=Ended(found=None, reason="ended by SIGSEGV"))
    monkeypatch.setattr(bench_run, "run_plan", given)
    return given


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without charts, which take a second."""
    monkeypatch.setattr(bench_run, "bench_page", lambda _: "")


def bench(folder: Path, **more: Any) -> Bench:
    options = BenchOptions(**{"model": "m", "output": str(folder / "b"), "batch_size": 4, **more})
    return bench_run.run_bench(options, Callbacks(), command="brimful bench m")


def statuses(found: Bench) -> dict[str, str]:
    return {each.row.key: each.status for each in found.rows}


@pytest.mark.slow
def test_finished_rows_are_kept_and_failed_ones_tried_again(tmp_path: Path, plans: Plans) -> None:
    first = bench(tmp_path)
    assert statuses(first)["trainer: checkpointing"] == "failed"
    assert first.rows[-1].row.name == RECOMMENDED
    assert first.rows[-1].row.settings["precision"] == "fp32"
    assert first.recommended == "brimful: fp32"
    assert first.rows[0].measured is not None
    assert first.rows[0].measured.mfu == pytest.approx(1e13 / 5e13)
    assert first.rows[0].measured.memory_bytes == 1 << 31
    assert first.rows[0].notes == ("mind",)
    assert read_bench(tmp_path / "b") == first
    page = brimful.report(tmp_path / "b")
    assert page.read_bytes() == (tmp_path / "b" / "bench.html").read_bytes()
    plans.done.clear()
    again = bench(tmp_path, rows="default,optim=adafactor")
    assert plans.done == ["trainer: checkpointing", "trainer: optim=adafactor", "brimful: optim=adafactor"]
    assert statuses(again)["brimful: optim=adafactor"] == "measured"
    assert {each.row.key: each for each in first.rows}["brimful: bf16"] in again.rows
    plans.done.clear()
    fewer = bench(tmp_path, rows="weight_decay=0.1")  # what was measured stays in the table, after what was asked for
    asked = ["trainer: weight_decay=0.1", "brimful: weight_decay=0.1"]
    assert sorted(plans.done) == sorted(asked)
    assert list(statuses(fewer))[:5] == ["trainer: plain", "trainer: bf16", "brimful: bf16", *asked]
    assert statuses(fewer).items() >= statuses(again).items()  # what failed, too
    assert next(each for each in fewer.rows if each.row.name == "checkpointing").reason == "ended by SIGSEGV"
    assert fewer.recommended == first.recommended
    assert fewer.rows[-1].row.name == RECOMMENDED


def test_a_refused_bench_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its folders nor, in one that was there, its files; rows in memory included."""
    wrong = Ended(found={"error": "no such model", "is_input": True, "hint": "see there"})
    monkeypatch.setattr(bench_run, "run_plan", lambda *_, **__: wrong)
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "rows").mkdir(parents=True)
    (tmp_path / "begun" / ".lock").touch()
    before = sorted(tmp_path.rglob("*"))
    for output in ("new/deep/b", "empty", "begun"):
        with pytest.raises(brimful.InputError, match="no such model"):
            bench(tmp_path, output=str(tmp_path / output))
        with pytest.raises(brimful.InputError, match="no such model"):
            brimful.bench("m", {"text": ["a", "b"], "label": ["x", "y"]}, output=tmp_path / output, batch_size=2)
        assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(bench_run, "run_plan", Plans())
    bench(tmp_path)
    kept = sorted((tmp_path / "b").rglob("*"))
    with pytest.raises(brimful.OptionError, match="is a bench of other work"):
        bench(tmp_path, seed=1)
    assert sorted((tmp_path / "b").rglob("*")) == kept


def test_a_bench_of_rows_in_memory_keeps_them(tmp_path: Path, plans: Plans) -> None:
    rows = {"text": ["a", "b"], "label": ["x", "y"]}
    asked: dict[str, Any] = {"output": tmp_path / "b", "batch_size": 2, "rows": "optim=sgd", "callbacks": Callbacks()}
    brimful.bench("m", rows, **asked)
    before = (tmp_path / "b" / "data.parquet").read_bytes()
    done = len(plans.done)
    brimful.bench("m", rows, **asked)
    assert len(plans.done) == done
    with pytest.raises(brimful.OptionError, match="is a bench of other work: the rows in memory differ"):
        brimful.bench("m", {**rows, "text": ["c", "d"]}, **asked)
    assert (tmp_path / "b" / "data.parquet").read_bytes() == before


def test_rows_of_the_same_settings_are_measured_once_and_said(tmp_path: Path, plans: Plans) -> None:
    told, heard = list[str](), Callbacks()
    heard.note = told.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, rows="default,precision=fp32")
    found = bench_run.run_bench(options, heard, command="brimful bench m")
    settings = [json.dumps([each.row.side, dict(each.row.settings)]) for each in found.rows[:-1]]
    assert len(settings) == len(set(settings)) == 8
    assert "brimful: precision=fp32: the same settings as brimful: fp32, measured once, under that name" in told
    assert "trainer: precision=fp32: the same settings as trainer: plain, measured once, under that name" in told


@pytest.mark.slow
def test_a_row_half_written_is_measured_again(tmp_path: Path, plans: Plans) -> None:
    """And said, with its file."""
    bench(tmp_path)
    files = sorted((tmp_path / "b" / "rows").iterdir())
    for file in files:
        file.write_text(file.read_text()[:200])
    begun, told, heard = len(plans.done), list[str](), Callbacks()
    heard.note = told.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4)
    bench_run.run_bench(options, heard, command="brimful bench m")
    assert len(plans.done) == 2 * begun
    broken = [line for line in told if line.startswith("rows/")]
    assert broken == [f"rows/{file.name} cannot be read: its row counts as not measured" for file in files]
    told.clear()
    bench_run.run_bench(options, heard, command="brimful bench m")
    assert not [line for line in told if line.startswith("rows/")]


def test_what_a_kill_left_of_a_process_is_removed_by_the_next_call(tmp_path: Path, plans: Plans) -> None:
    left = tmp_path / "b" / "rows" / ".tmp-process-ab"
    left.mkdir(parents=True)
    (left / "plan.json").write_text("{}")
    bench(tmp_path)
    assert not left.exists()
    assert plans.done


@pytest.mark.slow
def test_a_process_has_its_folder_where_the_next_call_looks(tmp_path: Path) -> None:
    seen = set[str]()
    watch = Watch(idle=lambda: seen.update(each.name for each in tmp_path.iterdir()))
    ended = run_plan({}, watch, limit_s=60.0, folder=tmp_path)
    assert (ended.found or {})["error"] == "KeyError: 'row'"
    assert len(seen) == 1
    assert seen.pop().startswith(TEMPORARY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("device", ["CPU", "a GPU"])
def test_another_number_of_threads_is_refused(tmp_path: Path, plans: Plans, device: str) -> None:
    """On a CPU, but for a record that is older than the number."""
    plans.work = {**WORK, "device": device, "num_threads": 1}
    bench(tmp_path)
    plans.work["num_threads"] = 2
    if device != "CPU":
        assert bench(tmp_path).workload.num_threads == 1
        return
    with pytest.raises(brimful.OptionError, match="the number of threads was 1, is 2") as caught:
        bench(tmp_path)
    assert (caught.value.hint or "").startswith("set OMP_NUM_THREADS=1, or give another --output")
    plans.work["num_threads"] = 1
    with pytest.raises(brimful.OptionError, match=r"work: --seed was 42, is 1\n") as caught:
        bench(tmp_path, seed=1)
    assert "OMP_NUM_THREADS" not in (caught.value.hint or "")
    setup = tmp_path / "b" / "bench.json"
    found = json.loads(setup.read_text("utf-8"))
    del found["workload"]["num_threads"]
    setup.write_text(json.dumps(found), "utf-8")
    plans.done.clear()
    bench(tmp_path)
    assert plans.done == ["trainer: checkpointing"]  # which failed


@pytest.mark.slow
def test_a_row_that_waited_for_cores_is_measured_again(tmp_path: Path, plans: Plans) -> None:
    """Whatever the time that it had."""
    plans.work = {**WORK, "device": "CPU", "num_threads": 2}
    plans.more = {"cores": 1.9, "waiting": 0.2}
    told, heard = list[str](), Callbacks()
    heard.warning = told.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, rows="weight_decay=0.1")
    bench_run.run_bench(options, heard, command="brimful bench m")
    assert plans.done[4:8] == plans.done[:4]
    assert any("its threads waited for a core in 20.0 % of their time, others were busy" in line for line in told)
    with (tmp_path / "b" / "results.csv").open() as file:
        assert {(each["waiting"], each["disturbed"]) for each in csv.DictReader(file)} == {("0.2", "yes")}
    plans.more, begun = {"cores": 1.1, "waiting": 0.05}, len(plans.done)
    bench(tmp_path, rows="weight_decay=0.1")
    bench(tmp_path, rows="weight_decay=0.1")
    assert len(plans.done) == begun + 5
    assert "others were busy" not in (tmp_path / "b" / "results.md").read_text()


def test_a_disturbed_row_of_a_cpu_is_measured_again(tmp_path: Path, plans: Plans) -> None:
    plans.work = {**WORK, "device": "CPU", "num_threads": 2}
    plans.more = {"cores": 1.1}
    assert bench(tmp_path, rows="weight_decay=0.1").rows[0].measured is not None
    rows, again = plans.done[:4], plans.done[4:8]
    assert again == rows
    assert plans.done[8:] == 2 * [f"brimful: {RECOMMENDED}"]
    assert "others were busy" in (tmp_path / "b" / "bench.html").read_text()
    assert "\n\\* other programs were busy" in (tmp_path / "b" / "results.md").read_text()
    with (tmp_path / "b" / "results.csv").open() as file:
        assert {(each["cores"], each["disturbed"]) for each in csv.DictReader(file)} == {("1.1", "yes")}
    plans.more = {"cores": 1.9}
    bench(tmp_path, rows="weight_decay=0.1")
    assert plans.done[10:] == [*rows, f"brimful: {RECOMMENDED}"]
    bench(tmp_path, rows="weight_decay=0.1")
    assert len(plans.done) == 15
    assert "others were busy" not in (tmp_path / "b" / "bench.html").read_text()


def test_a_disturbed_row_is_told_once_where_there_is_no_time_for_another(tmp_path: Path, plans: Plans) -> None:
    plans.work, plans.more = {**WORK, "device": "CPU", "num_threads": 2}, {"cores": 1.1}
    plans.wall_s, told = 100.0, list[str]()
    heard = Callbacks()
    heard.note = told.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, budget_s=60.0, steps=1)
    bench_run.run_bench(options, heard, command="brimful bench m")
    assert len([line for line in told if line.startswith("trainer: plain:")]) == 1


def test_an_uneven_row_of_a_gpu_is_measured_by_two_processes(tmp_path: Path, plans: Plans) -> None:
    """Once, in this call or the next one; blocks of both count, and the most memory of the two."""
    plans.blocks = {"trainer: plain": [(8.0, 10.0, 14.0), (11.0, 12.0, 13.0)]}
    plans.more = {"peak_bytes": PeakMemory(nvml=1)}
    found = bench(tmp_path, rows="weight_decay=0.1").rows[0].measured
    assert plans.done.count("trainer: plain") == 2
    assert plans.done[-1] == "trainer: plain"  # after all other rows
    assert found is not None
    assert found.block_rates == (8.0, 10.0, 14.0, 11.0, 12.0, 13.0)
    assert found.samples_per_s == 11.5
    assert found.step_s == pytest.approx(4 / 11.5)
    assert (found.tokens_per_s, found.flops_per_s) == (pytest.approx(512 * 11.5), pytest.approx(1.15e13))
    done = len(plans.done)
    assert bench(tmp_path, rows="weight_decay=0.1").rows[0].measured == found
    assert len(plans.done) == done


def test_a_folder_from_before_an_option_goes_on(tmp_path: Path, plans: Plans) -> None:
    bench(tmp_path, rows="precision=fp32")
    setup = tmp_path / "b" / "bench.json"
    found = json.loads(setup.read_text("utf-8"))
    del found["options"]["missing_labels"]
    setup.write_text(json.dumps(found), "utf-8")
    plans.done.clear()
    bench(tmp_path, rows="precision=fp32")
    assert plans.done == []
    with pytest.raises(brimful.OptionError, match="--missing-labels was error, is drop"):
        bench(tmp_path, rows="precision=fp32", missing_labels="drop")


def test_the_recommended_row_is_the_fastest_of_those_measured_again(tmp_path: Path, plans: Plans) -> None:
    plans.work = {**WORK, "device": "CPU", "num_threads": 2}
    plans.turns = {"brimful: fp32": [(90.0, 0.5), (40.0, 1.9)]}
    found = bench(tmp_path)
    assert found.recommended == "brimful: fp32, accumulation"
    assert found.rows[-1].row.settings["token_budget"]
    assert plans.done[-2:] == ["brimful: fp32", f"brimful: {RECOMMENDED}"]


def test_without_matplotlib_all_but_the_page_is_written(
    tmp_path: Path, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise brimful.InputError("a report as a page needs matplotlib", hint="pip install it")

    monkeypatch.setattr(bench_run, "check_charts", missing)
    found = bench(tmp_path, rows="precision=fp32")
    assert found.rows[-1].row.name == RECOMMENDED
    names = {each.name for each in (tmp_path / "b").iterdir()}
    assert {"results.json", "results.csv", "results.md"} <= names
    assert "bench.html" not in names


def test_without_accelerate_no_row_is_begun(tmp_path: Path, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(brimful.OptionError, match="Trainer, which needs the package accelerate") as caught:
        bench(tmp_path)
    assert caught.value.hint == "pip install 'brimful[compare]'"
    assert plans.done == []
    assert not (tmp_path / "b").exists()


def test_a_trainer_that_cannot_start_ends_the_bench_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in the process that looks at the work, as a row would."""

    def old(_: TrainingArguments) -> None:
        raise ImportError("Using the `Trainer` with `PyTorch` requires `accelerate>=1.1.0`\nsee there")

    monkeypatch.setattr(TrainingArguments, "__post_init__", old)
    plan = {"options": asdict(BenchOptions(model="no-such-model")), "row": None, "steps": None}
    with pytest.raises(brimful.OptionError, match=r"cannot start: Using the .* requires `accelerate>=1.1.0`") as caught:
        measure(plan)
    assert "\n" not in str(caught.value)
    assert caught.value.hint == "pip install 'brimful[compare]'"


def test_memory_that_ran_out_is_a_row(tmp_path: Path, plans: Plans) -> None:
    plans.ends = {
        "fp32": Ended(found={"error": "OutOfMemoryError: full", "out_of_memory": True}, wall_s=1.0),
        "bf16": Ended(found=None, reason=f"{KILLED}, most likely by the kernel", killed=True),
        "accumulation": Ended(found=None, reason="the process was ended by signal 9 (SIGKILL)"),
    }
    found = bench(tmp_path)
    assert statuses(found)["brimful: fp32"] == statuses(found)["brimful: bf16"] == "out_of_memory"
    assert statuses(found)["trainer: accumulation"] == "failed"
    plans.done.clear()
    bench(tmp_path)  # memory runs out again where the device said so
    assert plans.done == ["trainer: accumulation", "trainer: bf16", "brimful: bf16"]
    table = (tmp_path / "b" / "results.md").read_text()
    assert "- brimful: fp32: OutOfMemoryError: full" in table


def test_a_call_that_is_short_of_time_goes_on_all_the_same(tmp_path: Path, plans: Plans) -> None:
    found = bench(tmp_path, budget_s=5.0, steps=1, repeats=1, warmup_steps=1)  # a row is guessed to take 17 s
    assert plans.done[0] == "trainer: plain"
    assert statuses(found)["trainer: plain"] == "measured"


@pytest.mark.slow
def test_the_budget_leaves_rows_and_says_so(tmp_path: Path, plans: Plans) -> None:
    plans.wall_s = 100.0
    found = bench(tmp_path, budget_s=60.0, steps=1, repeats=1, warmup_steps=1)
    said = statuses(found)
    assert said["trainer: plain"] == "measured"
    assert set(said.values()) == {"measured", "left"}
    left = next(each for each in found.rows if each.status == "left")
    assert (left.reason or "").startswith("no time left")
    assert found.recommended is None
    plans.done.clear()
    assert "left" not in statuses(bench(tmp_path, budget_s=0.0)).values()
    assert "trainer: plain" not in plans.done
    plans.ends = {"optim=sgd": Ended(found=None, reason="not done after 3 s", timed_out=True, wall_s=3.0)}
    plans.wall_s = 1.0
    assert statuses(bench(tmp_path, rows="optim=sgd", budget_s=1e4))["trainer: optim=sgd"] == "failed"


def test_a_budget_that_no_row_fits_is_told_with_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the machine is measured, and in the first row."""
    over = Ended(found=None, reason="not done after 12 s", timed_out=True, wall_s=12.0)
    monkeypatch.setattr(bench_run, "run_plan", lambda *_, **__: over)
    with pytest.raises(brimful.InputError, match="--budget-s 12 was over before the machine was measured") as caught:
        bench(tmp_path, budget_s=12.0)
    assert "raise --budget-s by some 44 s for each row" in (caught.value.hint or "")
    with pytest.raises(brimful.DataError, match="it is a bench without rows") as caught:
        brimful.compare(tmp_path / "b", tmp_path / "b")
    assert "raise its --budget-s" in (caught.value.hint or "")
    plans, told = Plans(plain=over), list[str]()
    monkeypatch.setattr(bench_run, "run_plan", plans)
    heard = Callbacks()
    heard.warning = told.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, budget_s=0.9)
    monkeypatch.setattr(bench_run, "_LEAST_S", 0.0)
    bench_run.run_bench(options, heard, command="brimful bench m")
    assert plans.done == ["trainer: plain"]
    assert told[-1].startswith("no row was measured: --budget-s 0.9 left 12 s to the first; raise --budget-s")


def test_a_budget_over_before_the_machine_is_measured_names_the_rows_that_there_are(
    tmp_path: Path, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = len([each for each in bench(tmp_path).measured() if each[0].name != RECOMMENDED])
    over = Ended(found=None, reason="not done after 1 s", timed_out=True, wall_s=1.0)
    monkeypatch.setattr(bench_run, "run_plan", lambda *_, **__: over)
    said = "nothing more could be measured: --budget-s 1 was over before the machine was measured; rows that were"
    with pytest.raises(brimful.InputError, match=f"^{said} measured before, in .*: {measured}\n"):
        bench(tmp_path, budget_s=1.0)


@pytest.mark.parametrize(
    ("end", "said", "hint"),
    [
        (Ended(found=None, reason="ended by SIGSEGV"), "trainer: plain: failed: ended by SIGSEGV", "mend that"),
        (Ended(found={"error": "full", "out_of_memory": True}), "trainer: plain: out of memory: full", "--batch-size"),
        (
            Ended(found=None, reason="slow", timed_out=True),
            "trainer: plain: the budget was over after 1 of",
            "some 20,",
        ),
    ],
)
def test_a_bench_without_a_figure_ends_with_an_error_after_its_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: Ended,
    said: str,
    hint: str,
) -> None:
    budget = 0.9 if end.timed_out else 540.0
    monkeypatch.setattr(bench_run, "run_plan", Plans(**{"plain": end, "optim=sgd": end, "bf16": end}))
    monkeypatch.setattr(bench_run, "_LEAST_S", 0.0)
    words = ["bench", "m", "-o", str(tmp_path / "b"), "--rows", "optim=sgd", "--budget-s", str(budget)]
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert "trainer: plain" in out
    assert f"error: no row of the bench was measured: {said}" in err
    assert hint in err.splitlines()[-1]
    assert {"results.json", "results.csv", "results.md"} <= {each.name for each in (tmp_path / "b").iterdir()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("more", "work", "said"),
    [
        ({"seed": 1}, {}, "--seed was 42, is 1"),
        ({"steps": 7}, {}, "--steps was"),
        ({}, {"data_fingerprint": "c"}, "the data_fingerprint differs"),
        ({}, {"device": "another GPU"}, "the device differs"),
    ],
)
def test_a_bench_of_other_work_is_refused(
    tmp_path: Path, plans: Plans, more: dict[str, Any], work: dict[str, Any], said: str
) -> None:
    bench(tmp_path)
    plans.work = {**WORK, **work}
    with pytest.raises(brimful.OptionError, match=said):
        bench(tmp_path, **more)


def test_folders_of_others_are_left_alone(tmp_path: Path, plans: Plans) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("dear")
    with pytest.raises(brimful.OptionError, match="has other files in it"):
        bench(tmp_path)
    with BenchFolder(tmp_path / "c").locked(), pytest.raises(brimful.OutputError, match="another process"):
        bench(tmp_path, output=str(tmp_path / "c"))
    (tmp_path / "c" / "results.json").write_text("{}")
    with pytest.raises(brimful.OutputError, match="is no record of a bench"):
        read_bench(tmp_path / "c")


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (("run.json", ".lock", "events.jsonl"), "holds a run of train: a bench has its own folder"),
        (("_manifest.json", "part-00000.parquet", ".lock"), "holds results of classify"),
        (("evaluation.json", "data.parquet"), "holds an evaluation"),
        (("config.json",), "holds a model"),
        ((".lock", "events.jsonl"), "has other files in it"),
        (("results.json",), "has other files in it"),
        (("run.json", "bench.json"), "holds a run of train"),
    ],
)
def test_output_of_another_command_is_left_alone(
    tmp_path: Path, plans: Plans, files: tuple[str, ...], what: str
) -> None:
    (tmp_path / "b").mkdir()
    for name in files:
        (tmp_path / "b" / name).write_text("{}")
    with pytest.raises(brimful.OptionError, match=what) as caught:
        bench(tmp_path)
    assert caught.value.hint == "give a new folder"
    with pytest.raises(brimful.OptionError, match=what):
        brimful.bench("m", {"text": ["a", "b"], "label": ["x", "y"]}, output=tmp_path / "b", batch_size=2)
    assert {(each.name, each.read_text()) for each in (tmp_path / "b").iterdir()} == {(name, "{}") for name in files}
    assert plans.done == []


def test_work_that_cannot_be_begun_is_an_error_with_its_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Ended(found={"error": "no such model", "is_input": True, "hint": "see there"})
    monkeypatch.setattr(bench_run, "run_plan", lambda *_, **__: wrong)
    with pytest.raises(brimful.InputError, match=r"^no such model") as caught:
        bench(tmp_path)
    assert caught.value.hint == "see there"


def raise_ctrl_c() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # the second one lets it write


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stop", "code", "said", "by"),
    [(raise_ctrl_c, 130, "error: interrupted", "Ctrl-C"), (terminate, 143, "error: stopped by SIGTERM", "SIGTERM")],
)
def test_a_bench_that_is_stopped_has_all_rows_in_its_files(
    tmp_path: Path, plans: Plans, capsys: pytest.CaptureFixture[str], stop: Callable[[], None], code: int, said: str,
    by: str,
) -> None:  # fmt: skip
    """Those that it did not come to with the reason, and the recommendation with how many it is of."""
    before = signal.getsignal(signal.SIGTERM)
    plans.stops = {"trainer: checkpointing": stop}
    assert run(["bench", "m", "-o", str(tmp_path / "b"), "--batch-size", "4"]) == code
    assert signal.getsignal(signal.SIGTERM) == before
    out, err = capsys.readouterr()
    assert f"{said}: 4 rows measured so far, in {tmp_path / 'b'}\nhint: the same command goes on" in err
    found = read_bench(tmp_path / "b")
    assert found is not None
    assert statuses(found) == {
        "trainer: plain": "measured", "trainer: accumulation": "measured", "trainer: checkpointing": "not_reached",
        "trainer: bf16": "not_reached", "brimful: fp32": "measured", "brimful: fp32, accumulation": "measured",
        "brimful: fp32, checkpointing": "not_reached", "brimful: bf16": "not_reached",
        "brimful: recommended": "not_reached",
    }  # fmt: skip
    page = Page((tmp_path / "b" / "bench.html").read_text()).text
    unfinished = f"Not finished: 5 of 9 rows were not reached (the bench was stopped by {by})"
    few = "Chosen among 2 of brimful's 4 rows: 2 were not reached. Not measured once more"
    for text in (out, (tmp_path / "b" / "results.md").read_text(), page):
        assert unfinished in text
        assert few in text
        assert "brimful: fp32, checkpointing" in text
    assert "4 of 8 ways to train" in page
    assert "The same command goes on with the rest: brimful bench m" in out
    plans.done.clear()
    whole = bench(tmp_path)
    assert plans.done[0] == "trainer: checkpointing"
    assert "not_reached" not in statuses(whole).values()
    assert "Not finished" not in (tmp_path / "b" / "results.md").read_text()


def test_a_killed_bench_has_a_record_with_what_it_did_not_come_to(tmp_path: Path, plans: Plans) -> None:
    """Before each row, and before each that is measured again."""
    plans.work, plans.more = {**WORK, "device": "CPU", "num_threads": 2}, {"cores": 1.9}
    plans.turns = {"trainer: plain": [(20.0, 1.0), (30.0, 1.9)], "brimful: fp32": [(40.0, 1.0), (60.0, 1.9)]}
    seen = list[dict[str, float | None]]()

    def look() -> None:
        found = read_bench(tmp_path / "b")
        assert found is not None
        assert found.rows[1].row.name == "accumulation"
        seen.append({e.row.key: e.measured and e.measured.samples_per_s for e in found.rows})
        assert "rows were not reached (the bench was ended before)" in (tmp_path / "b" / "results.md").read_text()

    def again() -> None:
        plans.stops["brimful: fp32"] = look

    plans.stops = {"brimful: fp32": look, "trainer: bf16": again}
    bench(tmp_path)
    first, last = seen
    assert first == {**dict.fromkeys(first), "trainer: plain": 20.0}
    assert (last["trainer: plain"], last["brimful: fp32"], last["brimful: recommended"]) == (30.0, 40.0, None)


@pytest.mark.usefixtures("undrawn")
def test_the_measurement_that_waited_less_is_kept(tmp_path: Path, plans: Plans) -> None:
    plans.work = {**WORK, "device": "CPU", "num_threads": 2}
    plans.turns = {"trainer: plain": [(20.0, 1.0), (10.0, 0.5), (11.0, 0.6)]}
    plans.more, told, warned = {"cores": 1.9}, list[str](), list[str]()
    heard = Callbacks()
    heard.note, heard.warning = told.append, warned.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, rows="weight_decay=0.1")
    bench_run.run_bench(options, heard, command="brimful bench m")
    kept = bench(tmp_path, rows="weight_decay=0.1").rows[0].measured
    assert plans.done.count("trainer: plain") == 3
    assert kept is not None
    assert (kept.samples_per_s, kept.cores) == (20.0, 1.0)
    assert "trainer: plain: its first measurement is kept, which waited less" in told
    busy = [line for line in warned if "others were busy" in line]
    assert [line.partition("busy")[2] for line in busy] == [
        ": it is measured again where there is time", " again; the next call measures it once more",
    ]  # fmt: skip
    assert waited_less(replace(kept, waiting=0.2), replace(kept, waiting=0.3, cores=2.0))


@pytest.mark.thorough
@pytest.mark.usefixtures("undrawn")
def test_rows_of_one_name_are_both_in_the_table_of_a_later_call(tmp_path: Path, plans: Plans) -> None:
    """And found again under the name that they had, each compared with the row that it was compared with."""
    first = bench(tmp_path, rows="guide")
    plans.done.clear()
    found = bench(tmp_path, rows="levers")
    rows = {each.row.key: each.row for each in found.rows}
    assert rows["brimful: checkpointing"].settings["precision"] == "fp32"
    other = rows["brimful: checkpointing, bf16"]
    assert (other.settings["precision"], other.base) == ("bf16", "brimful: bf16")
    assert rows["brimful: fp16"].base == "brimful: plain"
    assert {each.row.identity for each in first.rows[:-1]} <= {each.row.identity for each in found.rows}
    assert "brimful: plain" not in plans.done  # measured as fp32
    plans.done.clear()
    both = bench(tmp_path, rows="guide,levers")
    assert {each.row.identity for each in both.rows} == {each.row.identity for each in found.rows}
    assert set(plans.done) <= {"trainer: checkpointing", "brimful: checkpointing", "brimful: checkpointing, fp32"}
    assert "brimful: checkpointing, fp32" in statuses(both)


@pytest.mark.usefixtures("undrawn")
def test_the_command_of_a_record_measures_all_rows_of_its_table(tmp_path: Path, plans: Plans) -> None:
    assert bench(tmp_path, rows="weight_decay=0.1").command == "brimful bench m"  # as it was given
    bench(tmp_path, rows="weight_decay=0.1,optim=sgd")
    found = bench(tmp_path, rows="optim=adafactor")
    words = "optim=adafactor,weight_decay=0.1,optim=sgd"
    assert found.command == f"brimful bench m --output {tmp_path / 'b'} --rows {words} --batch-size 4"
    plans.done.clear()
    assert set(statuses(bench(tmp_path, rows=words))) == set(statuses(found))
    assert plans.done == []
    setup = tmp_path / "b" / "bench.json"
    setup.write_text(json.dumps({**json.loads(setup.read_text()), "rows": []}))  # as of a folder from before
    assert "--rows optim=sgd,weight_decay=0.1,optim=adafactor " in bench(tmp_path, rows="optim=sgd").command


def test_a_budget_that_no_row_fits_is_told_by_what_was_measured(
    tmp_path: Path, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of five steps took 104 s of a budget that is over; a second call has the same."""
    monkeypatch.setattr(bench_run, "_LEAST_S", 0.0)
    plans.ends = {"plain": Ended(found=None, timed_out=True, reason="slow", wall_s=104.0)}
    plans.steps, told = 4, list[str]()
    heard = Callbacks()
    heard.warning = told.append  # type: ignore[method-assign]
    asked: dict[str, Any] = {"steps": 1, "repeats": 3, "warmup_steps": 2}
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, budget_s=0.9, **asked)
    found = bench_run.run_bench(options, heard, command="brimful bench m")
    assert found.rows[0].reason == "the budget was over after 4 of 5 steps, in 104 s"
    assert found.needs_budget_s in (130, 140)
    assert told[-1].endswith(f"raise --budget-s to some {found.needs_budget_s:.0f}, or give 0 for no limit")
    assert "The same command" not in bench_text(found)
    with pytest.raises(brimful.InputError, match="no row of the bench was measured") as caught:
        check_measured(found)
    assert f"to some {found.needs_budget_s:.0f}," in (caught.value.hint or "")


@pytest.mark.usefixtures("undrawn")
def test_compiling_is_once_in_the_budget_that_a_row_needs(
    tmp_path: Path, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 80 s, and then two steps of five 8 s."""
    now = [0.0]
    monkeypatch.setattr(bench_run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ends = [Ended(found=None, reason="no"), Ended(found=None, timed_out=True, reason="slow", wall_s=88.0)]

    def stepped(plan: Mapping[str, Any], watch: Watch, *, limit_s: float | None, folder: Path) -> Ended:
        if plan["row"] is None or not plan["row"]["settings"].get("torch_compile"):
            return plans(plan, watch, limit_s=limit_s, folder=folder)
        for seconds, step in ((80.0, 1), (8.0, 2)):
            now[0] += seconds
            watch.told(step)
        return ends.pop(0)

    monkeypatch.setattr(bench_run, "run_plan", stepped)
    asked: dict[str, Any] = {"rows": "precision=bf16+execution=compiled", "steps": 1, "repeats": 3, "warmup_steps": 2}
    bench(tmp_path, budget_s=0.0, **asked)
    found = bench(tmp_path, budget_s=88.0, **asked)
    assert statuses(found)["trainer: precision=bf16+execution=compiled"] == "left"
    assert found.needs_budget_s == 100.0  # 80 s, and 20 of five steps


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_each_call_goes_on_by_a_row_at_least(tmp_path: Path, plans: Plans) -> None:
    """Though there is no time for it and the recommended one."""
    plans.wall_s = 40.0
    measured = [len(bench(tmp_path, budget_s=60.0, rows="weight_decay=0.1,optim=sgd").measured()) for _ in range(6)]
    assert measured[-1] == 7
    assert measured[:3] == sorted(set(measured[:3]))


@pytest.mark.usefixtures("undrawn")
def test_rows_to_be_measured_again_count_in_the_time_left(tmp_path: Path, plans: Plans) -> None:
    plans.work, plans.more = {**WORK, "device": "CPU", "num_threads": 2}, {"cores": 1.9}
    plans.turns, plans.wall_s = {"trainer: plain": [(20.0, 1.0), (20.0, 1.9)]}, 100.0
    heard, told = Callbacks(), list[str]()
    heard.working = lambda text, _=None: told.append(text)  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, rows="weight_decay=0.1", budget_s=0.0)
    bench_run.run_bench(options, heard, command="brimful bench m")
    second = next(text for text in told if text.startswith("row 2 of 5: "))
    assert second.endswith(", 8 min 20 s left")  # this one, two more, the recommended one, and the first again


@pytest.mark.usefixtures("undrawn")
def test_none_is_recommended_where_all_rows_change_what_is_learned(tmp_path: Path, plans: Plans) -> None:
    plans.ends = {"plain": Ended(found=None, reason="no"), "bf16": Ended(found=None, reason="no")}
    told, heard = list[str](), Callbacks()
    heard.warning = told.append  # type: ignore[method-assign]
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, rows="weight_decay=0.1")
    assert bench_run.run_bench(options, heard, command="brimful bench m").recommended is None
    assert "changes neither arithmetic nor what is learned (optimizer, clipping, weight decay)" in told[-1]
    assert told[-1].endswith("; of the others 1 failed")


def test_a_process_that_somebody_killed_did_not_run_out_of_memory(tmp_path: Path) -> None:
    """A kill by the kernel is in its count."""
    group, system = tmp_path / "group", tmp_path / "vmstat"
    assert memory_kills(group, system) is None
    system.write_text("nr_free_pages 7\noom_kill 3\n")
    assert memory_kills(group, system) == 3
    group.mkdir()
    (group / "memory.events").write_text("low 0\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert memory_kills(group, system) == 1


@pytest.mark.parametrize("counts", [[4, 5], [4, 4], [None, None]])
def test_why_a_process_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int | None]) -> None:
    monkeypatch.setattr(process, "memory_kills", lambda: counts.pop(0))
    kernel = counts == [4, 5]
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(tmp_path / "python"))
    ended = run_plan({}, Watch(), limit_s=60.0, folder=tmp_path)
    assert ended.killed is kernel
    by_kernel = "the process was killed, most likely by the kernel for want of memory"
    assert ended.reason == (by_kernel if kernel else "the process was ended by signal 9 (SIGKILL)")


def test_rates_of_products_are_the_best_of_all_calls(tmp_path: Path, plans: Plans) -> None:
    """And marked where the best was measured while others were busy."""
    plans.work = {**WORK, "device": "CPU", "rates": {"fp32": 4e13}, "rates_waiting": {"fp32": 0.4}}
    first = bench(tmp_path, rows="weight_decay=0.1")
    assert first.rows[0].measured is not None
    assert first.rows[0].measured.mfu == pytest.approx(0.25)
    assert cells(first, 0)[6] == "25.0 %*"
    assert "MFU says little" in Page((tmp_path / "b" / "bench.html").read_text()).text
    plans.work |= {"rates": {"fp32": 5e13}, "rates_waiting": {"fp32": 0.01}}
    assert cells(bench(tmp_path, rows="weight_decay=0.1"), 0)[6] == "20.0 %"
    plans.work |= {"rates": {"fp32": 2e13}, "rates_waiting": {"fp32": 0.4}}
    assert cells(bench(tmp_path, rows="weight_decay=0.1"), 0)[6] == "20.0 %"


@pytest.mark.slow
def test_a_row_that_the_budget_cut_short_keeps_its_figures(tmp_path: Path, plans: Plans) -> None:
    """Marked in all that shows it, until a later call has measured it whole."""
    plans.cut = {"brimful: weight_decay=0.1": [3, 3, 4, 0]}
    asked: dict[str, Any] = {"rows": "weight_decay=0.1", "repeats": 5, "budget_s": 1e4}
    options = BenchOptions(model="m", output=str(tmp_path / "b"), batch_size=4, **asked)
    told, heard = list[str](), Callbacks()
    heard.note = told.append  # type: ignore[method-assign]
    began = time.monotonic()
    found = bench_run.run_bench(options, heard, command="brimful bench m")
    assert all(until is not None and began < until < time.monotonic() + 1e4 for until in plans.until)
    why = "the budget was over after 3 of 5 blocks"
    assert f"brimful: weight_decay=0.1: 50 samples/s, 2.0 GiB; {why}" in told
    row = next(each for each in found.rows if each.row.key == "brimful: weight_decay=0.1")
    number = found.rows.index(row)
    assert (row.status, row.cut_short, row.reason) == ("measured", True, why)
    assert row.measured is not None
    assert row.measured.block_rates == (49.0, 50.0, 51.0)
    assert cells(found, number)[3] == "4.0 % of 3, cut short"
    shown = bench_text(found)
    assert f"Cut short, and measured again by a call with more time:\n  brimful: weight_decay=0.1: {why}\n" in shown
    assert "The same command goes on with the rest" in shown
    assert f"- brimful: weight_decay=0.1: {why}" in (tmp_path / "b" / "results.md").read_text("utf-8")
    table = list(csv.DictReader((tmp_path / "b" / "results.csv").read_text().splitlines()))
    assert [each["cut_short"] for each in table].count("yes") == 1
    assert (table[number]["cut_short"], table[number]["repeats"], table[number]["reason"]) == ("yes", "3", why)
    stored = json.loads((tmp_path / "b" / "results.json").read_text("utf-8"))["rows"][number]
    assert (stored["cut_short"], len(stored["measured"]["block_rates"])) == (True, 3)
    page = Page((tmp_path / "b" / "bench.html").read_text("utf-8")).text
    assert f"Row {number + 1}: {why}; a call with more time measures it again (cut short)." in page
    assert "4.0 % of 3, cut short" in page
    assert plans.done.count("brimful: weight_decay=0.1") == 2  # there was time, and it did no better
    again = bench(tmp_path, **asked)  # cut short again, of more blocks
    assert len((again.rows[number].measured or row.measured).block_rates) == 4
    assert again.rows[number].cut_short
    plans.done.clear()
    whole = bench(tmp_path, **asked)
    assert plans.done == ["brimful: weight_decay=0.1"]
    assert not any(each.cut_short or each.reason for each in whole.rows)
    assert "Cut short" not in bench_text(whole)
    plans.done.clear()
    bench(tmp_path, **asked)
    assert plans.done == []


@pytest.mark.usefixtures("undrawn")
def test_a_row_cut_short_is_measured_again_where_there_is_time_for_it(tmp_path: Path, plans: Plans) -> None:
    """And not before: other rows need the budget, and what this one needs is said."""
    plans.cut, plans.wall_s = {"trainer: plain": [3, 0]}, 40.0
    more: dict[str, Any] = {"rows": "weight_decay=0.1", "repeats": 5, "steps": 1, "warmup_steps": 1}
    found = bench(tmp_path, budget_s=25.0, **more)
    assert plans.done == ["trainer: plain"]
    assert set(statuses(found).values()) == {"measured", "left"}
    assert found.needs_budget_s is None
    assert "The same command goes on with the rest" in bench_text(found)
    plans.done.clear()
    for _ in range(6):
        found = bench(tmp_path, budget_s=45.0, **more)
    assert set(statuses(found).values()) == {"measured"}
    assert len(plans.done) == len(found.rows) - 1
    assert "trainer: plain" not in plans.done
    assert found.needs_budget_s == 70.0  # 6 steps, of which 4 took 40 s
    assert "No row more fits in the budget: raise --budget-s to some 70, or give 0 for no limit" in bench_text(found)
    plans.done.clear()
    found = bench(tmp_path, budget_s=70.0, **more)
    assert plans.done == ["trainer: plain"]
    assert not any(each.cut_short for each in found.rows)
    assert found.needs_budget_s is None


@pytest.mark.thorough
def test_the_command_with_real_processes(tmp_path: Path) -> None:
    """One row of each side and the recommended one, without torch in the process that was asked."""
    base, rows = save_base(tmp_path / "base"), write_reviews(tmp_path / "rows.csv", 16)
    words = ("bench", base, rows, "-o", tmp_path / "b", "--batch-size", 8)
    words += ("--steps", 1, "--repeats", 1, "--warmup-steps", 1)
    code = (
        "import sys\nfrom brimful.cli.commands import run\nfrom brimful.core.bench import Workload\n"
        "Workload.disturbed = lambda *_: False\n"
        f"assert run({[str(word) for word in words] + ['--rows', 'precision=fp16']!r}) == 0\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=compiled)
    assert done.returncode == 0, done.stderr
    assert "brimful: precision=fp16  not here" in done.stdout
    found = read_bench(tmp_path / "b")
    assert found is not None
    assert [each.status for each in found.rows] == ["measured", "measured", "unsupported", "unsupported", "measured"]
    assert found.command.startswith(f"brimful bench {base} {rows} --output {tmp_path / 'b'} --rows precision=fp16")
    assert "needs a GPU: fp16" in done.stdout
    table = list(csv.DictReader((tmp_path / "b" / "results.csv").read_text().splitlines()))
    assert [row["status"] for row in table] == [each.status for each in found.rows]
    assert float(table[1]["resident_bytes"]) > 1e8
    assert (tmp_path / "b" / "bench.html").stat().st_size < 1_500_000
