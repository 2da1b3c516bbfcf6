"""The process of one tracker: follow a run's log and send it on, until whoever trains closes this process's stdin.

It is alone with its tracker: what that prints goes to a file, what it changes dies with the process, and where it hangs
or fails nothing else does. If the training is killed, what it had logged is sent all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import os
import select
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from brimful.core.errors import printable
from brimful.integrations.trackers.run_log import (
    RunLog,
    lock_path,
    read_run,
    read_sent,
    sent_of,
    state_path,
    summary_of,
    tracked_run,
    write_sent,
)
from brimful.integrations.trackers.tracker import Tracker

#: Class of each tracker, in the module `to_<tracker>`.
_CLASSES = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow", "trackio": "Trackio"}
#: Seconds between looks at the log.
_LOOK_S = 0.5


def main(name: str, folder: Path) -> int:
    """Send the run in `folder` to the tracker called `name`; return the exit code of this process."""
    with contextlib.suppress(OSError):
        os.nice(10)  # what trains comes first
    path = state_path(folder, name)
    with _alone(path):
        try:
            _send(_tracker(name), folder, path)
        except BaseException as error:  # SystemExit as well: no tracker's way to fail may look like an end
            traceback.print_exc()
            why = printable(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            write_sent(path, dataclasses.replace(read_sent(path), failure=why))
            return 1
    return 0


def _send(tracker: Tracker, folder: Path, path: Path) -> None:
    sent = dataclasses.replace(sent_of(folder, path), failure=None)
    log, marks = RunLog(folder / "events.jsonl"), dict(sent.marks)
    waiting = list(log.new(marks)) if sent.tracked_id is not None else []
    if sent.summarised and not waiting:
        return  # all of it was sent
    begun = tracker.begin(tracked_run(folder, sent))
    sent = dataclasses.replace(sent, tracked_id=begun.tracked_id, url=begun.url, summarised=False)
    write_sent(path, sent)
    is_last = False
    while True:
        waiting += log.new(marks)
        if waiting:
            tracker.send(waiting)
            waiting, sent = [], dataclasses.replace(sent, marks=dict(marks))
            write_sent(path, sent)
        if is_last:
            break
        is_last = bool(select.select([sys.stdin.fileno()], [], [], _LOOK_S)[0])
    run = read_run(folder)
    complete = run.status == "finished"
    tracker.finish(summary_of(run) if complete else {}, step=log.last_step, complete=complete)
    write_sent(path, dataclasses.replace(sent, summarised=complete))


def _tracker(name: str) -> Tracker:
    made: Tracker = getattr(importlib.import_module(f"brimful.integrations.trackers.to_{name}"), _CLASSES[name])()
    return made


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process sends this run to this tracker, such as that of a training which was killed."""
    with lock_path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
