"""MLflow, which its own variables configure: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brimful.integrations.trackers.tracker import PROJECT, Begun, Point, TrackedRun

#: Most metrics and parameters of one request, and characters of a parameter, that a server takes.
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 500


class MLflow:
    """A run of MLflow, by its client: nothing becomes the process's active run."""

    def begin(self, run: TrackedRun) -> Begun:
        """Begin a run in the experiment, which is made if there is none, or go on with one."""
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=_tracking_uri())
        if run.tracked_id is not None:
            self._client.update_run(run.tracked_id, status="RUNNING")
            self._id: str = run.tracked_id
            return Begun(tracked_id=self._id)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        made = self._client.create_run(where, run_name=run.name, tags={"brimful.run": run.run})
        self._id = made.info.run_id
        self._log_settings(run.settings)
        return Begun(tracked_id=self._id)

    def send(self, points: list[Point]) -> None:
        """Send numbers, many in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, point.step) for point in points for name, value in point.values.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def finish(self, summary: Mapping[str, float], *, step: int, complete: bool) -> None:
        """Send the summary at the last step, and set the status: a run that was interrupted is KILLED."""
        if complete and summary:
            self.send([Point(step=step, values=summary)])
        self._client.set_terminated(self._id, status="FINISHED" if complete else "KILLED")

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:_MOST_CHARACTERS]) for name, value in settings.items()]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])


def _tracking_uri() -> str | None:
    """Address of the server or store, None for MLflow's own choice.

    mlflow-skinny comes without a database: unless a server is named, runs are files in ./mlruns then.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None and importlib.util.find_spec("sqlalchemy") is None:
        uri = Path("mlruns").absolute().as_uri()
    # Files are what some have, and MLflow refuses them otherwise. This process is the tracker's alone.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return uri
