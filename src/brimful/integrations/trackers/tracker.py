"""A tracker as its process sees it: a run that begins or goes on, numbers by step, an end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: A value of a run's configuration.
Setting = str | int | float | bool
#: Project, or experiment, unless the tracker's own variable of the environment names another.
PROJECT = "brimful"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run to be reported. name: of its folder. settings: options that were given or chosen, levers, machine.

    tracked_id: identity of this run in the tracker, from the time before; None at first. complete: it has ended.
    """

    folder: Path
    run: str
    name: str
    settings: Mapping[str, Setting]
    tracked_id: str | None = None
    complete: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """Numbers of one step, by name, such as `train/loss`."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run that a tracker has begun, or gone on with. url: None where it has no page on the web."""

    tracked_id: str
    url: str | None = None


class Tracker(Protocol):
    """Each call may raise what its package raises, and take its time."""

    def begin(self, run: TrackedRun) -> Begun:
        """Begin a run, or go on with the one that has its `tracked_id`."""

    def send(self, points: list[Point]) -> None:
        """Send numbers, in the order of their steps; nothing of them is lost if this process ends then."""

    def finish(self, summary: Mapping[str, float], *, step: int, complete: bool) -> None:
        """End the run. summary: results of the saved model, at its last `step`. complete: it was not interrupted."""
