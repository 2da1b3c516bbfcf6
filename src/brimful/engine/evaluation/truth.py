"""True labels of the rows to evaluate on, as targets of a model whose labels are given.

Legend: N rows with a text and a label, C outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError, OptionError, listed, printable
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.records import LabelSpace
from brimful.core.units import count_text
from brimful.data.labels.label_columns import LabelColumn, no_label_text
from brimful.data.labels.label_sets import known_sets, num_bits
from brimful.data.readers.rows import Rows
from brimful.models.hub.label_matching import Matched, match_labels, unknown_hint

UNLABELLED, UNKNOWN, UNREADABLE = "without a label", "with a label unknown to the model", "without text"
#: Unknown labels that are named in an error.
_NAMED = 5

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Targets of the rows that have one.

    rows: (N,) numbers of the rows. targets_N: as `tasks.task` has them, of `space`. outputs: the model's that are
    evaluated, where these are not all. left_out: rows that are not among the N, by reason.
    notes, doubts: decisions about labels, and such as can be wrong.
    """

    space: LabelSpace
    rows: Integers
    targets_N: npt.NDArray[Any]
    outputs: Integers | None = None
    left_out: Mapping[str, int]
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def drawn(self, count: int | None, seed: int) -> Truth:
        """`count` of the rows, drawn by `seed`, in order, with a note of it; all where there are no more."""
        if count is None or count >= len(self.rows):
            return self
        chosen_n = np.sort(np.random.default_rng(seed).permutation(len(self.rows))[:count])
        note = f"{count:,} of {len(self.rows):,} rows are used, drawn at random (--limit)"
        rows, targets_n = self.rows[chosen_n], self.targets_N[chosen_n]
        return replace(self, rows=rows, targets_N=targets_n, notes=(*self.notes, note))


def read_truth(
    rows: Rows, labels: Sequence[str], space: LabelSpace, options: EvaluateOptions, has_text_R: npt.NDArray[np.bool_],
    *, absent: str = UNREADABLE,
) -> Truth:  # fmt: skip
    """The labels in the columns `labels` as targets of a model with this label space.

    has_text_R: rows that can count at all. absent: how the others are called.
    Raises: DataError for labels that the model does not have, and where no row is left; OptionError for --label-map.
    """
    reader = _Reader(rows, space, options)
    columns = [LabelColumn(rows=rows, name=name) for name in labels]
    targets: npt.NDArray[Any]
    if space.task == "regression":
        targets, there = reader.numbers(columns)
    elif space.task == "single_label":
        targets, there = reader.classes(columns)
    else:
        targets, there = reader.sets(columns)
    known = there & ~reader.unknown_R
    kept = np.flatnonzero(known & has_text_R)
    counts = {
        absent: int((~has_text_R).sum()),
        UNLABELLED: int((has_text_R & ~there).sum()),
        UNKNOWN: int((has_text_R & there & reader.unknown_R).sum()),
    }
    left_out = {reason: count for reason, count in counts.items() if count}
    if not len(kept):
        why = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        raise DataError(f"no row can be evaluated: {why}", file=rows.name, hint="is --label-column the right one?")
    return Truth(
        space=reader.space,
        rows=kept,
        targets_N=targets[kept],
        outputs=reader.outputs,
        left_out=left_out,
        notes=tuple(reader.notes),
        doubts=tuple(reader.doubts),
    )


