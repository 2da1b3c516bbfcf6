"""Several listeners as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brimful.core.callbacks import Listener, Progress
from brimful.core.records import Recipe, Run


class Fanout(Listener):
    """Tells each of several listeners, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def stage(self, text: str) -> None:
        for listener in self._listeners:
            listener.stage(text)

    def note(self, text: str) -> None:
        for listener in self._listeners:
            listener.note(text)

    def warning(self, text: str) -> None:
        for listener in self._listeners:
            listener.warning(text)

    def data(self, report: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener.data(report)

    def recipe(self, recipe: Recipe) -> None:
        for listener in self._listeners:
            listener.recipe(recipe)

    def progress(self, progress: Progress) -> None:
        for listener in self._listeners:
            listener.progress(progress)

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        for listener in self._listeners:
            listener.count(done, total, share)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for listener in self._listeners:
            listener.evaluated(step, metrics)

    def finished(self, run: Run, folder: str) -> None:
        for listener in self._listeners:
            listener.finished(run, folder)
