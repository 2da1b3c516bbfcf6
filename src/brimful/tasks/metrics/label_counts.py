"""Counts by label, from which accuracy, precision, recall, F1 and Matthews' correlation follow exactly."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Ratios = npt.NDArray[np.float64]


class LabelCounts:
    """Counts of each of C labels over rows that come in parts: true, predicted, and both.

    num_exact: rows of which every label is right.
    """

    def __init__(self, num_labels: int) -> None:
        self.hits_C, self.predicted_C, self.true_C = (np.zeros(num_labels, np.int64) for _ in range(3))
        self.num_rows = self.num_exact = 0

    def add_classes(self, predicted_M: npt.NDArray[np.int64], true_M: npt.NDArray[np.int64]) -> None:
        """Count rows with one label each, by its number."""
        num_labels, right_M = len(self.true_C), predicted_M == true_M
        self.predicted_C += np.bincount(predicted_M, minlength=num_labels)
        self.true_C += np.bincount(true_M, minlength=num_labels)
        self.hits_C += np.bincount(true_M[right_M], minlength=num_labels)
        self.num_rows += len(true_M)
        self.num_exact += int(right_M.sum())

    def add_sets(self, predicted_MC: npt.NDArray[np.bool_], true_MC: npt.NDArray[np.bool_]) -> None:
        """Count rows with any number of labels."""
        self.predicted_C += predicted_MC.sum(0)
        self.true_C += true_MC.sum(0)
        self.hits_C += (predicted_MC & true_MC).sum(0)
        self.num_rows += len(true_MC)
        self.num_exact += int((predicted_MC == true_MC).all(-1).sum())

    @property
    def present_C(self) -> npt.NDArray[np.bool_]:
        """(C,) labels that are true or predicted somewhere."""
        return (self.true_C > 0) | (self.predicted_C > 0)

    @property
    def precision_C(self) -> Ratios:
        """(C,) share of the predictions of each label that are right; 0 for a label never predicted."""
        return _ratio(self.hits_C, self.predicted_C)

    @property
    def recall_C(self) -> Ratios:
        """(C,) share of the rows of each label that were found; 0 for a label that no row has."""
        return _ratio(self.hits_C, self.true_C)

    @property
    def f1_C(self) -> Ratios:
        """(C,) F1 of each label; 0 for a label neither true nor predicted anywhere."""
        return _ratio(2 * self.hits_C, self.true_C + self.predicted_C)

    def accuracy(self) -> float:
        """Share of rows of which every label is right."""
        return self.num_exact / self.num_rows if self.num_rows else math.nan

    def label_accuracy(self) -> float:
        """Share of labels of rows that are right: 1 less the Hamming loss. For sets of labels."""
        wrong = int((self.true_C + self.predicted_C - 2 * self.hits_C).sum())
        total = self.num_rows * len(self.true_C)
        return (total - wrong) / total if total else math.nan

    def f1(self, average: Literal["macro", "micro", "weighted"], *, only_present: bool = False) -> float:
        """Return one F1. only_present: for macro, leave out labels neither true nor predicted anywhere."""
        if average == "micro":
            return float(_ratio(2 * self.hits_C.sum(), (self.true_C + self.predicted_C).sum()))
        if average == "weighted":
            return float(np.average(self.f1_C, weights=self.true_C)) if self.true_C.any() else 0.0
        found = self.f1_C[self.present_C] if only_present else self.f1_C
        return float(found.mean()) if len(found) else 0.0

    def matthews(self) -> float:
        """Matthews' correlation of classes, in whole numbers up to the last division; 0 for one class alone."""
        true, predicted, num_rows = self.true_C.tolist(), self.predicted_C.tolist(), self.num_rows
        both = int(self.hits_C.sum()) * num_rows - sum(t * p for t, p in zip(true, predicted, strict=True))
        spreads = [num_rows**2 - sum(count**2 for count in counts) for counts in (predicted, true)]
        return both / math.sqrt(float(spreads[0]) * float(spreads[1])) if all(spreads) else 0.0


def _ratio(part: npt.ArrayLike, whole: npt.ArrayLike) -> Ratios:
    """part / whole, 0 where whole is 0."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    found: Ratios = np.divide(part, whole, out=np.zeros(whole.shape), where=whole > 0)
    return found
