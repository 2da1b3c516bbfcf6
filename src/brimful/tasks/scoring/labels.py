"""Scores of labels: one of several a row, or any number of them.

Legend: N rows, S rows of a window, C labels, G groups, K sums of a group, R sets of rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.core.evaluation import Confused, LabelScore, Metric, ReliabilityBin
from brimful.tasks.answers import DEFAULT_THRESHOLD, sigmoid, softmax
from brimful.tasks.metrics.confusion import Confusion
from brimful.tasks.metrics.ranking_scores import RankingScores, log_odds
from brimful.tasks.scoring.ranks import Aucs, one_vs_rest_aucs
from brimful.tasks.scoring.resampling import Ends, Metrics
from brimful.tasks.scoring.scorers import (
    Flags,
    Floats,
    Integers,
    Scored,
    Scorer,
    Singles,
    as_metric,
    bounded,
    bounded_mean,
)

#: Bins of confidence, of equal width from 0 to 1.
BINS = 15
#: Labels from which the share of rows whose label is among the five likeliest is worth a metric.
_MANY, _FEW = 10, 5

#: Metrics that are shares, or means of shares.
_SHARES = ("accuracy", "balanced_accuracy", "f1_macro", "f1_weighted", "accuracy_top5")


class _Bins:
    """Places of reliability bins among the sums: count, confidence and right answers of each."""

    def __init__(self, start: int) -> None:
        self.start, self.stop = start, start + 3 * BINS

    def add(self, sums_GK: Floats, groups: Integers, confidences: npt.NDArray[np.floating], right: Flags) -> None:
        places = np.minimum((confidences * BINS).astype(np.int64), BINS - 1)
        added: tuple[Any, ...] = (1.0, confidences, right)
        for which, values in enumerate(added):
            np.add.at(sums_GK, (groups, self.start + which * BINS + places), values)

    def expected_error(self, sums_RK: Floats) -> Floats:
        """(R,) mean distance of confidence and share of right answers, over all that is in the bins."""
        count, confidence, right = self._parts(sums_RK)
        return np.asarray(divided(np.abs(confidence - right).sum(-1), count.sum(-1)))

    def found(self, sums_K: Floats) -> tuple[ReliabilityBin, ...]:
        count, confidence, right = self._parts(sums_K)
        return tuple(
            ReliabilityBin(
                low=float(i / BINS),
                high=float((i + 1) / BINS),
                count=int(count[i]),
                predicted=float(confidence[i] / count[i]),
                observed=float(right[i] / count[i]),
            )
            for i in np.flatnonzero(count)
        )

    def _parts(self, sums: Floats) -> tuple[Floats, Floats, Floats]:
        count, confidence, right = np.split(sums[..., self.start : self.stop], 3, axis=-1)
        return count, confidence, right


def divided(above: npt.ArrayLike, below: npt.ArrayLike) -> Floats:
    """NaN for something over nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(below) == 0, np.nan, np.asarray(above) / np.asarray(below))


def _mean_defined(values_RC: Floats) -> Floats:
    defined = np.isfinite(values_RC)
    return divided(np.where(defined, values_RC, 0).sum(-1), defined.sum(-1))


def _of_labels(tp: Floats, truth: Floats, given: Floats) -> dict[str, Floats]:
    """(R, C) precision, recall and F1. NaN of a label that is neither given nor true; a missed one has F1 0."""
    return {
        "precision": divided(tp, given),
        "recall": divided(tp, truth),
        "f1": divided(2 * tp, truth + given),
    }


