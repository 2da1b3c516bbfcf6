"""Targets of several labels a row, of which only the labels that rows have are kept.

Legend: N rows, S of them, C labels, E labels of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]
#: Numbers of a dense part that is looked at while targets are made.
_BLOCK = 1 << 22


class LabelRows:
    """(N, C) targets of 0 and 1: a million rows of three labels each take 20 MB, however many labels there are.

    Indexed by numbers or a mask of rows, or by one number, it gives these rows as an array of uint8.
    """

    ndim, dtype = 2, np.dtype(np.uint8)

    def __init__(self, offsets_N1: Integers, labels_E: npt.NDArray[np.int32], num_labels: int) -> None:
        """Those of row i are labels_E[offsets_N1[i] : offsets_N1[i + 1]], in order, each once."""
        self.offsets_N1, self.labels_E, self.num_labels = offsets_N1, labels_E, num_labels

    @classmethod
    def of_pairs(cls, rows_E: npt.NDArray[Any], labels_E: npt.NDArray[Any], shape: tuple[int, int]) -> LabelRows:
        """Targets in which these rows have these labels; a pair may come more than once."""
        num_rows, num_labels = shape
        keys = np.unique(np.asarray(rows_E, np.int64) * num_labels + labels_E)
        rows, labels = np.divmod(keys, max(1, num_labels))
        counts_N = np.bincount(rows, minlength=num_rows)
        return cls(np.concatenate([[0], np.cumsum(counts_N)]), labels.astype(np.int32), num_labels)

    @classmethod
    def of_blocks(cls, blocks: Iterable[npt.NDArray[Any]], num_labels: int) -> LabelRows:
        """Targets of rows of 0 and 1 that come part by part."""
        parts = ((block, *np.nonzero(block)) for block in blocks)
        of_parts = (cls.of_pairs(rows, labels, (len(block), num_labels)) for block, rows, labels in parts)
        return cls.joined(of_parts, num_labels)

    @classmethod
    def joined(cls, parts: Iterable[LabelRows], num_labels: int) -> LabelRows:
        """Targets of the rows of all parts, one behind the other."""
        counts, labels = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)]
        for part in parts:
            counts.append(np.diff(part.offsets_N1))
            labels.append(part.labels_E)
        return cls(np.cumsum(np.concatenate(counts)), np.concatenate(labels), num_labels)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.num_labels

    def __len__(self) -> int:
        return len(self.offsets_N1) - 1

    def __getitem__(self, rows_S: Any) -> Flags:
        if isinstance(rows_S, int | np.integer):
            row, flags_C = range(len(self))[rows_S], np.zeros(self.num_labels, np.uint8)
            flags_C[self.labels_E[self.offsets_N1[row] : self.offsets_N1[row + 1]]] = 1
            return flags_C
        some = self.take(rows_S)
        dense = np.zeros(some.shape, np.uint8)
        dense[some.owners(), some.labels_E] = 1
        return dense

    def take(self, rows_S: npt.NDArray[Any] | slice | Sequence[int]) -> LabelRows:
        """These rows as targets of their own; rows_S: numbers, a slice or a mask. Raises: IndexError."""
        if isinstance(rows_S, slice) or np.asarray(rows_S).dtype == np.bool_:
            numbers_S = np.arange(len(self))[rows_S]
        else:  # a batch's few, of as many as there may be
            numbers_S = np.asarray(rows_S, np.int64)
            if ((numbers_S < -len(self)) | (numbers_S >= len(self))).any():
                raise IndexError(f"there are {len(self)} rows")
            numbers_S = np.where(numbers_S < 0, numbers_S + len(self), numbers_S)
        starts_S = self.offsets_N1[numbers_S]
        counts_S = self.offsets_N1[numbers_S + 1] - starts_S
        offsets = np.concatenate([[0], np.cumsum(counts_S)])
        places = np.arange(offsets[-1]) + np.repeat(starts_S - offsets[:-1], counts_S)
        return LabelRows(offsets, self.labels_E[places], self.num_labels)

    def with_empty_row(self) -> LabelRows:
        """The same and, behind, a row without labels."""
        return LabelRows(np.append(self.offsets_N1, self.offsets_N1[-1]), self.labels_E, self.num_labels)

    def owners(self) -> Integers:
        """(E,) the row that each of `labels_E` is of."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets_N1))

    def renamed(self, outputs_C: npt.NDArray[Any], num_outputs: int) -> LabelRows:
        """The same rows, label i called outputs_C[i], and left out where that is below 0; two may become one."""
        outputs_E = outputs_C[self.labels_E]
        kept_E = outputs_E >= 0
        return LabelRows.of_pairs(self.owners()[kept_E], outputs_E[kept_E], (len(self), num_outputs))

    def counts(self, weights_N: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """(C,) rows that have each label; weights_N: what each row counts as, for fp64 sums."""
        weights_E = None if weights_N is None else np.repeat(weights_N.astype(np.float64), np.diff(self.offsets_N1))
        return np.bincount(self.labels_E, weights=weights_E, minlength=self.num_labels)

    def having(self) -> list[Integers]:
        """Of each label the rows that have it, in order."""
        owners_E = self.owners()[np.argsort(self.labels_E, kind="stable")]
        return np.split(owners_E, np.cumsum(self.counts())[:-1])


#: (N,) or (N, C) targets of one kind of task.
Targets = npt.NDArray[Any] | LabelRows


def taken(targets_N: Targets, rows_S: Any) -> Targets:
    """Some rows of targets, kept as they are; rows_S: numbers or a mask."""
    return targets_N.take(rows_S) if isinstance(targets_N, LabelRows) else np.asarray(targets_N[rows_S])


def dense(targets_N: Targets) -> npt.NDArray[Any]:
    """Targets as an array: for tasks that have no `LabelRows`, and for few rows."""
    return targets_N[:] if isinstance(targets_N, LabelRows) else targets_N


def label_counts(targets_NC: Targets, weights_N: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(C,) rows that have each label; weights_N: what each row counts as."""
    if isinstance(targets_NC, LabelRows):
        return np.asarray(targets_NC.counts(weights_N), np.float64)
    return np.asarray(weights_N.astype(np.float64) @ targets_NC)


def row_blocks(num_rows: int, num_labels: int) -> Iterable[slice]:
    """Rows in parts whose dense targets are small, whatever the number of labels."""
    step = max(1, _BLOCK // max(1, num_labels))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
