"""Differences of metrics on the same rows: a paired bootstrap of the rows, and McNemar's exact test.

Both models answer every row, so rows are drawn together: what makes a row hard for both cancels in the difference, and
its interval is far narrower than those of the two metrics suggest.

Legend: N rows, L labels, O outputs, G groups of rows, K sums, R sets of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr

from brimful.comparison.answers import Common, as_flags, as_numbers
from brimful.core.comparison import Paired, PairedMetric
from brimful.core.records import TaskName
from brimful.tasks.scoring.resampling import Metrics, dealt_groups, intervals, num_groups

Floats = npt.NDArray[np.float64]
#: Resamples of an interval.
RESAMPLES = 2000
#: Labels up to which F1 is compared: sums grow with them.
_MOST_LABELS = 2000


def compare_answers(common: Common, task: TaskName, *, first: int, other: int, seed: int) -> Paired | None:
    """Compare two models' answers; None without rows in common. first, other: places of their folders."""
    if not common.truths:
        return None
    if task == "regression":
        return _regression(common, first, other, seed)
    names = sorted({name for values in (common.truths, common.first, common.other) for name in _names(values)})
    places = {name: place for place, name in enumerate(names)}
    truth, one, two = (as_flags(values, places) for values in (common.truths, common.first, common.other))
    right_one, right_two = (np.all(given == truth, axis=1).astype(np.float64) for given in (one, two))
    columns = [np.ones((len(truth), 1)), right_one[:, None], right_two[:, None]]
    has_labels = len(names) <= _MOST_LABELS
    if has_labels:
        columns += [truth, one, two, one * truth, two * truth]
    metrics = _label_metrics(len(names) if has_labels else 0, is_multi=task == "multi_label")
    only_one, only_two = int((right_one > right_two).sum()), int((right_two > right_one).sum())
    return Paired(
        first=first,
        other=other,
        num_rows=len(truth),
        metrics=_differences(np.concatenate(columns, axis=1), metrics, seed),
        only_first=only_one,
        only_other=only_two,
        p_value=mcnemar(only_one, only_two),
    )


def mcnemar(only_first: int, only_other: int) -> float:
    """P-value that two models are right equally often, by the rows that one alone has right (McNemar 1947, exact)."""
    return min(1.0, 2 * float(bdtr(min(only_first, only_other), only_first + only_other, 0.5)))


def _label_metrics(num_labels: int, *, is_multi: bool) -> Callable[[Floats], Metrics]:
    def metrics(sums_RK: Floats) -> Metrics:
        count, one, two = sums_RK[:, 0], sums_RK[:, 1], sums_RK[:, 2]
        found = {"accuracy": (two - one) / count}
        if num_labels:
            truth, first, other, true_first, true_other = np.split(sums_RK[:, 3:], 5, axis=1)
            found["f1_macro"] = _macro(other, truth, true_other) - _macro(first, truth, true_first)
            if is_multi:
                micro = [_f1(g.sum(1), truth.sum(1), t.sum(1)) for g, t in ((first, true_first), (other, true_other))]
                found = {"f1_micro": micro[1] - micro[0], **found}
        return found

    return metrics


def _macro(given_RL: Floats, truth_RL: Floats, both_RL: Floats) -> Floats:
    """Mean F1 over the labels that are true or given somewhere in a set of rows."""
    scores = _f1(given_RL, truth_RL, both_RL)
    occurs = given_RL + truth_RL > 0
    return np.where(occurs, scores, 0.0).sum(1) / np.maximum(occurs.sum(1), 1)  # type: ignore[no-any-return]


def _f1(given: Floats, truth: Floats, both: Floats) -> Floats:
    whole = given + truth
    return np.divide(2 * both, whole, out=np.zeros_like(both), where=whole > 0)  # type: ignore[no-any-return]


def _regression(common: Common, first: int, other: int, seed: int) -> Paired | None:
    truth, one, two = (as_numbers(values) for values in (common.truths, common.first, common.other))
    known = np.isfinite(np.concatenate([truth, one, two], axis=1)).all(1)
    truth, one, two = truth[known], one[known], two[known]
    if not len(truth):
        return None
    errors = [(one - truth) ** 2, (two - truth) ** 2, np.abs(one - truth), np.abs(two - truth)]
    columns = [np.ones((len(truth), 1)), *(error.mean(1, keepdims=True) for error in errors)]

    def metrics(sums_RK: Floats) -> Metrics:
        count, squares_one, squares_two, one, two = sums_RK.T
        roots = np.sqrt(squares_two / count) - np.sqrt(squares_one / count)
        return {"rmse": roots, "mae": (two - one) / count}

    found = _differences(np.concatenate(columns, axis=1), metrics, seed)
    return Paired(first=first, other=other, num_rows=len(truth), metrics=found)


def _differences(columns_NK: Floats, metrics: Callable[[Floats], Metrics], seed: int) -> tuple[PairedMetric, ...]:
    groups = num_groups(len(columns_NK), columns_NK.shape[1])
    dealt = dealt_groups(len(columns_NK), groups, seed)
    sums_GK = np.zeros((groups, columns_NK.shape[1]))
    np.add.at(sums_GK, dealt, columns_NK)
    found = intervals(sums_GK, metrics, resamples=RESAMPLES, seed=seed)
    return tuple(
        PairedMetric(name=name, difference=float(value), low=_known(low), high=_known(high))
        for name, (value, low, high) in found.items()
    )


def _known(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _names(values: tuple[Any, ...]) -> set[str]:
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return {name for row in rows for name in row if name is not None}
