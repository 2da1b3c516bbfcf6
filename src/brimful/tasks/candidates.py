"""Candidate labels of zero-shot classification: the same for every row, or each row's own.

Legend: N rows, P pairs of a row's text with one of its labels, G rows with M labels each, N1 is N + 1.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError, OptionError, encodes, printable
from brimful.tasks.ranking import Flags, Integers, offsets_of, offsets_within


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Candidate labels of N rows: those of row n are names[indices_P[offsets_N1[n] : offsets_N1[n + 1]]].

    names: each label's text, large_string. A row may have none; it has no pairs and no answer.
    """

    names: pa.Array
    indices_P: Integers
    offsets_N1: Integers

    @classmethod
    def of_every_row(cls, labels: Sequence[str], num_rows: int) -> Candidates:
        """The same labels for each of the rows."""
        return cls(
            names=pa.array(labels, pa.large_string()),
            indices_P=np.tile(np.arange(len(labels)), num_rows),
            offsets_N1=np.arange(num_rows + 1) * len(labels),
        )

    @classmethod
    def from_column(cls, column: pa.Array | pa.ChunkedArray) -> Candidates:
        """Each row's own labels: a column of lists of text, or of text in which commas part them.

        Null rows have no labels, null labels are none. Raises: DataError for a column that holds no text.
        """
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        lists = _lists_of_text(column)
        labels_P = lists.flatten()
        lengths_N = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        kept_P = labels_P.is_valid().to_numpy(zero_copy_only=False)
        encoded = labels_P.filter(pa.array(kept_P)).dictionary_encode()
        return cls(
            names=encoded.dictionary,
            indices_P=encoded.indices.to_numpy().astype(np.int64),
            offsets_N1=offsets_within(kept_P, offsets_of(lengths_N)),
        )

    def slice(self, start: int, num_rows: int) -> Candidates:
        """Of rows from `start` on."""
        offsets_N1 = self.offsets_N1[start : start + num_rows + 1]
        indices_P = self.indices_P[offsets_N1[0] : offsets_N1[-1]]
        return self._of(indices_P, offsets_N1 - offsets_N1[0])

    def take(self, rows: Integers) -> Candidates:
        """Of some of the rows, in this order; names that none of them has are left out."""
        lengths_N = np.diff(self.offsets_N1)[rows]
        offsets_N1 = offsets_of(lengths_N)
        places_P = np.arange(offsets_N1[-1]) + np.repeat(self.offsets_N1[:-1][rows] - offsets_N1[:-1], lengths_N)
        return self._of(self.indices_P[places_P], offsets_N1)

    def _of(self, indices_P: Integers, offsets_N1: Integers) -> Candidates:
        used, indices_P = np.unique(indices_P, return_inverse=True)
        return Candidates(names=self.names.take(pa.array(used)), indices_P=indices_P, offsets_N1=offsets_N1)

    def only(self, there_N: Flags) -> Candidates:
        """Those of these rows; the others have none."""
        kept_P = np.repeat(there_N, np.diff(self.offsets_N1))
        return replace(self, indices_P=self.indices_P[kept_P], offsets_N1=offsets_within(kept_P, self.offsets_N1))

    def faults(self) -> pa.Array:
        """(N,) large_string: what is wrong with a row whose labels have one twice, null elsewhere."""
        rows_P = np.repeat(np.arange(len(self.offsets_N1) - 1), np.diff(self.offsets_N1))
        found, times = np.unique(rows_P * max(1, len(self.names)) + self.indices_P, return_counts=True)
        wrong: list[str | None] = [None] * (len(self.offsets_N1) - 1)
        for row, index in np.stack(np.divmod(found[times > 1], max(1, len(self.names))), axis=1).tolist():
            wrong[row] = wrong[row] or _twice(self.names[index].as_py())
        return pa.array(wrong, pa.large_string())

    def blocks(self) -> Iterator[Integers]:
        """(G, M) pairs at a time: those of all rows with M labels, for each M from 1 on."""
        lengths_N = np.diff(self.offsets_N1)
        for num_labels in np.unique(lengths_N[lengths_N > 0]):
            yield self.offsets_N1[:-1][lengths_N == num_labels, None] + np.arange(num_labels)


def parse_labels(labels: str | Sequence[Any]) -> tuple[str, ...]:
    """Candidate labels from text in which commas part them (within quotation marks they do not), or as they are.

    Raises: OptionError if there are none, and for one that is blank, no text or cannot be encoded, or is there twice.
    """
    if isinstance(labels, str):
        labels = list(map(str.strip, next(csv.reader([labels], skipinitialspace=True), [])))
    wrong = next((each for each in labels if not (isinstance(each, str) and each.strip() and encodes(each))), None)
    if not any(labels) or wrong is not None:
        said = f"{printable(repr(wrong))} is no candidate label" if any(labels) else "there are no candidate labels"
        raise OptionError(said, hint="name them, separated by commas (sports,politics), or as a list of texts")
    twice = next((label for place, label in enumerate(labels) if label in labels[:place]), None)
    if twice is not None:
        raise OptionError(_twice(twice), hint="name each once")
    return tuple(labels)


def _twice(label: str) -> str:
    return f"the candidate label '{printable(label)}' is there twice"


def _lists_of_text(column: pa.Array) -> pa.Array:
    """Lists of large_string. Raises: DataError."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if _is_text(kind):
        parts = pc.split_pattern(column.cast(pa.large_string()), ",")
        return _without_blanks(_lists(parts, pc.utf8_trim_whitespace(parts.flatten())))
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(kind.value_type):
        return _without_blanks(column.cast(pa.large_list(pa.large_string())))
    raise DataError(
        f"the column of candidate labels holds {column.type}",
        hint="it must be text in which commas part the labels, or lists of text",
    )


def _is_text(kind: pa.DataType) -> bool:
    return any(is_it(kind) for is_it in (pa.types.is_null, pa.types.is_string, pa.types.is_large_string))


def _without_blanks(lists: pa.Array) -> pa.Array:
    """Blank labels null."""
    values_P = lists.flatten()
    return _lists(lists, pc.if_else(pc.equal(pc.utf8_trim_whitespace(values_P), ""), None, values_P))


def _lists(lists: pa.Array, values_P: pa.Array) -> pa.Array:
    """Lists as long as `lists`, of other values; empty where those are null."""
    lengths_N = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(lengths_N)), values_P)
