"""Weights & Biases, which its own variables configure: WANDB_MODE, WANDB_PROJECT, WANDB_DIR, WANDB_NAME and others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from brimful.integrations.trackers.tracker import PROJECT, Begun, Point, TrackedRun


class WeightsAndBiases:
    """A run of W&B whose axis is the step of the training, so that a resumed run may log a step again."""

    def begin(self, run: TrackedRun) -> Begun:
        """Begin or go on with a run; local files are in the run's folder unless WANDB_DIR says otherwise."""
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.tracked_id or os.environ.get("WANDB_RUN_ID"),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.settings),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return Begun(tracked_id=self._run.id, url=self._run.url)

    def send(self, points: list[Point]) -> None:
        """Give numbers to W&B's service, a process that outlives this one until all is stored."""
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def finish(self, summary: Mapping[str, float], *, step: int, complete: bool) -> None:
        """Write the summary, and wait until all is sent, or in offline mode stored."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if complete else 1)
