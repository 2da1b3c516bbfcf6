"""A tracker gets all of a run, once; and one that fails, hangs or leaves stops nothing and is named once."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import brimful
from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, OutputError
from brimful.integrations.trackers import reporting
from brimful.integrations.trackers.reporting import send_run
from brimful.integrations.trackers.run_log import lock_path, read_sent, state_path
from commands import call
from integrations.trackers.pretended import Pretended
from reports.test_run_page import record, write_run
from runs import events, learned

SIZES: dict[str, Any] = {
    "max_length": 48, "batch_size": 8, "max_steps": 6, "learning_rate": 1e-3, "logging_steps": 1, "eval_steps": 3,
    "baselines": False,
}  # fmt: skip
ALL = [1, 2, 3, 4, 5, 6]


class Heard(Callbacks):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(model: Path, rows: Path, output: Path, **more: Any) -> Heard:
    heard = Heard()
    brimful.train(rows, model=model, output=output, report_to="wandb", callbacks=heard, **(SIZES | more))
    return heard


def test_a_tracker_gets_the_run_and_its_chatter_goes_to_a_file(
    pretended: Pretended, model: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard = train(model, rows, tmp_path / "run")
    assert [text for text in heard.warnings if "wandb" in text] == []
    assert "wandb: https://tracker.invalid/id-1" in heard.notes
    (begun,) = pretended.calls("init")
    assert begun["asked"]["config"]["learning_rate"] == 1e-3
    assert begun["asked"]["config"]["recipe/packing"] == "packed"
    assert "quiet" not in begun["asked"]["config"]
    assert pretended.steps("train/loss") == ALL
    assert pretended.steps("eval/accuracy") == [3, 6]
    losses = [call["values"]["train/loss"] for call in pretended.calls("log") if "train/loss" in call["values"]]
    assert losses == [event["loss"] for event in events(tmp_path / "run", "step")]
    (ended,) = pretended.calls("finish")
    assert ended["exit_code"] == 0
    assert ended["summary"]["final/accuracy"] == learned(tmp_path / "run")["metrics"]["accuracy"]
    said = capfd.readouterr()
    assert "chatter" not in said.out + said.err
    assert "chatter" in (tmp_path / "run" / "trackers" / "wandb.log").read_text("utf-8")


@pytest.mark.sampled
@pytest.mark.parametrize(("does", "at"), [("fail", "init"), ("fail", "log"), ("fail", "finish"), ("leave", "init")])
def test_one_that_fails_is_named_once_and_gets_the_rest_later(
    does: str, at: str, pretended: Pretended, model: Path, rows: Path, tmp_path: Path
) -> None:
    pretended.plan(does, at)
    run = tmp_path / "run"
    heard = train(model, rows, run)
    why = "RuntimeError: the service is away" if does == "fail" else "SystemExit: 0"
    (said,) = [text for text in heard.warnings if "wandb" in text]
    assert said.startswith(f"wandb does not have all of this run: {why}; ")
    assert f"brimful report {run} --report-to wandb" in said
    assert [(each["tracker"], each["why"]) for each in events(run, "tracker_failed")] == [("wandb", why)]
    assert learned(run)["status"] == "finished"
    with pytest.raises(OutputError, match=f"not sent to wandb: {why}"):
        send_run(run, "wandb")
    pretended.plan()
    assert send_run(run, "wandb") == {"wandb": "https://tracker.invalid/id-1"}
    assert list(dict.fromkeys(pretended.steps("train/loss"))) == ALL
    if at == "finish":
        assert pretended.steps("train/loss") == ALL
    assert [call["asked"]["id"] for call in pretended.calls("init")][-1] == (None if at == "init" else "id-1")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("at", ["init", "finish"])
def test_one_that_hangs_is_waited_for_at_the_end_alone(
    at: str, pretended: Pretended, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_WAIT_S", 0.2)
    pretended.plan("hang", at)
    heard = train(model, rows, tmp_path / "run")
    (said,) = [text for text in heard.warnings if "wandb" in text]
    assert "it did not take the rest within 0 s" in said
    assert learned(tmp_path / "run")["status"] == "finished"
    pretended.plan()
    send_run(tmp_path / "run", "wandb")
    assert set(pretended.steps("train/loss")) == set(ALL)
    assert pretended.calls("finish")[-1]["exit_code"] == 0


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_run_there(
    pretended: Pretended, model: Path, rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(model, rows, run, lr_scheduler_type="constant")
    assert send_run(run, "wandb")  # it has all: nothing is begun again
    assert len(pretended.calls("init")) == 1
    train(model, rows, run, lr_scheduler_type="constant", max_steps=9, resume=True)
    assert [call["asked"]["id"] for call in pretended.calls("init")] == [None, "id-1"]
    assert pretended.steps("train/loss") == [*ALL, 7, 8, 9]
    assert pretended.steps("incidents/resumed") == [6]
    assert [call["exit_code"] for call in pretended.calls("finish")] == [0, 0]


def test_steps_that_a_resumed_run_repeats_are_not_sent_again(pretended: Pretended, tmp_path: Path) -> None:
    """Cut back to its checkpoint, a log grows again: what trackers have of that stays as it is."""
    run, evaluation = record(5)
    folder = write_run(tmp_path / "run", run, evaluation, num_events=12)
    lines = (folder / "events.jsonl").read_text("utf-8").splitlines(keepends=True)
    log = folder / "events.jsonl"
    log.write_text("".join(lines[:8]), "utf-8")  # up to step 7
    send_run(folder, "wandb")
    log.write_text("".join([*lines[:5], '{"kind": "resumed", "step": 4}\n', *lines[5:]]), "utf-8")
    send_run(folder, "wandb")
    assert pretended.steps("train/learning_rate") == [*range(1, 13)]
    assert pretended.steps("train/loss") == [1, 2, *range(4, 13)]  # that of step 3 is no number
    assert pretended.steps("eval/accuracy") == [10]
    assert pretended.steps("incidents/resumed") == [4]
    assert pretended.steps("incidents/skipped") == [40]


def test_a_run_is_sent_without_matplotlib(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no page then: a warning, and an error where the page was asked for."""
    run, evaluation = record(5)
    folder = write_run(tmp_path / "run", run, evaluation)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    said = call("report", folder, "--report-to", "wandb")
    assert (said.code, said.out) == (0, "")
    assert "sent to wandb: https://tracker.invalid/id-1\nwarning: no page was written: a report as a page" in said.err
    assert "pip install 'brimful[report]'" in said.err
    assert pretended.calls("finish")
    assert json.loads(call("report", folder, "--report-to", "wandb", "--json").out) == {"report": None}
    for words in (("--report-to", "wandb", "-o", tmp_path / "page.html"), ()):
        said = call("report", folder, *words)
        assert (said.code, said.out) == (2, "")
        assert "error: a report as a page needs matplotlib for its charts\nhint: pip install" in said.err
        assert ("sent to wandb" in said.err) == bool(words)


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_run_that_another_process_sends_is_not_waited_for(
    is_under_way: bool, pretended: Pretended, tmp_path: Path
) -> None:
    run, evaluation = record(5)
    folder = write_run(tmp_path / "run", run, evaluation)
    (folder / "trackers").mkdir()
    own = atomic_files.lock_folder(folder) if is_under_way else None
    with lock_path(state_path(folder, "wandb")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="the run is being sent to wandb by another process already") as caught:
            send_run(folder, "wandb")
    assert ("sends its log itself" in (caught.value.hint or "")) == is_under_way
    assert pretended.calls("init") == []
    if own is not None:
        os.close(own)
    assert send_run(folder, "wandb")


