"""Trackers hear all that a run says, and leave nothing behind before there is something to write."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from brimful.core.callbacks import Callbacks, Progress
from brimful.core.errors import OptionError
from brimful.integrations.fanout import Fanout
from brimful.integrations.tensorboard import TensorBoard

METHODS = sorted(name for name, _ in inspect.getmembers(Callbacks, inspect.isfunction))
PROGRESS = Progress(
    step=3, num_steps=9, epoch=0.3, loss=0.5, learning_rate=1e-5, grad_norm=1.0, tokens_per_s=9.0, samples_per_s=1.0,
    left_s=None,
)  # fmt: skip


class Recorder(Callbacks):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *said: self.heard.append((name, said))
        return super().__getattribute__(name)


@pytest.mark.parametrize("method", METHODS)
def test_each_of_several_listeners_hears_everything(method: str) -> None:
    first, second = Recorder(), Recorder()
    said = tuple(range(len(inspect.signature(getattr(Callbacks, method)).parameters) - 1))
    getattr(Fanout(first, second), method)(*said)
    assert first.heard == second.heard == [(method, said)]


def test_tensorboard_writes_when_there_is_something_to_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path / "events")
    assert list(tmp_path.iterdir()) == []
    tracker.progress(PROGRESS)
    tracker.evaluated(3, {"accuracy": 0.5})
    assert len(list((tmp_path / "events").iterdir())) == 1


def test_without_tensorboard_it_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs tensorboard") as caught:
        TensorBoard(tmp_path)
    assert caught.value.hint == "pip install 'brimful[tensorboard]'"
