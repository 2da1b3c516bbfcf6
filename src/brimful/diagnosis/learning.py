"""Findings about how a training went, from its losses: still falling at the end, or overfitted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: Logged losses below which nothing is said, and their part that is the end.
_FEWEST_LOSSES, _PARTS = 6, 3
#: Fall of the training loss in its last part, and its level, each as a share of its beginning: more is unfinished.
_FALL, _LEVEL = 0.04, 0.3
#: Evaluation loss that is this many times the lowest one is overfitted; one that fell by this share still falls.
_ROSE, _FELL = 1.1, 0.02
#: Last training loss, as a share of the first, that leaves nothing to learn of these rows.
_LEARNED = 0.1

Losses = Sequence[tuple[int, float]]


def findings_of_learning(training: Losses, evaluation: Losses, *, picks_best: bool) -> list[str]:
    """training: step and mean loss since the logged step before. evaluation: step and loss of each evaluation.

    picks_best: the saved model is the best one by a metric, not the last one.
    """
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
        return None
    size = len(losses) // _PARTS
    first = statistics.fmean(losses[: max(1, len(losses) // 10)])
    middle, last = statistics.fmean(losses[-2 * size : -size]), statistics.fmean(losses[-size:])
    if first <= 0 or middle - last < _FALL * first or last < _LEVEL * first:
        return None
    if len(evaluation) > 1 and evaluation[-1][1] > (1 - _FELL) * evaluation[-2][1]:
        return None
    return (
        f"the loss was still falling when training ended ({middle:.3g} in the middle third, {last:.3g} in the last):"
        " try a higher --learning-rate or more epochs"
    )


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
