"""A disk without room: refused ahead where it can be known, survived where it comes later, on a real small disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import brimful
from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks, Progress
from brimful.core.errors import DiskFullError, OutputError
from brimful.core.units import bytes_text
from brimful.data.writers import sorted_rows
from brimful.engine.training.checkpoint import newest_whole
from brimful.engine.training.run_folder import leave_room
from runs import Runner, checkpoints, contents, events, learned, single_label_rows, write_rows

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

OPTIONS: dict[str, Any] = {
    "max_length": 48, "batch_size": 8, "max_steps": 12, "save_steps": 3, "eval_steps": 3, "learning_rate": 3e-3,
    "logging_steps": 1,
}  # fmt: skip
WORDS = [word for name, value in OPTIONS.items() for word in ("--" + name.replace("_", "-"), str(value))]
#: Room for events, but for no checkpoint of the tiny model.
LITTLE = 24 << 10


class Filler(Callbacks):
    """Fills the disk up to LITTLE at one evaluation, frees it at another, and keeps what it hears.

    By an evaluation, what was begun to be saved before is settled: nothing else writes beside.
    """

    def __init__(self, folder: Path, full_at: int, free_at: int | None = None) -> None:
        self._file, self._full_at, self._free_at = folder / "hog", full_at, free_at
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._full_at:
            free = atomic_files.free_bytes(self._file.parent)
            assert free is not None
            self._file.write_bytes(bytes(free - LITTLE))
        if step == self._free_at:
            self.free()

    def free(self) -> None:
        self._file.unlink()


@pytest.fixture(scope="session")
def alone(home: Path, model: Path, rows: Path) -> Path:
    """The run with room."""
    brimful.train(rows, model=model, output=home / "roomy", **OPTIONS)
    return home / "roomy"


# --- ahead ----------------------------------------------------------------------------------------------------------


def test_refused_ahead_with_both_numbers(runner: Runner, model: Path, rows: Path, disk: Callable[[str], Path]) -> None:
    output = disk("8m") / "run"
    ended = runner(["train", str(rows), "--model", str(model), "--output", str(output), *WORDS])
    assert ended.code == 2
    assert "the run needs about 64.3 MiB here, 8.0 MiB are free" in ended.said
    assert "hint: free some space" in ended.said
    assert not output.exists()


@pytest.mark.sampled
@pytest.mark.parametrize(("limit", "best"), [(1, None), (4, None), (4, "loss")])
def test_what_a_run_needs_is_from_the_models_size(
    limit: int, best: str | None, model: Path, rows: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(alone / "model" / "model.safetensors")
    numbers = sum(weight.numel() for weight in weights.values())
    num_checkpoints = limit + 1 + (best is not None)  # those kept, the one being written, the best one
    needed = 4 * numbers + num_checkpoints * 12 * numbers + (64 << 20)
    options = OPTIONS | {"save_total_limit": limit, "metric_for_best_model": best, "dry_run": True}
    monkeypatch.setattr(atomic_files, "free_bytes", lambda path: needed)
    assert brimful.train(rows, model=model, output=tmp_path / "run", **options).status == "planned"
    monkeypatch.setattr(atomic_files, "free_bytes", lambda path: needed - 1)
    with pytest.raises(OutputError, match="the run needs about") as caught:
        brimful.train(rows, model=model, output=tmp_path / "run", **options)
    assert bytes_text(needed) in str(caught.value)


def test_resuming_counts_the_room_that_the_run_has_already(
    model: Path, rows: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    shutil.copytree(alone, output)
    before = contents(output)
    monkeypatch.setattr(atomic_files, "free_bytes", lambda path: 0)
    assert brimful.train(rows, model=model, output=output, resume=True, **OPTIONS).status == "finished"
    assert contents(output) == before
    shutil.rmtree(output / "model")  # now there is something to do
    with pytest.raises(OutputError, match=r"0 B are free besides the .* of its checkpoints"):
        brimful.train(rows, model=model, output=output, resume=True, **OPTIONS)
    monkeypatch.setattr(atomic_files, "free_bytes", lambda path: 65 << 20)
    brimful.train(rows, model=model, output=output, resume=True, **OPTIONS)
    assert learned(output) == learned(alone)


def test_room_is_counted_while_checkpoints_go_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "weights").write_bytes(bytes(1 << 20))
    real = os.scandir

    def scandir(folder: Any) -> Any:
        if str(folder).endswith("/b"):
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(atomic_files, "free_bytes", lambda path: 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        leave_room(tmp_path, (1 << 20) + 90, 10)
    with pytest.raises(DiskFullError, match=f"100 B are free in {tmp_path}, where"):
        leave_room(tmp_path, (1 << 20) + 91, 10)


# --- later ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    model: Path, rows: Path, alone: Path, disk: Callable[[str], Path]
) -> None:
    output = disk("80m") / "run"
    filler = Filler(output.parent, full_at=6, free_at=9)
    brimful.train(rows, model=model, output=output, callbacks=filler, **OPTIONS)
    [warning] = filler.warnings
    assert warning.startswith("no checkpoint after step 6: cannot write ")
    assert "No space left on device" in warning
    assert warning.endswith("training goes on")
    [failed] = events(output, "checkpoint_failed")
    assert (failed["step"], failed["why"] in warning) == (6, True)
    assert learned(output) == learned(alone)
    assert checkpoints(output) == [9, 12]


@pytest.mark.slow
def test_full_at_the_end(model: Path, rows: Path, alone: Path, disk: Callable[[str], Path]) -> None:
    output = disk("80m") / "run"
    filler = Filler(output.parent, full_at=9)
    with pytest.raises(DiskFullError, match="No space left on device") as caught:
        brimful.train(rows, model=model, output=output, callbacks=filler, **OPTIONS)
    assert caught.value.exit_code == 4
    assert caught.value.hint is not None
    assert "--resume" in caught.value.hint
    assert [event["step"] for event in events(output, "checkpoint_failed")] == [9, 12]
    whole, passed_over = newest_whole(output / "checkpoints", json.loads((output / "run.json").read_text())["run"])
    assert whole is not None
    assert (whole.step, passed_over) == (6, [])
    assert not (output / "model").exists()
    filler.free()
    brimful.train(rows, model=model, output=output, resume=True, **OPTIONS)
    assert learned(output) == learned(alone)


@pytest.mark.slow
def test_the_best_model_that_could_not_be_saved(model: Path, rows: Path, disk: Callable[[str], Path]) -> None:
    """It is not there to be kept: of those that are, the best one is."""
    options = OPTIONS | {"metric_for_best_model": "loss", "learning_rate": 5e-2, "eval_steps": 1, "save_steps": 12}
    options["seed"] = 1  # by which the loss is lowest in the middle, with a margin
    output = disk("80m") / "roomy"
    brimful.train(rows, model=model, output=output, **options)
    losses = {event["step"]: event["metrics"]["loss"] for event in events(output, "evaluated")}
    best = min(losses, key=lambda step: losses[step])
    assert 1 < best < 12
    shutil.rmtree(output)
    output = output.with_name("run")
    filler = Filler(output.parent, full_at=best, free_at=best + 1)
    run = brimful.train(rows, model=model, output=output, callbacks=filler, **options)
    assert f"no checkpoint after step {best}" in filler.warnings[0]
    assert len(filler.warnings) == 1
    del losses[best]
    assert run.metrics["loss"] == min(losses.values())


class FillsUp(Filler):
    """Fills the disk at the first step, up to what a run of the same options has used in `like`, and a little more."""

    def __init__(self, folder: Path, like: Path) -> None:
        super().__init__(folder, full_at=0)
        self._needed = pages(like)

    def progress(self, progress: Progress) -> None:
        if not self._file.exists():
            free = atomic_files.free_bytes(self._file.parent)
            assert free is not None
            needed = self._needed - pages(self._file.parent / "run")
            self._file.write_bytes(bytes(free - needed - LITTLE))


def pages(folder: Path) -> int:
    """Bytes that the files of a run take on a disk, without the answers to its rows."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".parquet"]
    return sum(-(-size // 4096) * 4096 for size in sizes)


@pytest.mark.thorough
def test_answers_do_not_take_the_room_of_what_must_be_saved(
    model: Path, tmp_path: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for checkpoint and model, and for less than the answers to 3,000 rows."""
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held-out.jsonl"
    write_rows(rows, single_label_rows(60))
    write_rows(held_out, single_label_rows(3_000, seed=1))
    given: dict[str, Any] = {
        "model": model, "eval_data": held_out, "max_steps": 2, "batch_size": 8, "logging_steps": 1, "max_length": 8,
        "baselines": False,
    }  # fmt: skip
    brimful.train(rows, output=tmp_path / "roomy", callbacks=Callbacks(), **given)
    assert (tmp_path / "roomy" / "predictions.parquet").stat().st_size > LITTLE
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 1 << 15)
    output = disk("80m") / "run"
    filler = FillsUp(output.parent, tmp_path / "roomy")
    run = brimful.train(rows, output=output, callbacks=filler, **given)
    assert run.status == "finished"
    assert learned(output) == learned(tmp_path / "roomy")
    assert checkpoints(output) == [2]
    (warning,) = filler.warnings
    assert warning.startswith("the answers to its 3,000 rows are not saved: ")
    assert warning.endswith(f" are free in {output}, where checkpoints and model need room")
    record = json.loads((output / "evaluation.json").read_text("utf-8"))
    assert (record["predictions"], record["notes"]) == (None, [warning])
    assert not (output / "predictions.parquet").exists()


def test_an_exit_code_and_a_way_on_without_a_mount(
    runner: Runner, model: Path, rows: Path, alone: Path, tmp_path: Path
) -> None:
    """A limit on the size of a file is a full disk to a checkpoint."""
    words = ["train", str(rows), "--model", str(model), "--output", str(tmp_path / "run"), *WORDS]
    ended = runner(words, file_bytes=LITTLE)
    assert ended.code == 4, ended.said
    assert ended.said.count("warning: no checkpoint after step") == 4
    assert "error: cannot write " in ended.said
    assert "hint: free some space, then go on with --resume" in ended.said
    assert len(events(tmp_path / "run", "checkpoint_failed")) == 4
    assert checkpoints(tmp_path / "run") == []
    ended = runner([*words, "--resume"])
    assert ended.code == 0, ended.said
    assert learned(tmp_path / "run") == learned(alone)


def test_stopped_on_a_full_disk(runner: Runner, model: Path, rows: Path, tmp_path: Path) -> None:
    """A model that cannot be saved is not said to be."""
    words = ["train", str(rows), "--model", str(model), "--output", str(tmp_path / "run"), *WORDS]
    ended = runner(words, "term:event:step:2", file_bytes=LITTLE)
    assert ended.code == 4, ended.said
    assert "all is saved" not in ended.said