class _LabelScorer(Scorer):
    """Sums that single and several labels share: right answers, rows and answers of each label, then others."""

    _OTHERS: tuple[str, ...]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # Of all rows, where the scores of some are kept for the intervals.
        self._areas = None if self._kept is None else RankingScores(self.space.num_outputs)

    @abstractmethod
    def _is_label(self, rows_S: Integers) -> Flags:
        """(S, C) the labels that rows have."""

    def _keep(self, rows_S: Integers, scores_SC: Singles, is_label_SC: Flags) -> None:
        self._keep_scores(rows_S, scores_SC)
        if self._areas is not None:
            self._areas.add(scores_SC, is_label_SC)

    def _aucs(self) -> Aucs | None:
        """Areas of all rows; None where no scores are known."""
        rows, scores = self._all_kept()
        if not len(rows):
            return None
        values_C = None if self._areas is None else self._areas.areas()[0]
        return one_vs_rest_aucs(scores, self._is_label(rows), values_C=values_C, num_rows=self._num_rows)

    @property
    def _num_sums(self) -> int:
        return 3 * self.space.num_outputs + len(self._OTHERS) + 3 * BINS

    @property
    def _bins(self) -> _Bins:
        return _Bins(3 * self.space.num_outputs + len(self._OTHERS))

    def _counts(self, sums_RK: Floats) -> tuple[Floats, Floats, Floats]:
        tp, truth, given = np.split(sums_RK[..., : 3 * self.space.num_outputs], 3, axis=-1)
        return tp, truth, given

    def _other(self, sums_RK: Floats, name: str) -> Floats:
        return np.asarray(sums_RK[..., 3 * self.space.num_outputs + self._OTHERS.index(name)])

    def _count(self, rows_S: Integers, name: str, values_S: npt.ArrayLike) -> None:
        place = 3 * self.space.num_outputs + self._OTHERS.index(name)
        np.add.at(self._sums_GK[:, place], self._group_N[rows_S], values_S)

    def _by_label(self, found: Mapping[str, Ends], aucs_C3: Floats | None) -> tuple[LabelScore, ...]:
        total = self._sums_GK.sum(0)
        _, truth, given = self._counts(total)
        scores = []
        for i, name in enumerate(self.space.names):
            below = {"precision": given[i], "recall": truth[i], "f1": truth[i]}
            metrics = {
                metric: bounded(as_metric((ends[0][i], ends[1][i], ends[2][i])), below[metric])
                for metric, ends in found.items()
                if metric in below
            }
            if aucs_C3 is not None:
                value, low, high = aucs_C3[i]
                metrics["auc"] = as_metric((value, low, high))
            scores.append(LabelScore(name=name, support=int(truth[i]), given=int(given[i]), metrics=metrics))
        return tuple(scores)


