"""trackio, which its own variables configure: TRACKIO_PROJECT, TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from brimful.integrations.trackers.tracker import PROJECT, Begun, Point, TrackedRun


class Trackio:
    """A run of trackio, on this machine unless its variables name a place on the hub or a server."""

    def begin(self, run: TrackedRun) -> Begun:
        """Begin or go on with a run. Its name tells it apart: the folder's, and the beginning of the run's number."""
        import trackio

        name = run.tracked_id or f"{run.name}-{run.run[:6]}"
        self._run: Any = trackio.init(
            os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return Begun(tracked_id=name, url=self._run.url)

    def send(self, points: list[Point]) -> None:
        """Queue numbers, which trackio's thread stores within a second."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def finish(self, summary: Mapping[str, float], *, step: int, complete: bool) -> None:
        """Log the summary at the last step, and wait until all is stored."""
        if complete and summary:
            self._run.log(dict(summary), step=step)
        self._run.finish()