class _Reader:
    """Targets of all R rows, and which have one. What was decided stands in its fields."""

    def __init__(self, rows: Rows, space: LabelSpace, options: EvaluateOptions) -> None:
        self._rows, self._options, self.space = rows, options, space
        self.unknown_R = np.zeros(rows.num_rows, np.bool_)
        self.outputs: Integers | None = None
        self.notes: list[str] = []
        self.doubts: list[str] = []

    def numbers(self, columns: Sequence[LabelColumn]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """(R, C) numbers, the columns in the order of outputs of the same names, else as they are given."""
        names = [column.name for column in columns]
        if len(names) != self.space.num_outputs:
            raise DataError(
                f"the model has {self.space.num_outputs} outputs, and {len(names)} label columns are read",
                file=self._rows.name,
                value=", ".join(names),
                hint="name one column for each output: --label-column a,b,c",
            )
        order = range(len(names))
        if set(names) == set(self.space.names):
            order = [names.index(name) for name in self.space.names]  # type: ignore[assignment]
        numbers = np.stack([columns[i].numbers(gaps=True) for i in order], axis=1)
        self.doubts += [doubt for column in columns for doubt in column.number_doubts()]
        return numbers, np.asarray(np.isfinite(numbers).all(1))

    def classes(self, columns: Sequence[LabelColumn]) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """(R,) the class of each row."""
        if len(columns) != 1:
            raise OptionError(
                f"--label-column names {len(columns)} columns, and the model gives one label", hint="name one column"
            )
        (column,) = columns
        if column.holds_lists:
            raise column.error("holds lists, and the model gives one label")
        labels = column.distinct.to_pylist()
        matched = self._matched(labels, column)
        places = pc.index_in(column.texts, column.distinct)
        there_R = places.is_valid().to_numpy()
        outputs = np.array([matched.outputs.get(label, -1) for label in labels] + [-1], np.int64)
        targets_R = outputs[places.fill_null(len(labels)).to_numpy()]
        self.unknown_R = there_R & (targets_R < 0)
        return targets_R, there_R

    def sets(self, columns: Sequence[LabelColumn]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """(R, C) with 1 for each label of a row."""
        if len(columns) > 1 or (self.space.num_outputs == 1 and _are_flags(columns[0])):
            return self._flags(columns)
        (column,) = columns
        if column.holds_lists:
            bits = column.bits(self.space.num_outputs)
            there_R = column.values.is_valid().to_numpy()
            if bits is not None:
                return bits.astype(np.float32), there_R
            labels = pc.unique(column.elements).drop_null().to_pylist()
            owners, elements = column.owners, column.elements
        else:
            there_R = column.values.is_valid().to_numpy()
            if num_without := int(column.texts.null_count) - int((~there_R).sum()):
                self.notes.append(no_label_text(num_without))
            values = column.distinct.to_pylist()
            known = {*self.space.names, *(name.casefold() for name in self.space.names)}
            sets = known_sets(values, known)
            if num_bits(sets) == self.space.num_outputs > 1:
                rows_of = np.array([[float(bit) for bit in bits] for bits in sets.values()], np.float32)
                return _spread(rows_of, column), there_R
            labels = list(dict.fromkeys(label for several in sets.values() for label in several if label))
            owners, elements = _parts_of(column, sets)
        matched = self._matched(labels, column)
        outputs = np.array([matched.outputs.get(label, -1) for label in labels] + [-1], np.int64)
        of_elements = outputs[pc.index_in(elements, pa.array(labels, pa.large_string())).fill_null(-1).to_numpy()]
        targets_RC = np.zeros((self._rows.num_rows, self.space.num_outputs), np.float32)
        known_E = of_elements >= 0
        targets_RC[owners[known_E], of_elements[known_E]] = 1
        self.unknown_R[owners[~known_E]] = True
        return targets_RC, there_R

    def _flags(self, columns: Sequence[LabelColumn]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """A column of 0 and 1 for each label. Outputs without a column are not evaluated."""
        if self.space.num_outputs == 1:
            matched = Matched(outputs={columns[0].name: 0}, unknown=())
        else:
            matched = self._matched([column.name for column in columns], None)
        flags = np.stack([column.numbers(gaps=True) for column in columns], axis=1)
        there_R = np.asarray(np.isfinite(flags).all(1))
        wrong_R = there_R & ~np.isin(flags, (0, 1)).all(1)
        if wrong_R.any():
            first = int(wrong_R.argmax())
            column = columns[int((~np.isin(flags[first], (0, 1))).argmax())]
            said = "says whether the row has this label, by 0 or 1"
            raise column.error_at(first, said, column.values[first].as_py(), "write 1 for yes, 0 for no")
        targets_RC = np.zeros((self._rows.num_rows, self.space.num_outputs), np.float32)
        for i, column in enumerate(columns):
            if (output := matched.outputs.get(column.name)) is not None:
                targets_RC[:, output] = np.maximum(targets_RC[:, output], np.nan_to_num(flags[:, i]))
        evaluated = np.unique([*matched.outputs.values()])
        if len(evaluated) < self.space.num_outputs:
            absent = [name for i, name in enumerate(self.space.names) if i not in set(evaluated.tolist())]
            self.doubts.append(f"no column for {_some(absent)}: {_some(absent, 0)} of the model's labels not evaluated")
            self.outputs = evaluated
            names = tuple(self.space.names[i] for i in evaluated)
            self.space = LabelSpace(task="multi_label", names=names, values={n: i for i, n in enumerate(names)})
            targets_RC = targets_RC[:, evaluated]
        return targets_RC, there_R

    def _matched(self, labels: Sequence[str], column: LabelColumn | None) -> Matched:
        matched = match_labels(labels, self.space.names, self._options.label_map)
        if matched.note is not None:
            said = f"{matched.note}; --label-map settles it" if matched.guessed else matched.note
            (self.doubts if matched.guessed else self.notes).append(said)
        if matched.unknown and (self._options.unknown_labels == "error" or not matched.outputs):
            counts = {} if column is None or column.holds_lists else _counts(column)
            shown = [repr(printable(label, 40)) + _times(counts.get(label)) for label in matched.unknown]
            many = len(matched.unknown)
            raise DataError(
                f"{many:,} label{'s' if many > 1 else ''} of the data {'are' if many > 1 else 'is'} unknown to"
                f" {printable(self._options.model)}: {listed(shown, _NAMED)}",
                file=self._rows.name,
                hint=unknown_hint(matched.unknown, self.space.names),
            )
        absent = [n for i, n in enumerate(self.space.names) if i not in set(matched.outputs.values())]
        if absent and column is not None:
            self.notes.append(f"no row has the label {_some(absent)}: the metrics say nothing of rows that do")
        return matched


def _are_flags(column: LabelColumn) -> bool:
    return not column.holds_lists and set(column.distinct.to_pylist()) <= {"0", "1", "true", "false", "True", "False"}


def _counts(column: LabelColumn) -> Mapping[str, int]:
    return Counter({each["values"]: each["counts"] for each in pc.value_counts(column.texts).to_pylist()})


def _times(count: int | None) -> str:
    return "" if count is None else f" ({count_text(count)} row{'' if count == 1 else 's'})"


def _some(names: Sequence[str], most: int = 5) -> str:
    return f"{len(names):,}" if not most else listed([repr(printable(name, 40)) for name in names], most)


def _spread(rows_of: Floats, column: LabelColumn) -> Floats:
    """The rows of distinct texts for all rows; none of the labels for a blank text."""
    padded = np.concatenate([rows_of, np.zeros((1, rows_of.shape[1]), np.float32)])
    return np.asarray(padded[pc.index_in(column.texts, column.distinct).fill_null(len(rows_of)).to_numpy()])


def _parts_of(column: LabelColumn, sets: Mapping[str, Sequence[str]]) -> tuple[Integers, pa.Array]:
    """Row and text of each label of all rows."""
    several = [[label for label in labels if label] for labels in sets.values()]
    lists = pa.array([*several, []], pa.large_list(pa.large_string()))
    places = pc.index_in(column.texts, column.distinct).fill_null(len(several))
    of_rows = lists.take(places.combine_chunks())
    owners = np.repeat(np.arange(len(of_rows)), pc.list_value_length(of_rows).to_numpy())
    return owners, pc.list_flatten(of_rows)
