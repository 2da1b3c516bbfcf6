"""The confusion matrix: a table where there are few classes, the pairs that occur where there are many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Classes up to which the whole table is kept: 8 MB.
_MOST_IN_A_TABLE = 1024
#: Pairs that wait before they are merged into those counted before.
_MERGED_AT = 1 << 20

Whole = npt.NDArray[np.int64]


class Confusion:
    """Counts of (true class, predicted class) over rows that come in parts.

    Memory: C x C numbers up to 1,024 classes, 16 bytes for each pair of classes that occurs beyond.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._table = np.zeros(num_classes**2 if num_classes <= _MOST_IN_A_TABLE else 0, np.int64)
        self._codes, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._waiting: list[Whole] = []

    def add(self, predicted_M: Whole, true_M: Whole) -> None:
        """Count these rows."""
        codes_M = true_M * self.num_classes + predicted_M
        if len(self._table):
            self._table += np.bincount(codes_M, minlength=len(self._table))
            return
        self._waiting.append(codes_M)
        if sum(map(len, self._waiting)) > _MERGED_AT:
            self._merge()

    def _merge(self) -> None:
        codes, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *self._waiting]), return_counts=True)
        together = np.concatenate([self._codes, codes])
        self._codes, places = np.unique(together, return_inverse=True)
        merged = np.zeros(len(self._codes), np.int64)
        np.add.at(merged, places, np.concatenate([self._counts, counts]))
        self._counts, self._waiting = merged, []

    def cells(self) -> tuple[Whole, Whole, Whole]:
        """True class, predicted class and count of every pair that occurs, in the order of the table."""
        if len(self._table):
            codes = np.flatnonzero(self._table)
            counts = self._table[codes]
        else:
            self._merge()
            codes, counts = self._codes, self._counts
        true, predicted = np.divmod(codes, self.num_classes)
        return true, predicted, counts

    def table(self) -> Whole:
        """(C, C) counts, a row for each true class. C x C numbers, however few pairs occur."""
        true, predicted, counts = self.cells()
        found = np.zeros((self.num_classes, self.num_classes), np.int64)
        found[true, predicted] = counts
        return found
