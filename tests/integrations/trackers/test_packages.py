"""The trackers' own packages, without a network: what is sent can be read there, and a run that goes on is one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brimful.integrations.trackers.reporting import send_run
from brimful.integrations.trackers.run_log import read_sent, state_path
from reports.test_run_page import record, write_run

STEPS = [1, 2, *range(4, 13)]  # the loss of step 3 is no number


def sent_in_two_parts(folder: Path, tracker: str) -> str:
    """Send a run of 12 steps as one that was interrupted after 6; return its name there."""
    run, evaluation = record(5)
    write_run(folder, run, evaluation, num_events=12)
    log, text = folder / "events.jsonl", (folder / "events.jsonl").read_text("utf-8")
    ended = (folder / "run.json").read_text("utf-8")
    (folder / "run.json").write_text(json.dumps(json.loads(ended) | {"status": "running"}), "utf-8")
    log.write_text("".join(text.splitlines(keepends=True)[:7]), "utf-8")
    send_run(folder, tracker)
    before = read_sent(state_path(folder, tracker))
    log.write_text(text, "utf-8")
    (folder / "run.json").write_text(ended, "utf-8")
    send_run(folder, tracker)
    after = read_sent(state_path(folder, tracker))
    assert (before.summarised, after.summarised) == (False, True)
    assert before.tracked_id == after.tracked_id
    assert after.tracked_id is not None
    return after.tracked_id


def end_once_more(folder: Path, tracker: str) -> None:
    """Send a run of which the end alone was not sent: it has no point left that would tell its last step."""
    path = state_path(folder, tracker)
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"summarised": False}), "utf-8")
    send_run(folder, tracker)


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent_in_two_parts(tmp_path / "run", "tensorboard")
    end_once_more(tmp_path / "run", "tensorboard")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/loss")] == [
        (step, pytest.approx(2.0 / step)) for step in STEPS
    ]
    assert [point.step for point in board.Scalars("eval/accuracy")] == [10]
    assert [(point.step, point.value) for point in board.Scalars("run/steps")] == [(40, 40.0)] * 2
    assert b"recipe/packing" in board.Tensors("settings")[0].tensor_proto.string_val[0]


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, evaluation = record(5)
    folder = write_run(tmp_path / "run", run, evaluation)
    (tmp_path / "packages" / "torch").mkdir(parents=True)
    (tmp_path / "packages" / "torch" / "__init__.py").write_text("raise RuntimeError('torch was loaded')\n", "utf-8")
    path = sys.path.copy()
    sys.path.insert(0, str(tmp_path / "packages"))
    try:
        send_run(folder, "tensorboard")
    finally:
        sys.path[:] = path


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    name = sent_in_two_parts(tmp_path / "run", "wandb")
    stored = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(stored) == 2
    assert b"final/accuracy" not in stored[0].read_bytes()
    assert b"train/loss" in stored[0].read_bytes()
    assert b"run/steps" in stored[1].read_bytes()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.mark.filterwarnings("ignore")  # of MLflow's packages, in reading
@pytest.mark.parametrize("where", ["files", "default"])
def test_mlflow(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = (tmp_path / "mlruns").as_uri()
    if where == "files":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    name = sent_in_two_parts(tmp_path / "run", "mlflow")
    end_once_more(tmp_path / "run", "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if not (tmp_path / "mlruns" / "0").exists():  # a database is its default where it has one
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    history = client.get_metric_history(name, "train/loss")
    assert [(each.step, each.value) for each in history] == [(step, pytest.approx(2.0 / step)) for step in STEPS]
    stored = client.get_run(name)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["recipe/packing"] == "packed"
    assert stored.data.metrics["run/steps"] == 40
    assert [each.step for each in client.get_metric_history(name, "run/steps")] == [40, 40]
    assert capfd.readouterr().out == ""


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    name = sent_in_two_parts(tmp_path / "run", "trackio")
    end_once_more(tmp_path / "run", "trackio")
    read: Callable[..., list[dict[str, float]]]
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    read = SQLiteStorage.get_logs
    logs = read("brimful", name)
    assert [each["step"] for each in logs if "train/loss" in each] == STEPS
    assert {(each["step"], each["run/steps"]) for each in logs if "run/steps" in each} == {(40, 40)}
    assert capfd.readouterr().out == ""