def test_another_run_in_the_same_folder_is_another_run_there(pretended: Pretended, tmp_path: Path) -> None:
    run, evaluation = record(5)
    folder = write_run(tmp_path / "run", run, evaluation, num_events=4)
    send_run(folder, "wandb")
    again = json.loads((folder / "run.json").read_text("utf-8")) | {"run": "another"}
    (folder / "run.json").write_text(json.dumps(again), "utf-8")
    send_run(folder, "wandb")
    assert [call["asked"]["id"] for call in pretended.calls("init")] == [None, None]
    assert pretended.steps("train/learning_rate") == [1, 2, 3, 4] * 2


def test_what_a_killed_training_had_logged_is_sent(pretended: Pretended, tmp_path: Path) -> None:
    run, _ = record(5)
    folder = write_run(tmp_path / "run", run, None, num_events=5)
    status = json.loads((folder / "run.json").read_text("utf-8")) | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(status), "utf-8")
    program = (
        "import os, pathlib, sys; from brimful.integrations.trackers.reporting import TrackerProcesses; "
        f"sys.path[:] = {sys.path!r}; TrackerProcesses('wandb').begin(pathlib.Path({str(folder)!r})); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    until = time.monotonic() + 60
    while not pretended.calls("finish") and time.monotonic() < until:
        time.sleep(0.05)
    (ended,) = pretended.calls("finish")
    assert (ended["exit_code"], ended["summary"]) == (1, {})
    assert pretended.steps("train/learning_rate") == [1, 2, 3, 4, 5]
    assert read_sent(state_path(folder, "wandb")).tracked_id == "id-1"