class SingleLabelScorer(_LabelScorer):
    """Scores of one label a row. targets_N: (N,) int64."""

    _OTHERS = ("rows", "scored", "log_loss", "brier", "top5")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._confused = Confusion(self.space.num_outputs)

    def add(self, rows_S: Integers, logits_SC: Singles) -> None:
        rows_S, logits_SC = self._answered(rows_S, logits_SC)
        scores_SC, targets_S = softmax(logits_SC), self._targets_N[rows_S].astype(np.int64)
        self._add_answers(rows_S, logits_SC.argmax(-1), scores_SC.max(-1, initial=0))
        self._add_scores(rows_S, logits_SC, scores_SC, targets_S)
        self._keep(rows_S, log_odds(logits_SC).astype(np.float32), self._is_label(rows_S))

    def add_answers(self, rows_S: Integers, given_S: Integers, confidences_S: Floats | None) -> None:
        """Count rows of which the label and its probability are known, and no other score."""
        self._num_rows += len(rows_S)
        self._add_answers(rows_S, given_S, confidences_S)

    def result(self) -> Scored:
        found, aucs = self._intervals(), self._aucs()
        names = ("accuracy", "balanced_accuracy", "f1_macro", "f1_weighted", "matthews_correlation", "accuracy_top5")
        metrics = {name: as_metric(found[name]) for name in (*names, "log_loss", "brier") if name in found}
        tp, truth, _ = self._counts(self._sums_GK.sum(0))
        balanced = bounded_mean(metrics["balanced_accuracy"], tp, truth)
        metrics = {name: bounded(metric, self._num_rows, is_share=name in _SHARES) for name, metric in metrics.items()}
        metrics["balanced_accuracy"] = balanced
        metrics["ece"] = Metric(value=as_metric(found["ece"]).value)  # its resamples lie too high: no interval
        if aucs is not None:
            metrics["auc_macro"] = as_metric(aucs.macro)
        return self._scored(
            metrics,
            by_label=self._by_label(found, None if aucs is None else aucs.by_label),
            confusion=self._confusion(),
            reliability=self._bins.found(self._sums_GK.sum(0)),
        )

    def _add_answers(self, rows_S: Integers, given_S: Integers, confidences_S: npt.ArrayLike | None) -> None:
        targets_S, groups_S, labels = self._targets_N[rows_S].astype(np.int64), self._group_N[rows_S], self._num_labels
        right_S = given_S == targets_S
        np.add.at(self._sums_GK, (groups_S[right_S], targets_S[right_S]), 1.0)
        np.add.at(self._sums_GK, (groups_S, labels + targets_S), 1.0)
        np.add.at(self._sums_GK, (groups_S, 2 * labels + given_S), 1.0)
        self._count(rows_S, "rows", 1.0)
        if confidences_S is not None:
            self._bins.add(self._sums_GK, groups_S, np.asarray(confidences_S), right_S)
        self._confused.add(given_S, targets_S)

    def _is_label(self, rows_S: Integers) -> Flags:
        return np.asarray(self._targets_N[rows_S][:, None] == np.arange(self.space.num_outputs))

    @property
    def _num_labels(self) -> int:
        return self.space.num_outputs

    def _add_scores(self, rows_S: Integers, logits_SC: Singles, scores_SC: Singles, targets_S: Integers) -> None:
        exact_SC = logits_SC.astype(np.float64) - logits_SC.max(-1, keepdims=True, initial=0)
        true_S = np.take_along_axis(exact_SC, targets_S[:, None], 1)[:, 0]
        self._count(rows_S, "scored", 1.0)
        self._count(rows_S, "log_loss", np.log(np.exp(exact_SC).sum(-1)) - true_S)
        of_truth_S = np.take_along_axis(scores_SC, targets_S[:, None], 1)[:, 0].astype(np.float64)
        self._count(rows_S, "brier", np.square(scores_SC, dtype=np.float64).sum(-1) - 2 * of_truth_S + 1)
        if self._num_labels >= _MANY:
            self._count(rows_S, "top5", (scores_SC > of_truth_S[:, None].astype(np.float32)).sum(-1) < _FEW)

    def _metrics(self, sums_RK: Floats) -> Metrics:
        tp, truth, given = self._counts(sums_RK)
        rows, scored = self._other(sums_RK, "rows"), self._other(sums_RK, "scored")
        labels = _of_labels(tp, truth, given)
        right, together = tp.sum(-1), (truth * given).sum(-1)
        spread = (rows**2 - (truth**2).sum(-1)) * (rows**2 - (given**2).sum(-1))
        correlation = np.where(spread > 0, divided(right * rows - together, np.sqrt(np.maximum(spread, 0))), 0.0)
        many = {"accuracy_top5": divided(self._other(sums_RK, "top5"), scored)} if self._num_labels >= _MANY else {}
        return {
            "accuracy": divided(right, rows),
            "balanced_accuracy": _mean_defined(labels["recall"]),
            "f1_macro": _mean_defined(labels["f1"]),
            "f1_weighted": divided(np.where(truth > 0, labels["f1"] * truth, 0).sum(-1), rows),
            "matthews_correlation": np.where(rows > 0, correlation, np.nan),
            **many,
            "log_loss": divided(self._other(sums_RK, "log_loss"), scored),
            "brier": divided(self._other(sums_RK, "brier"), scored),
            "ece": self._bins.expected_error(sums_RK),
            **labels,
        }

    def _confusion(self) -> tuple[Confused, ...]:
        names, cells = self.space.names, (each.tolist() for each in self._confused.cells())
        return tuple(
            Confused(truth=names[truth], label=names[label], count=count)
            for truth, label, count in zip(*cells, strict=True)
        )


