"""Several listeners as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brimful.core.callbacks import Callbacks, Progress
from brimful.core.records import Recipe, Run


class Fanout(Callbacks):
    """Tells each of several listeners, in order."""

    def __init__(self, *listeners: Callbacks) -> None:
        self._listeners = listeners

    def stage(self, text: str) -> None:
        for callbacks in self._listeners:
            callbacks.stage(text)

    def note(self, text: str) -> None:
        for callbacks in self._listeners:
            callbacks.note(text)

    def warning(self, text: str) -> None:
        for callbacks in self._listeners:
            callbacks.warning(text)

    def data(self, report: Mapping[str, Any]) -> None:
        for callbacks in self._listeners:
            callbacks.data(report)

    def recipe(self, recipe: Recipe) -> None:
        for callbacks in self._listeners:
            callbacks.recipe(recipe)

    def progress(self, progress: Progress) -> None:
        for callbacks in self._listeners:
            callbacks.progress(progress)

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        for callbacks in self._listeners:
            callbacks.count(done, total, share)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for callbacks in self._listeners:
            callbacks.evaluated(step, metrics)

    def finished(self, run: Run, folder: str) -> None:
        for callbacks in self._listeners:
            callbacks.finished(run, folder)
