"""True labels of the rows to evaluate on, as targets of a model whose labels are given.

Legend: N rows with a text and a label, C outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from brimful.core.errors import DataError, OptionError, listed, printable
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.records import LabelSpace
from brimful.core.units import count_text
from brimful.data.labels.label_columns import LabelColumn, no_label_text, read_flags
from brimful.data.labels.label_sets import known_sets
from brimful.data.readers.rows import Rows
from brimful.models.hub.label_matching import Matched, are_placeholders, match_labels, unknown_hint
from brimful.tasks.label_rows import LabelRows, Targets, taken

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
    targets_N: Targets
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
        rows, targets_n = self.rows[chosen_n], taken(self.targets_N, chosen_n)
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
    targets: Targets
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
        targets_N=taken(targets, kept),
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
        """(R, C) numbers, in the order of the outputs, and the rows that have them all."""
        names = [column.name for column in columns]
        if len(names) != self.space.num_outputs:
            raise DataError(
                f"the model has {self.space.num_outputs} outputs, and {len(names)} label columns are read",
                file=self._rows.name,
                value=", ".join(names),
                hint="name one column for each output: --label-column a,b,c",
            )
        numbers = np.stack([columns[i].numbers(gaps=True) for i in self._order(names)], axis=1)
        self.doubts += [doubt for column in columns for doubt in column.number_doubts()]
        return numbers, np.asarray(np.isfinite(numbers).all(1))

    def _order(self, names: Sequence[str]) -> list[int]:
        """The column of each output of numbers. Of outputs with other names, the columns as they are given."""
        matched = match_labels(names, self.space.names, None)
        outputs = [matched.outputs.get(name, -1) for name in names]
        if not matched.guessed and sorted(outputs) == [*range(len(names))]:
            self.notes += [] if matched.note is None else [matched.note]
            return [outputs.index(i) for i in range(len(names))]
        if len(names) > 1 and not are_placeholders(self.space.names):
            both = zip(names, self.space.names, strict=True)
            pairs = [f"'{printable(name, 40)}' is '{printable(output, 40)}'" for name, output in both]
            self.doubts.append(f"columns of numbers are taken in the order given: {listed(pairs, _NAMED)}")
        return list(range(len(names)))

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

    def sets(self, columns: Sequence[LabelColumn]) -> tuple[LabelRows, npt.NDArray[np.bool_]]:
        """The labels of each of R rows."""
        if len(columns) > 1 or (self.space.num_outputs == 1 and _are_flags(columns[0])):
            return self._flags(columns)
        (column,) = columns
        there_R = column.values.is_valid().to_numpy()
        return (self._lists(column) if column.holds_lists else self._texts(column, there_R)), there_R

    def _lists(self, column: LabelColumn) -> LabelRows:
        bits = column.bits(self.space.num_outputs)
        if bits is not None:
            return bits
        labels = pc.unique(column.elements).drop_null()
        outputs = self._outputs(labels.to_pylist(), column)
        of_elements = outputs[pc.index_in(column.elements, labels).fill_null(-1).to_numpy()]
        known_E, shape = of_elements >= 0, (self._rows.num_rows, self.space.num_outputs)
        self.unknown_R[column.owners[~known_E]] = True
        return LabelRows.of_pairs(column.owners[known_E], of_elements[known_E], shape)

    def _texts(self, column: LabelColumn, there_R: npt.NDArray[np.bool_]) -> LabelRows:
        if num_without := int(column.texts.null_count) - int((~there_R).sum()):
            self.notes.append(no_label_text(num_without))
        known = {*self.space.names, *(name.casefold() for name in self.space.names)}
        sets = known_sets(column.distinct, known)
        places_R = pc.index_in(column.texts, column.distinct).fill_null(len(column.distinct)).to_numpy()
        if sets.num_bits() == self.space.num_outputs > 1:
            return sets.bits().with_empty_row().take(places_R)
        named = [label for label in sets.labels if label]
        outputs = dict(zip(named, self._outputs(named, column).tolist(), strict=False))
        outputs_L = np.array([outputs.get(label, -1) for label in sets.labels], np.int64)
        is_unknown_L = (outputs_L < 0) & np.array([bool(label) for label in sets.labels], np.bool_)
        self.unknown_R |= np.append(sets.has(is_unknown_L), False)[places_R]
        return sets.targets(outputs_L, self.space.num_outputs).with_empty_row().take(places_R)

    def _outputs(self, labels: Sequence[str], column: LabelColumn) -> Integers:
        """The output of each label, and -1 for none at the end."""
        matched = self._matched(labels, column)
        return np.array([matched.outputs.get(label, -1) for label in labels] + [-1], np.int64)

    def _flags(self, columns: Sequence[LabelColumn]) -> tuple[LabelRows, npt.NDArray[np.bool_]]:
        """A column of 0 and 1 for each label. Outputs without a column are not evaluated."""
        if self.space.num_outputs == 1:
            matched = Matched(outputs={columns[0].name: 0}, unknown=())
        else:
            matched = self._matched([column.name for column in columns], None)
        targets, there_R = read_flags(columns)
        evaluated = np.unique([*matched.outputs.values()])
        outputs = np.array([matched.outputs.get(column.name, -1) for column in columns], np.int64)
        renamed = targets.renamed(outputs, self.space.num_outputs)
        if len(evaluated) < self.space.num_outputs:
            absent = [name for i, name in enumerate(self.space.names) if i not in set(evaluated.tolist())]
            self.doubts.append(f"no column for {_some(absent)}: {_some(absent, 0)} of the model's labels not evaluated")
            self.outputs = evaluated
            names = tuple(self.space.names[i] for i in evaluated)
            self.space = LabelSpace(task="multi_label", names=names, values={n: i for i, n in enumerate(names)})
            renamed = targets.renamed(np.where(outputs < 0, -1, np.searchsorted(evaluated, outputs)), len(evaluated))
        return renamed, there_R

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
