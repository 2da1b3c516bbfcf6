"""The record of an evaluation: metrics with intervals, scores by label, calibration, baselines, findings in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brimful.core.records import LabelSpace, Machine, Recipe

#: Metrics that are better when lower; of all others more is better.
LOWER_IS_BETTER = frozenset({"loss", "log_loss", "brier", "ece", "mse", "rmse", "mae"})
#: Names of baselines: always the same answer; a linear model of the words.
CONSTANT, LINEAR = "constant", "tfidf_linear"
#: The metric of each task by which models are compared in words.
MAIN_METRIC = {"single_label": "accuracy", "multi_label": "f1_micro", "regression": "r2"}
#: Metrics by their names for people.
METRIC_NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "accuracy_top5": "in the five likeliest",
    "f1_macro": "F1, mean of labels",
    "f1_weighted": "F1, weighted by rows",
    "f1_micro": "F1, of all labels",
    "precision_micro": "precision, of all labels",
    "recall_micro": "recall, of all labels",
    "label_accuracy": "label accuracy",
    "matthews_correlation": "Matthews' correlation",
    "auc_macro": "AUC, mean of labels",
    "log_loss": "log loss",
    "brier": "Brier score",
    "ece": "calibration error",
    "mse": "mean squared error",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
    "r2": "R squared",
    "pearson": "Pearson's correlation",
    "spearman": "Spearman's correlation",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auc": "AUC",
}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number and its interval. None: not defined on these rows, or not known."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """One label of many, or one output of a regression.

    support: rows that have the label. given: rows that the model gives it. auc: of this label against all others.
    """

    name: str
    support: int
    given: int
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Confused:
    """Rows whose label is `truth`, and which the model gives `label`."""

    truth: str
    label: str
    count: int


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Answers with a confidence from `low` to `high`: how sure they are on average, and how many are right.

    Of a regression: predictions from `low` to `high`, their mean, and the mean of the targets.
    """

    low: float
    high: float
    count: int
    predicted: float
    observed: float


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A simple model on the same rows.

    num_rows: rows that it learned from. train_s: seconds that it took.
    note: a limit that it ran under, such as a sample of the training rows. most_characters: that it read of a text,
    None where it read all texts whole.
    """

    name: str
    answer: str | None = None
    metrics: Mapping[str, float | None]
    num_rows: int
    train_s: float = 0.0
    note: str | None = None
    most_characters: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A row that the model is sure of, and wrong about by its label.

    row: its number in its file, from 1. text: its beginning, with its pair's. truth, label: names; of several labels
    the worst one; of a regression numbers. score, truth_score: probabilities of label and truth, None of a number.
    mislabelled: whether its label is likelier wrong than the answer.
    """

    row: int
    truth: str
    label: str
    file: str | None = None
    text: str | None = None
    score: float | None = None
    truth_score: float | None = None
    mislabelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Method of the intervals. level: share of repeated samples whose interval covers the true value."""

    method: str
    level: float = 0.95
    resamples: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A classifier on rows whose labels are known.

    data: what the rows are from. num_rows: rows that count. left_out: rows that do not, by reason.
    labels: what answers can be, in the model's order. confusion: truth and answer, for a single label; only pairs that
    occur. reliability: answers by confidence. score_rows: rows that AUC and rank correlation are of, if not all.
    findings: what stands out, in words, the gravest first. notes: what was decided about the data.
    predictions: file with the answer of each row, None if there is none. mistakes: the most confident ones.
    """

    model: str
    data: str
    command: str
    labels: LabelSpace
    num_rows: int
    metrics: Mapping[str, Metric]
    intervals: Intervals
    left_out: Mapping[str, int] = field(default_factory=dict)
    by_label: tuple[LabelScore, ...] = ()
    confusion: tuple[Confused, ...] = ()
    reliability: tuple[ReliabilityBin, ...] = ()
    score_rows: int | None = None
    baselines: tuple[Baseline, ...] = ()
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    predictions: str | None = None
    mistakes: tuple[Mistake, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    machine: Machine | None = None
    wall_s: float | None = None
    schema: int = 1
