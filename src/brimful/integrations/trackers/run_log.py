"""A run's folder as trackers read it: its record, the lines of its log as they are written, and what was sent."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.core import atomic_files
from brimful.core.records import Run, from_json, to_json
from brimful.integrations.trackers.tracker import Point, Setting, TrackedRun

_OF_A_STEP = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "samples_per_s", "memory_bytes", "epoch")
#: Options of the command rather than of the run.
_NOT_SETTINGS = frozenset({"json", "quiet", "resume", "dry_run", "report", "report_to"})
#: Events that a run should not have: sent as their number so far.
_INCIDENTS = frozenset(
    {"skipped", "overflow", "out_of_memory", "checkpoint_failed", "best_lost", "events_lost", "resumed"}
)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """State of a run in one tracker, kept in the run's folder.

    run: the run that it is about. marks: highest step sent of `step` and `evaluated`, and the number of incidents sent,
    by kind. Values up to a mark are not sent again when a run is resumed: it repeats them. summarised: the end was
    sent. failure: the last one.
    """

    run: str = ""
    tracked_id: str | None = None
    url: str | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    summarised: bool = False
    failure: str | None = None


def state_path(folder: Path, tracker: str) -> Path:
    """File of what was sent of the run in `folder`."""
    return folder / "trackers" / f"{tracker}.json"


def lock_path(path: Path) -> Path:
    """File that the process which sends a run has locked, beside the file `path` of what it sent."""
    return path.with_suffix(".lock")


def is_sending(path: Path) -> bool:
    """Return True if a process sends a run, by its file of what was sent."""
    try:
        lock = lock_path(path).open("rb")
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read_sent(path: Path) -> Sent:
    """Return what was sent, nothing if there is no file, or none that can be read."""
    try:
        return from_json(Sent, path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Sent()


def sent_of(folder: Path, path: Path) -> Sent:
    """Return what was sent of the run that is in `folder` now: another one may have been there before."""
    run, sent = read_run(folder).run, read_sent(path)
    return sent if sent.run == run else Sent(run=run)


def write_sent(path: Path, sent: Sent) -> None:
    """Store what was sent."""
    atomic_files.write_bytes(path, to_json(sent).encode())


def read_run(folder: Path) -> Run:
    """Return the record of a run. Raises: OSError, ValueError, KeyError, TypeError."""
    return from_json(Run, (folder / "run.json").read_text("utf-8"))


def tracked_run(folder: Path, sent: Sent) -> TrackedRun:
    """Describe a run to a tracker."""
    run = read_run(folder)
    settings: dict[str, Setting] = {name: value for name, value in run.options.items() if _is_setting(value)}
    settings = {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}
    settings |= {"task": run.labels.task, "num_labels": run.labels.num_outputs, "run": run.run}
    if run.learning is not None:
        settings |= {name: v for name, v in dataclasses.asdict(run.learning).items() if _is_setting(v)}
        settings.pop("reason", None)
    settings |= {f"recipe/{lever.name}": lever.value for lever in run.recipe.levers}
    settings |= {f"versions/{name}": version for name, version in run.machine.versions.items()}
    device = {"machine/cpu": run.machine.cpu, "machine/gpus": ", ".join(gpu.name for gpu in run.machine.gpus) or None}
    settings |= {name: value for name, value in device.items() if value is not None}
    return TrackedRun(
        folder=folder, run=run.run, name=folder.name or run.run, settings=settings, tracked_id=sent.tracked_id
    )


def summary_of(run: Run) -> dict[str, float]:
    """Results of a finished run, by name."""
    values: dict[str, Any] = {f"final/{name}": value for name, value in run.metrics.items()}
    values |= {f"run/{name}": getattr(run, name) for name in ("steps", "skipped_steps", "train_s")}
    values |= {"run/samples_per_s": run.samples_per_s, "run/tokens_per_s": run.tokens_per_s}
    values["run/peak_bytes"] = run.peak_bytes.total
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


class RunLog:
    """The log of a run from its first line, as points to send. last_step: of the last line that was read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self.last_step = path, 0, 0
        self._incidents: dict[str, int] = {}

    def new(self, marks: dict[str, int]) -> Iterator[Point]:
        """Points of lines that are whole and were not read before, but for those up to `marks`, which are moved on."""
        for event in self._lines():
            kind, step = str(event.get("kind")), int(event.get("step", self.last_step))
            self.last_step = step
            if kind in ("step", "evaluated"):
                mark, values = step, _values(kind, event)
            elif kind in _INCIDENTS:
                mark = self._incidents[kind] = self._incidents.get(kind, 0) + int(event.get("count", 1))
                values = {f"incidents/{kind}": float(mark)}
            else:
                continue
            if mark > marks.get(kind, -1):
                marks[kind] = mark
                if values:
                    yield Point(step=step, values=values)

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # torn by a full disk
                continue
            if isinstance(event, dict):
                yield event


def _values(kind: str, event: Mapping[str, Any]) -> dict[str, float]:
    if kind == "evaluated":
        named = {f"eval/{name}": value for name, value in event.get("metrics", {}).items()}
    else:
        named = {f"train/{name}": event.get(name) for name in _OF_A_STEP}
    return {name: number for name, value in named.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    """A finite number, None for anything else: not every tracker takes the others."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_setting(value: object) -> bool:
    return isinstance(value, str | int | float | bool)