class MultiLabelScorer(_LabelScorer):
    """Scores of any number of labels a row. targets_N: (N, C) of 0 and 1. A label is given from `threshold` on."""

    _OTHERS = ("rows", "scored", "log_loss", "brier", "all_right", "right")

    def __init__(self, *given: Any, threshold: float = DEFAULT_THRESHOLD, **named: Any) -> None:
        super().__init__(*given, **named)
        self._threshold = threshold

    def add(self, rows_S: Integers, logits_SC: Singles) -> None:
        rows_S, logits_SC = self._answered(rows_S, logits_SC)
        scores_SC, is_true_SC = sigmoid(logits_SC), self._is_label(rows_S)
        self._add_answers(rows_S, scores_SC >= self._threshold)
        exact_SC = logits_SC.astype(np.float64)
        losses_SC = np.logaddexp(0, exact_SC) - exact_SC * is_true_SC
        self._count(rows_S, "scored", 1.0)
        self._count(rows_S, "log_loss", losses_SC.mean(-1))
        self._count(rows_S, "brier", np.square(scores_SC - is_true_SC, dtype=np.float64).mean(-1))
        groups = np.repeat(self._group_N[rows_S], scores_SC.shape[1])
        self._bins.add(self._sums_GK, groups, scores_SC.ravel(), is_true_SC.ravel())
        self._keep(rows_S, logits_SC, is_true_SC)

    def add_answers(self, rows_S: Integers, given_SC: Flags) -> None:
        """Count rows of which the labels are known, and no scores."""
        self._num_rows += len(rows_S)
        self._add_answers(rows_S, given_SC)

    def result(self) -> Scored:
        found, aucs = self._intervals(), self._aucs()
        names = ("f1_micro", "f1_macro", "precision_micro", "recall_micro", "accuracy", "label_accuracy")
        metrics = {
            name: bounded(
                as_metric(found[name]), self._num_rows, is_share=name in names, is_mean=name == "label_accuracy"
            )
            for name in (*names, "log_loss", "brier")
        }
        metrics["ece"] = Metric(value=as_metric(found["ece"]).value)  # its resamples lie too high: no interval
        if aucs is not None:
            metrics["auc_macro"] = as_metric(aucs.macro)
        return self._scored(
            metrics,
            by_label=self._by_label(found, None if aucs is None else aucs.by_label),
            reliability=self._bins.found(self._sums_GK.sum(0)),
        )

    def _is_label(self, rows_S: Integers) -> Flags:
        return np.asarray(self._targets_N[rows_S] > 0.5)

    def _add_answers(self, rows_S: Integers, given_SC: Flags) -> None:
        is_true_SC = self._is_label(rows_S)
        groups_S, labels = self._group_N[rows_S], self.space.num_outputs
        for which, flags_SC in enumerate((is_true_SC & given_SC, is_true_SC, given_SC)):
            np.add.at(self._sums_GK[:, which * labels : (which + 1) * labels], groups_S, flags_SC)
        right_SC = is_true_SC == given_SC
        self._count(rows_S, "rows", 1.0)
        self._count(rows_S, "all_right", right_SC.all(-1))
        self._count(rows_S, "right", right_SC.mean(-1))

    def _metrics(self, sums_RK: Floats) -> Metrics:
        tp, truth, given = self._counts(sums_RK)
        rows, scored = self._other(sums_RK, "rows"), self._other(sums_RK, "scored")
        labels = _of_labels(tp, truth, given)
        right, either = tp.sum(-1), truth.sum(-1) + given.sum(-1)
        return {
            "f1_micro": np.where(rows > 0, np.nan_to_num(divided(2 * right, either)), np.nan),
            "f1_macro": np.where(rows > 0, np.nan_to_num(labels["f1"]).mean(-1), np.nan),
            "precision_micro": divided(right, given.sum(-1)),
            "recall_micro": divided(right, truth.sum(-1)),
            "accuracy": divided(self._other(sums_RK, "all_right"), rows),
            "label_accuracy": divided(self._other(sums_RK, "right"), rows),
            "log_loss": divided(self._other(sums_RK, "log_loss"), scored),
            "brier": divided(self._other(sums_RK, "brier"), scored),
            "ece": self._bins.expected_error(sums_RK),
            **labels,
        }
