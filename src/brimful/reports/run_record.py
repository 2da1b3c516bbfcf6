"""Read a run's folder, while it runs and after: its record, its log, its evaluation."""

from __future__ import annotations

import itertools
import json
import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from brimful.core import atomic_files
from brimful.core.bench import is_begun_bench
from brimful.core.errors import DataError, did_you_mean, first_line, printable
from brimful.core.evaluation import Evaluation
from brimful.core.manifest import MANIFEST
from brimful.core.record_kinds import RUN, folder_of, kind_of
from brimful.core.records import Processes, Run, from_json

T = TypeVar("T")

#: Points of a curve; more are drawn as means.
_MOST_POINTS = 300
_EVENTS, _EVALUATION = "events.jsonl", "evaluation.json"
#: Records that are neither, by their kinds, in words; and what to give in their place.
_OTHERS = {
    "run": ("a run", "give the folder of the run"),
    "classification": ("a classification", "score its answers first: brimful evaluate ANSWERS --output FOLDER"),
    "bench": ("a bench", "give the folder of the bench"),
    "comparison": ("a comparison", "give what was compared; --html makes its page"),
}


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """A logged line of the training loop. None for what is not known, or no number.

    num_steps: those since the line before, which its rate is of. memory_bytes: held then.
    """

    step: int
    num_steps: int = 1
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_s: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoggedEvaluation:
    """Metrics of the evaluation rows after a step; those that are no numbers are left out."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run's folder. steps: thinned to what a curve can show. num_steps, num_epochs: that were planned, where known.
    last_epoch: reached by the last step. is_live: a process is at work on it.

    left_s: estimated by the last logged step. phases_s: seconds by phase of the process that finished the run, or that
    runs, then as of its last line of them. stopped: why it was, if that is its last line. incidents:
    events that a run should not have, by kind. evaluation: of the saved model; None while it runs, and without rows to
    evaluate on. processes: those since the run was begun or resumed; None for one alone.
    """

    run: Run
    steps: tuple[LoggedStep, ...] = ()
    evaluations: tuple[LoggedEvaluation, ...] = ()
    last_step: int = 0
    num_steps: int | None = None
    num_epochs: float | None = None
    last_epoch: float | None = None
    is_live: bool = False
    left_s: float | None = None
    stopped: str | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    incidents: Mapping[str, int] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    processes: Processes | None = None

    @property
    def samples_per_s(self) -> float | None:
        """Rows per second of a finished run; of another one rows over seconds of all its logged lines."""
        return self.run.samples_per_s if self.run.samples_per_s is not None else _rate(self.steps)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the saved model; of a run that has none those of its last evaluation."""
        if self.run.status == "finished" and self.run.metrics:
            return {name: value for name, value in self.run.metrics.items() if value is not None}
        return self.evaluations[-1].metrics if self.evaluations else {}


def read_record(given: Path) -> RunReport | Evaluation:
    """The record of a run's folder, or of an evaluation: a JSON file, or a folder with `evaluation.json`.

    Raises: DataError where there is none, or one that cannot be read.
    """
    path = folder_of(given.expanduser())
    if (path / RUN).is_file():
        try:
            return _run_report(path)
        except (ValueError, KeyError, TypeError) as error:
            said = f"it is no log of a run ({first_line(error)})"
            raise DataError(said, file=str(path / _EVENTS), hint="give the folder of a run") from error
    file = path / _EVALUATION if path.is_dir() else path
    if not file.is_file():
        said, hint = _without_record(path)
        raise DataError(said, file=str(given), hint=hint)
    if (other := _OTHERS.get(kind_of(file) or "")) is not None:
        raise DataError(f"it is the record of {other[0]} alone", file=str(given), hint=other[1])
    return _read(Evaluation, file)


def _without_record(path: Path) -> tuple[str, str]:
    """Say what is at `path`, where that is neither a run nor an evaluation, and what to give in its place."""
    shown = printable(path, 200)
    if not path.exists():
        near = sorted(each.name for each in path.parent.iterdir() if each.is_dir()) if path.parent.is_dir() else []
        meant = did_you_mean(path.name, near)
        return "there is no such folder", meant or "give the folder that --output of the command named"
    if is_begun_bench(path):
        return "it is a bench without rows: none was measured yet", "the same command goes on; raise its --budget-s"
    if (path.parent / RUN).is_file():
        return "it is no record, but a part of a run", f"did you mean {printable(path.parent, 200)}?"
    if (path / MANIFEST).is_file():
        return "it holds answers of classify", f"score them first: brimful evaluate {shown} --output FOLDER"
    return "there is no record of a run or of an evaluation", f"a run has {RUN}, an evaluation {_EVALUATION}"


def _run_report(folder: Path) -> RunReport:
    events = _events(folder / _EVENTS)
    steps = [event for event in events if event.get("kind") == "step"]
    kinds = Counter[str]()
    for event in events:
        kinds[str(event.get("kind"))] += int(event.get("count", 1))
    rare = (
        "skipped",
        "overflow",
        "out_of_memory",
        "checkpoint_failed",
        "best_lost",
        "events_lost",
        "tracker_failed",
        "process_lost",
        "resumed",
        "stopped",
    )
    evaluated = [event for event in events if event.get("kind") == "evaluated"]
    times = [event for event in events if event.get("kind") == "time"]
    begun = max((place for place, event in enumerate(events) if event.get("kind") == "resumed"), default=0)
    shared = [event for event in events[begun:] if event.get("kind") == "processes"]
    evaluation = folder / _EVALUATION
    run = _read(Run, folder / RUN)
    last_step = max((int(event.get("step", 0)) for event in events), default=0)
    return RunReport(
        run=run,
        steps=_thinned(_logged(events)),
        evaluations=tuple(LoggedEvaluation(step=e["step"], metrics=_finite(e["metrics"])) for e in evaluated),
        last_step=last_step,
        num_steps=steps[-1].get("num_steps") if steps else None,
        num_epochs=None if run.learning is None else run.learning.num_train_epochs,
        last_epoch=_epoch(steps[-1], last_step) if steps else None,
        is_live=run.status == "running" and atomic_files.is_locked(folder),
        left_s=_number(steps[-1].get("left_s")) if steps else None,
        phases_s=run.phases_s or (_finite(times[-1]["phases_s"]) if times else {}),
        stopped=_why_stopped(events[-1]) if events else None,
        incidents={kind: kinds[kind] for kind in rare if kinds[kind]},
        evaluation=_read(Evaluation, evaluation) if evaluation.is_file() else None,
        processes=_processes(shared[-1]) if run.processes is None and shared else run.processes,
    )


def _why_stopped(event: Mapping[str, Any]) -> str | None:
    if event.get("kind") != "stopped":
        return None
    with suppress(ValueError, TypeError):
        return f"by {signal.Signals(event['signal']).name}" if "signal" in event else printable(event["why"], 500)
    return "for a reason that its log does not tell"


def _epoch(line: Mapping[str, Any], last_step: int) -> float | None:
    """Epochs up to the last step, at the pace of a logged line: the steps after it have none."""
    epoch, step = _number(line.get("epoch")), _number(line.get("step"))
    return epoch * last_step / step if epoch is not None and step else None


def _processes(event: Mapping[str, Any]) -> Processes | None:
    with suppress(ValueError, KeyError, TypeError):
        return from_json(Processes, json.dumps(event))
    return None


def _read(kind: type[T], file: Path) -> T:
    try:
        return from_json(kind, file.read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = first_line(error) if isinstance(error, OSError | ValueError) else "it lacks what one has"
        said = f"it is no record of {'a run' if kind is Run else 'an evaluation'} ({why})"
        raise DataError(said, file=str(file), hint="give the folder of a run") from error


def _events(file: Path) -> list[dict[str, Any]]:
    """Whole lines: the last one may be under way. None of a run that has just begun."""
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


#: Numbers of a logged line, by their names in the log.
_NUMBERS = ("loss", "learning_rate", "grad_norm", "samples_per_s", "memory_bytes")


def _logged(events: Sequence[Mapping[str, Any]]) -> list[LoggedStep]:
    """Logged lines. Steps between the last one and the checkpoint that a run went on from have no line."""
    found, before = list[LoggedStep](), 0
    for event in events:
        if event.get("kind") == "step":
            step = int(event["step"])
            numbers = {name: _number(event.get(name)) for name in _NUMBERS}
            found.append(LoggedStep(step=step, num_steps=max(1, step - before), **numbers))
            before = step
        elif event.get("kind") == "resumed":
            before = int(event.get("step", before))
    return found


def _number(value: Any) -> float | None:
    """A finite number, also of a text such as `NaN`; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: _number(value) for name, value in metrics.items()}
    return {printable(name): value for name, value in numbers.items() if value is not None}


def _thinned(steps: Sequence[LoggedStep]) -> tuple[LoggedStep, ...]:
    """As many as a curve shows, each the mean of a few that follow one another."""
    if len(steps) <= _MOST_POINTS:
        return tuple(steps)
    edges = [len(steps) * place // _MOST_POINTS for place in range(_MOST_POINTS + 1)]
    return tuple(_mean(steps[start:stop]) for start, stop in itertools.pairwise(edges))


def _mean(steps: Sequence[LoggedStep]) -> LoggedStep:
    means: dict[str, float | None] = {}
    for name in _NUMBERS:
        known = [value for step in steps if (value := getattr(step, name)) is not None]
        means[name] = sum(known) / len(known) if known else None
    means["samples_per_s"] = _rate(steps)
    return LoggedStep(step=steps[-1].step, num_steps=sum(step.num_steps for step in steps), **means)


def _rate(steps: Sequence[LoggedStep]) -> float | None:
    """Rate of lines over their time together, where each step has as many rows: the harmonic mean of theirs."""
    known = [(step.num_steps, step.samples_per_s) for step in steps if step.samples_per_s]
    return sum(count for count, _ in known) / math.fsum(count / rate for count, rate in known) if known else None
