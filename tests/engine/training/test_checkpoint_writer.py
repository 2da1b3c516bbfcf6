"""Checkpoints that are written while training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from brimful.core.errors import DiskFullError, OutputError
from brimful.engine.training import checkpoint_writer
from brimful.engine.training.checkpoint import begin_checkpoint, checkpoint_path, load_checkpoint, saved_steps
from brimful.engine.training.checkpoint_writer import CheckpointWriter, OthersParts, PartWriter
from brimful.hardware.pulse import Pulse
from brimful.hardware.watch import Board
from brimful.step.state import StepState
from engine.training.test_checkpoint import RUN, content, same


def begin(writer: CheckpointWriter, step: int, state: StepState | None = None) -> None:
    asked = content(step)
    writer.begin(step, state=state or asked["state"], loop=asked["loop"], protect=(), passed_over=())


@pytest.mark.parametrize("free_bytes", [1 << 40, 0, None], ids=["copied", "too large to copy", "unknown memory"])
def test_what_changes_afterwards_is_not_in_it(
    free_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "free_host_bytes", lambda: free_bytes)
    writer = CheckpointWriter(tmp_path, RUN, keep=2)
    for step in (3, 6, 9):
        state = content(step)["state"]
        begin(writer, step, state)
        for group in (state.weights, state.buffers, state.optimizer["weight"].tensors):
            for tensor in group.values():
                tensor.zero_()
        saved = writer.settle()
        assert saved is not None
        assert (saved.step, saved.failure) == (step, None)
        assert same(load_checkpoint(checkpoint_path(tmp_path, step)), step)
    writer.close()
    assert saved_steps(tmp_path) == [6, 9]
    assert writer.settle() is None


def test_each_file_and_look_for_others_is_progress(tmp_path: Path) -> None:
    pulse, told = Pulse(), []

    class Watched(Board):
        def __init__(self) -> None:
            self.looks = 0

        def find(self, name: str) -> str | None:
            self.looks += 1
            return None if self.looks < 5 else '{"files": {}}'

        def leave(self, name: str, text: str) -> None:
            assert name == "part/1/0"

    def write_on() -> None:
        assert pulse._wrote is not None
        told.append(1)

    pulse._write_on = write_on  # type: ignore[method-assign]
    writer, state = CheckpointWriter(tmp_path, RUN, keep=2, pulse=pulse), content(3)["state"]
    writer.begin(
        3, state=state, loop={}, protect=(), passed_over=(), others=OthersParts(2, Watched(), lambda: None).coming()
    )
    writer.settle()
    assert len(told) >= 3 + 4  # pieces of files, and looks
    alone = len(told)
    parts = PartWriter(tmp_path, pulse, 1, Watched())
    parts.begin(6, begin_checkpoint(tmp_path, 6), state)
    parts.close()
    assert len(told) >= alone + 3
    assert pulse._wrote is None


def test_what_was_begun_is_there_when_it_is_closed(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, RUN, keep=2)
    begin(writer, 3)
    writer.close()
    assert same(load_checkpoint(checkpoint_path(tmp_path, 3)), 3)


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied", "too large to copy"])
def test_a_failure_is_said_when_it_is_settled(free_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "free_host_bytes", lambda: free_bytes)
    writer = CheckpointWriter(tmp_path, RUN, keep=2)
    begin(writer, 3)
    writer.settle()
    for failure in (DiskFullError("no room"), OutputError("read-only")):

        def fail(*_: object, failure: Exception = failure, **__: object) -> None:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_writer, "save_checkpoint", fail)
            begin(writer, 6)
            if isinstance(failure, DiskFullError):
                saved = writer.settle()
                assert saved is not None
                assert (saved.step, saved.failure) == (6, failure)
            else:
                with pytest.raises(OutputError, match="read-only"):
                    writer.settle()
        assert writer.ended
    writer.close()
    assert saved_steps(tmp_path) == [3]
