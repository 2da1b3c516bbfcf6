"""Scores of a classifier in a stream: windows of logits in any order in, metrics with intervals out.

    scorer = make_scorer(space, targets_N, seed=42)
    scorer.add(rows_S, logits_SC)   # for each window
    scored = scorer.result()

Sums over groups of rows are kept (see `resampling`), and for metrics of ranks the scores of at most `MOST_KEPT` / C
rows, drawn at random where there are more: then the intervals of AUC are from these, and its value is of all rows. A
row whose logits are not finite has no answer and counts nowhere.

Legend: N rows, S rows of a window, C outputs, G groups, K sums of a group, R sets of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.core.evaluation import Confused, Intervals, LabelScore, Metric, ReliabilityBin
from brimful.core.records import LabelSpace
from brimful.tasks.label_rows import Targets
from brimful.tasks.ranking import finite_rows
from brimful.tasks.scoring.resampling import (
    METHOD,
    Ends,
    Metrics,
    dealt_groups,
    intervals,
    least_sum,
    num_groups,
    perfect_bound,
)

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: Resamples of a bootstrap.
RESAMPLES = 1000
#: Difference of resamples that is of the order in which rows are summed, as a share of the value.
_ROUNDING = 1e-12
#: Scores that are kept for metrics of ranks, in all.
MOST_KEPT = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of N rows. num_unanswered: rows without an answer, which are not among `num_rows`."""

    num_rows: int
    num_unanswered: int
    metrics: Mapping[str, Metric]
    intervals: Intervals
    by_label: tuple[LabelScore, ...] = ()
    confusion: tuple[Confused, ...] = ()
    reliability: tuple[ReliabilityBin, ...] = ()
    score_rows: int | None = None


class Scorer(ABC):
    """Scores of one pass over N rows. targets_N: as `tasks.task` has them.

    resamples: 0 for values without intervals. Each row is added once.
    """

    def __init__(self, space: LabelSpace, targets_N: Targets, *, seed: int, resamples: int = RESAMPLES) -> None:
        self.space, self._targets_N, self._seed, self._resamples = space, targets_N, seed, resamples
        groups = num_groups(len(targets_N), self._num_sums)
        self._group_N = dealt_groups(len(targets_N), groups, seed)
        self._sums_GK = np.zeros((groups, self._num_sums))
        self._num_rows = self._num_unanswered = 0
        most = max(1, MOST_KEPT // max(1, space.num_outputs))
        self._kept = None if len(targets_N) <= most else _chosen(len(targets_N), most, seed)
        self._rows_kept: list[Integers] = []
        self._scores_kept: list[Singles] = []

    @property
    @abstractmethod
    def _num_sums(self) -> int: ...

    @abstractmethod
    def add(self, rows_S: Integers, logits_SC: Singles) -> None:
        """Count these rows of the N, with the model's raw outputs."""

    @abstractmethod
    def result(self) -> Scored:
        """Everything about the rows that were added."""

    @abstractmethod
    def _metrics(self, sums_RK: Floats) -> Metrics: ...

    def values(self) -> dict[str, float]:
        """Metrics of all rows by name, without intervals and without those of ranks."""
        found = self._metrics(self._sums_GK.sum(0, keepdims=True))
        return {name: float(value[0]) for name, value in found.items() if value.ndim == 1}

    def _answered(self, rows_S: Integers, logits_SC: Singles) -> tuple[Integers, Singles]:
        """The rows that have an answer, counted."""
        answered_S = finite_rows(logits_SC)
        self._num_rows += int(answered_S.sum())
        self._num_unanswered += int((~answered_S).sum())
        return (rows_S, logits_SC) if answered_S.all() else (rows_S[answered_S], logits_SC[answered_S])

    def _keep_scores(self, rows_S: Integers, scores_SC: Singles) -> None:
        kept_S = slice(None) if self._kept is None else self._kept[rows_S]
        self._rows_kept.append(rows_S[kept_S])
        self._scores_kept.append(np.asarray(scores_SC[kept_S], np.float32))

    def _all_kept(self) -> tuple[Integers, Singles]:
        if not self._rows_kept:
            return np.zeros(0, np.int64), np.zeros((0, self.space.num_outputs), np.float32)
        return np.concatenate(self._rows_kept), np.concatenate(self._scores_kept)

    def _intervals(self) -> dict[str, Ends]:
        used_GK = self._sums_GK
        if self._num_unanswered and len(used_GK) == len(self._targets_N):  # rows that count nowhere are not drawn
            used_GK = used_GK[used_GK.any(axis=1)]
        if not len(used_GK):
            used_GK = np.zeros((1, self._num_sums))
        return intervals(used_GK, self._metrics, resamples=self._resamples, seed=self._seed)

    def _scored(self, metrics: Mapping[str, Metric], **parts: Any) -> Scored:
        num_kept = sum(map(len, self._rows_kept))
        return Scored(
            num_rows=self._num_rows,
            num_unanswered=self._num_unanswered,
            metrics=metrics,
            intervals=Intervals(method=METHOD, resamples=self._resamples, seed=self._seed),
            score_rows=None if not num_kept or num_kept == self._num_rows else num_kept,
            **parts,
        )


def _chosen(num_rows: int, most: int, seed: int) -> Flags:
    chosen = np.zeros(num_rows, np.bool_)
    chosen[np.random.default_rng([seed, 3]).choice(num_rows, most, replace=False)] = True
    return chosen


def as_metric(ends: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]) -> Metric:
    """Value, low and high end as a record; None for what is not finite."""
    value, low, high = (None if not np.isfinite(each) else float(each) for each in map(float, ends))  # type: ignore[arg-type]
    return Metric(value=value, low=low, high=high)


def bounded(metric: Metric, num_rows: float, *, is_share: bool = True, is_mean: bool = False) -> Metric:
    """A share whose resamples cannot differ from 0 or 1 gets the exact binomial bound of so many rows.

    is_mean: of what each row has, so that the bound is of rows that have something else, whatever the value. Other
    numbers whose resamples do not differ have no interval.
    """
    value = metric.value
    if value is None or metric.low is None or metric.high is None or not num_rows:
        return metric
    if max(value - metric.low, metric.high - value) > _ROUNDING * abs(value):
        return metric
    if not (is_share and (is_mean or value in (0, 1))):
        return Metric(value=value)
    bound = perfect_bound(num_rows)
    return Metric(value=value, low=value * bound, high=1 - (1 - value) * bound)


def bounded_mean(metric: Metric, right_C: Floats, num_rows_C: Floats) -> Metric:
    """A mean of shares that are each 0 or 1, which no resample shows to vary, gets exact bounds.

    right_C, num_rows_C: right answers, of so many rows. The low end is that of the shares of 1 with the others at 0,
    the high end that of the shares of 0 with the others at 1.
    """
    known_C = num_rows_C > 0
    all_C, none_C = known_C & (right_C == num_rows_C), known_C & (right_C == 0)
    count = int(known_C.sum())
    if metric.low is None or not count or (all_C | none_C).sum() < count:
        return metric
    low, high = least_sum(num_rows_C[all_C]), count - least_sum(num_rows_C[none_C])
    return Metric(value=metric.value, low=low / count, high=high / count)
