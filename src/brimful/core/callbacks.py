"""Progress of a running loop, as calls. The loops call this protocol; terminals and trackers implement it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brimful.core.evaluation import Evaluation
from brimful.core.records import Recipe, Run
from brimful.core.units import share_text

_PACKAGE = __name__.split(".")[0]
#: Share of rows from which it is said that they are cut at a length that was asked for.
_MANY_CUT = 0.05


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a training run.

    step: applied optimizer steps, of `num_steps`. loss: mean over the batches since the last progress.
    tokens_per_s, samples_per_s: real tokens and samples, since the last progress. left_s: estimated, None at first.
    memory_bytes: held now, on a GPU by torch, elsewhere by the process; None where unknown.
    """

    step: int
    num_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    samples_per_s: float
    left_s: float | None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """Steps of a training run between two of its logged lines.

    done: of `num_steps`. loss: mean over the batches since the last progress, None where none is read yet. steps_per_s:
    since the run began. left_s: estimated by that.
    """

    done: int
    num_steps: int
    loss: float | None
    steps_per_s: float
    left_s: float


class Callbacks:
    """Hears everything and says nothing. Subclasses override what they care about; none may raise."""

    def stage(self, text: str) -> None:
        """A phase begins, e.g. `tokenising`."""

    def note(self, text: str) -> None:
        """Something inferred or decided that the user should see."""

    def warning(self, text: str) -> None:
        """Something lost, skipped or fallen back on."""

    def finding(self, text: str) -> None:
        """Something that stands out about a training without rows to evaluate on; with them, `evaluation` has it."""
        self.warning(text)

    def data(self, report: Mapping[str, Any]) -> None:
        """Summary of the data, before training."""

    def recipe(self, recipe: Recipe) -> None:
        """The recipe, before training."""

    def progress(self, progress: Progress) -> None:
        """Training went on."""

    def stepped(self, steps: StepsDone) -> None:
        """Training went on, and no progress was told for some seconds: a step may take long."""

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        """Of `total` rows, `done` are done, in the stage begun last.

        total: None for a stream, whose rows nobody has counted. share: how much of it is done then, from 0 to 1, such
        as bytes read of all bytes; None if that is not known either.
        """

    def working(self, text: str, share: float) -> None:
        """Work of many parts went on. share: how much of all is done, from 0 to 1."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """The saved model was evaluated, before the run is finished."""

    def finished(self, run: Run, folder: str) -> None:
        """The run ended and its model is saved."""


class FindingWarning(UserWarning):
    """Something that stands out about a training, such as answers that are no better than a constant, or rows cut."""


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, as of the line outside this package that called it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


class PythonWarnings(Callbacks):
    """Warnings as those of Python, for whoever gives no callbacks of their own; all else is not said."""

    _findings: tuple[str, ...] = ()

    def warning(self, text: str) -> None:
        warn_caller(text)

    def finding(self, text: str) -> None:
        self._findings = (*self._findings, text)

    def data(self, report: Mapping[str, Any]) -> None:
        cut, share = report.get("truncated_rows"), report.get("truncated_share") or 0.0
        if cut and (share >= _MANY_CUT or not report.get("max_length_given")):
            rows = f"{cut:,} training rows ({share_text(share)})"
            said = f"{rows} are longer than {report['max_length']:,} tokens, and cut (max_length)"
            warn_caller(said, FindingWarning)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._findings = evaluation.findings

    def finished(self, run: Run, folder: str) -> None:
        found, self._findings = self._findings, ()
        for text in found:  # once all is saved: a filter may make an error of a warning
            warn_caller(text, FindingWarning)
