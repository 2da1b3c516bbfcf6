"""Metrics of each task, from logits and targets that come in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from brimful.tasks.metrics.errors import NumberErrors
from brimful.tasks.metrics.label_counts import LabelCounts

Metrics = dict[str, float]
#: Logits that are worked on at once.
_BLOCK = 1 << 22


class Accumulator(ABC):
    """Metrics of one task. Memory grows with the number of outputs, not with that of rows, but as `NumberErrors` says.

    names: of all metrics that there can be.
    """

    names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def add(self, logits_MC: np.ndarray, targets_M: np.ndarray) -> None:
        """Take the logits of some rows with their targets."""

    @abstractmethod
    def result(self) -> Metrics:
        """Metrics of all rows so far, by name; those that these rows do not define are left out."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about metrics that are estimates."""
        return ()


class ClassMetrics(Accumulator):
    """One of C classes: the likeliest is predicted."""

    names = ("accuracy", "f1_macro", "f1_weighted", "matthews_correlation")

    def __init__(self, num_outputs: int) -> None:
        self.counts = LabelCounts(num_outputs)

    def add(self, logits_MC: np.ndarray, targets_M: np.ndarray) -> None:
        self.counts.add_classes(logits_MC.argmax(-1), targets_M)

    def result(self) -> Metrics:
        counts = self.counts
        return {
            "accuracy": counts.accuracy(),
            "f1_macro": counts.f1("macro", only_present=True),
            "f1_weighted": counts.f1("weighted"),
            "matthews_correlation": counts.matthews(),
        }


class SetMetrics(Accumulator):
    """Any of C labels: those with a probability above one half are predicted."""

    names = ("f1_micro", "f1_macro", "accuracy", "label_accuracy")

    def __init__(self, num_outputs: int) -> None:
        self.counts = LabelCounts(num_outputs)

    def add(self, logits_MC: np.ndarray, targets_M: np.ndarray) -> None:
        for rows in blocks(len(logits_MC), logits_MC.shape[1]):
            self.counts.add_sets(logits_MC[rows] > 0, targets_M[rows] > 0.5)

    def result(self) -> Metrics:
        counts = self.counts
        return {
            "f1_micro": counts.f1("micro"),
            "f1_macro": counts.f1("macro"),
            "accuracy": counts.accuracy(),
            "label_accuracy": counts.label_accuracy(),
        }


class NumberMetrics(Accumulator):
    """C numbers. Correlations are given for a single one."""

    names = ("mse", "rmse", "mae", "r2", "pearson", "spearman")

    def __init__(self, num_outputs: int) -> None:
        self.errors, self._num_outputs = NumberErrors(num_outputs), num_outputs

    def add(self, logits_MC: np.ndarray, targets_M: np.ndarray) -> None:
        self.errors.add(logits_MC, targets_M)

    def result(self) -> Metrics:
        errors, mean_square = self.errors, self.errors.mean_square
        found = {"mse": mean_square, "rmse": float(np.sqrt(mean_square)), "mae": errors.mean_absolute}
        if self._num_outputs == 1 and errors.varied:
            found["r2"] = float(errors.r2_C()[0])
            found["pearson"] = float(errors.pearson_C()[0])
            found["spearman"] = float(errors.spearman_C()[0])
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        ranked, num_rows = self.errors.num_ranked, self.errors.num_rows
        if ranked == num_rows or self._num_outputs > 1:
            return ()
        return (f"spearman is that of a random sample of {ranked:,} of the {num_rows:,} rows",)


def blocks(num_rows: int, num_outputs: int) -> Iterator[slice]:
    """Rows in parts whose copies of logits are small, whatever the number of outputs."""
    step = max(1, _BLOCK // max(1, num_outputs))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
