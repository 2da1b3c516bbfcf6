"""Findings about how a training went, from its losses: diverged, still falling at the end, or overfitted."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from brimful.core.records import LabelSpace

#: Logged losses that are enough to say something by them, and their part that is the end.
_FEWEST_LOSSES, _PARTS = 6, 3
#: Fall of the training loss in its last part, and its level, each as a share of its beginning: more is unfinished.
_FALL, _LEVEL = 0.04, 0.3
#: Evaluation loss that is this many times the lowest one is overfitted; one that fell by this share still falls.
_ROSE, _FELL = 1.1, 0.02
#: Of few logged losses, by evaluations alone: fall of all that is no chance, as a share of the first loss, and the
#: share of it that is the last one's while the loss still falls.
_FELL_AT_ALL, _LAST_FALL = 0.01, 0.15
#: Last training loss, as a share of the first, that leaves nothing to learn of these rows.
_LEARNED = 0.1
#: Loss at the end, as a multiple of what answers by chance have, from which a training diverged: of enough losses, and
#: of few. One that is no less than this has learned nothing, and by a rate from this on it is the rate.
_DIVERGED, _DIVERGED_OF_FEW, _NOTHING, _HIGH_RATE = 1.5, 3.0, 0.95, 5e-3

Losses = Sequence[tuple[int, float]]
#: What a training came to: its rows learned, nothing learned by too high a rate, or neither.
Course = Literal["learned", "diverged", "open"]


def chance_loss(space: LabelSpace, *, scaled: bool, weighted: bool) -> float | None:
    """Return the mean loss of answers that tell nothing apart; None where it is not known.

    scaled: whether numbers have a spread of 1. weighted: whether labels have weights; of several a row, the loss is no
    mean then.
    """
    if space.task == "regression":
        return 1.0 if scaled else None
    if space.task == "multi_label" and weighted:
        return None
    return math.log(2 if space.task == "multi_label" else max(2, space.num_outputs))


def course_of(training: Losses, chance: float | None, rate: float | None) -> Course:
    """Return what `training` (as in `findings_of_learning`) came to. chance: of `chance_loss`. rate: the peak, of an
    optimizer whose steps are as long as it says; else None."""
    if chance is not None and (end := _end(training)) is not None:
        few = len(training) < _FEWEST_LOSSES
        too_high = rate is not None and rate >= _HIGH_RATE and not few
        if end > (_DIVERGED_OF_FEW if few else _DIVERGED) * chance or (too_high and end > _NOTHING * chance):
            return "diverged"
    return "learned" if has_learned(training) else "open"


def _end(training: Losses) -> float | None:
    """The median of the last losses: one may be of rows that are far off."""
    losses = [loss for _, loss in training]
    return statistics.median(losses[-max(1, len(losses) // _PARTS) :]) if losses else None


def findings_of_learning(
    training: Losses, evaluation: Losses, *, picks_best: bool, chance: float | None = None, rate: float | None = None
) -> list[str]:
    """training: step and mean loss since the logged step before. evaluation: step and loss of each evaluation.

    picks_best: the saved model is the best one by a metric, not the last one. chance, rate: as of `course_of`.
    """
    if course_of(training, chance, rate) == "diverged":
        than = "" if rate is None else f" than {rate:g}"
        return [
            f"nothing is learned: the training loss was {_end(training):.3g} at the end, and answers that tell nothing"
            f" apart have {chance:.3g}: try a lower --learning-rate{than}"
        ]
    overfitted = None if picks_best else _overfitted(training, evaluation)
    if overfitted is not None:
        return [overfitted]
    falling = _falling(training, evaluation)
    return [] if falling is None else [falling]


def has_learned(training: Losses) -> bool:
    """Return whether the loss of `training` (as in `findings_of_learning`) fell to a small part of its beginning."""
    losses = [loss for _, loss in training]
    if len(losses) < _FEWEST_LOSSES or losses[0] <= 0:
        return False
    return statistics.fmean(losses[-max(1, len(losses) // 10) :]) < _LEARNED * losses[0]


def _falling(training: Losses, evaluation: Losses) -> str | None:
    losses = [loss for _, loss in training]
    if len(losses) < _FEWEST_LOSSES:
        return _falling_by_evaluations(losses, [loss for _, loss in evaluation])
    size = len(losses) // _PARTS
    first = statistics.fmean(losses[: max(1, len(losses) // 10)])
    middle, last = statistics.fmean(losses[-2 * size : -size]), statistics.fmean(losses[-size:])
    if first <= 0 or middle - last < _FALL * first or last < _LEVEL * first:
        return None
    if len(evaluation) > 1 and evaluation[-1][1] > (1 - _FELL) * evaluation[-2][1]:
        return None
    return _unfinished("loss", f"{middle:.3g} in the middle third, {last:.3g} in the last")


def _falling_by_evaluations(training: Sequence[float], losses: Sequence[float]) -> str | None:
    """As `_falling`, of a run with too few logged losses. All evaluations are of the same rows: none has it easier."""
    if len(losses) < 2 or any(after >= before for before, after in itertools.pairwise(losses)):
        return None
    whole, last = losses[0] - losses[-1], losses[-2] - losses[-1]
    has_level = losses[-1] >= _LEVEL * max([losses[0], *training[:1]])
    if not has_level or whole < _FELL_AT_ALL * losses[0] or last < _LAST_FALL * whole:
        return None
    return _unfinished("evaluation loss", f"{losses[-2]:.4g}, then {losses[-1]:.4g}")


def _unfinished(what: str, figures: str) -> str:
    again = "try a higher --learning-rate or more epochs"
    return f"the {what} was still falling when training ended ({figures}): {again}"


def _overfitted(training: Losses, evaluation: Losses) -> str | None:
    if len(evaluation) < 2 or not training:
        return None
    best_step, best = min(evaluation, key=lambda each: each[1])
    step, last = evaluation[-1]
    if last < _ROSE * best or best <= 0:
        return None
    return (
        f"overfitted: the evaluation loss was {best:.3g} after step {best_step:,} and {last:.3g} after step {step:,},"
        f" while the training loss fell to {training[-1][1]:.3g}: train for fewer epochs, or save the best model"
        " (--metric-for-best-model loss)"
    )
