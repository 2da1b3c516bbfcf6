"""The stages of a stream: windows are written in order, up to the first that fails, and a stop is heard at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brimful.engine.classification.stages import Stages, run_stages
from brimful.engine.inference import Done


class StageError(Exception):
    """The error of a stage in these tests."""


def run(
    windows: Any, write: Callable[[int], None], *, fail_in: str = "", stop: Callable[[], bool] = lambda: False
) -> None:
    """Window 3 fails in the stage `fail_in`."""

    def stage(name: str, window: int) -> int:
        if (name, window) == (fail_in, 3):
            raise StageError
        return window

    run_stages(
        windows,
        tokenise=lambda window: lambda: stage("tokenise", window),
        compute=lambda window: Done(stage("compute", window), 0.0),  # type: ignore[arg-type]
        write=lambda window, _, __: write(stage("write", window)),
        stages=Stages(),
        stop=stop,
    )


def test_windows_are_written_in_order() -> None:
    written: list[int] = []
    run(range(100), written.append)
    assert written == list(range(100))


@pytest.mark.parametrize("stage", ["read", "tokenise", "compute", "write"])
def test_a_failure_is_raised_with_all_before_it_written_and_nothing_behind(stage: str) -> None:
    def windows() -> Iterator[int]:
        for window in range(100):
            if (stage, window) == ("read", 3):
                raise StageError
            yield window

    written: list[int] = []
    with pytest.raises(StageError):
        run(windows(), written.append, fail_in=stage)
    assert written == [0, 1, 2]


def test_a_stop_is_heard_while_no_window_comes() -> None:
    told, written = threading.Event(), []
    waiting = threading.Event()

    def windows() -> Iterator[int]:
        yield 0
        waiting.wait(60)

    def write(window: int) -> None:
        written.append(window)
        told.set()

    run(windows(), write, stop=told.is_set)
    assert written == [0]
    assert not waiting.is_set()
    waiting.set()
