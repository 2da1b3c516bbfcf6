"""Label columns -> what the outputs of a classifier mean, and the target of each row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError, listed, printable
from brimful.core.options.choices import TaskChoice
from brimful.core.records import LabelSpace, TaskName
from brimful.data.labels.columns import Columns
from brimful.data.labels.label_columns import IS_IT_RIGHT, LabelColumn, parse_numbers, read_flags
from brimful.data.labels.label_sets import detect_sets, known_sets
from brimful.data.labels.missing import WORDS
from brimful.data.readers.rows import Rows
from brimful.tasks.label_rows import LabelRows, Targets

_MOST_NUMBERED_CLASSES = 50
_MOST_CLASSES = 1000
#: From so many whole numbers on, those that do not number classes may be amounts.
_FEWEST_AMOUNTS = 6
#: Rows of each class, on average, for more than 50 whole numbers to be taken as classes.
_FEWEST_PER_CLASS = 2
#: What to do about a label that the model or the training rows do not have.
_WAYS = "leave such rows out, or name the label that is meant by --label-map"


def detect_labels(rows: Rows, columns: Columns, task: TaskChoice = "auto") -> LabelSpace:
    """Infer task and labels from the label columns of the training rows.

    auto: several columns of 0 and 1, lists, and texts such as `a|b` are multi_label. Several other numeric columns are
    regression, and so is one with numbers that are not whole, or with more than 50 distinct ones, unless these are 0 or
    1 to the highest without a gap. The rest is single_label. `label_doubt` says where that may be wrong.
    Names are sorted, by number where all are whole numbers.

    Raises: DataError for a single class, and for values that are neither classes nor numbers.
    """
    if not columns.labels:
        raise DataError("there is no label column", file=rows.name, hint="name it by --label-column")
    if len(columns.labels) > 1:
        return _detect_several([LabelColumn(rows=rows, name=name) for name in columns.labels], task)
    column = LabelColumn(rows=rows, name=columns.labels[0])
    if column.holds_lists:
        if task not in ("auto", "multi_label"):
            raise column.error(f"holds lists, which are no {task}", "leave --task out, or name another --label-column")
        return _classes(column, "multi_label", _names_in_lists(column))
    if len(column.distinct) == 0:
        raise column.error("has no values")
    if task in ("auto", "multi_label") and (names := _names_in_sets(column, asked=task == "multi_label")):
        return _classes(column, "multi_label", names)
    if task == "regression" or (task == "auto" and _are_amounts(column.distinct, rows.num_rows)):
        column.numbers(gaps=True)
        return LabelSpace(task="regression", names=(column.name,))
    if task == "auto" and len(column.distinct) > max(_MOST_CLASSES, rows.num_rows / 2):
        count = f"{len(column.distinct):,} distinct values in {rows.num_rows:,} rows"
        if len(others := _among_amounts(column)):
            first, hint = pc.index(column.texts, others[0]).as_py(), "give the row a number"
            if others[0].as_py() in WORDS:
                hint += ", or leave such rows out: --task regression --missing-labels drop"
            raise column.error_at(first, "holds numbers, and here none", others[0].as_py(), hint)
        what, first = f"looks like neither a class nor a number: {count}", column.distinct[0].as_py()
        raise column.error(what, f"{IS_IT_RIGHT} --task single_label takes each as a class", first)
    return _classes(column, "single_label", column.distinct.to_pylist())


def label_doubt(rows: Rows, columns: Columns, task: TaskChoice, space: LabelSpace) -> str | None:
    """A likely mistake of `detect_labels`, with the flag that settles it: whole numbers are classes or amounts."""
    if task != "auto" or len(columns.labels) != 1 or space.task == "multi_label":
        return None
    column = LabelColumn(rows=rows, name=columns.labels[0])
    numbers = parse_numbers(column.distinct)
    if numbers is None:
        return _mixed_doubt(column, space)
    if len(numbers) < _FEWEST_AMOUNTS or (numbers != np.round(numbers)).any():
        return None
    few = len(numbers) <= _MOST_NUMBERED_CLASSES
    if few and _are_indices(numbers):
        return None
    found = f"column '{printable(columns.labels[0])}' holds {len(numbers):,} whole numbers,"
    found += f" {numbers.min():.0f} to {numbers.max():.0f}: taken as"
    if space.task == "regression":
        return f"{found} amounts (regression); --task single_label takes them as classes"
    if few:
        return f"{found} classes (single_label), and they may be amounts; --task regression takes them as amounts"
    return f"{found} classes (single_label), since none is missing between; --task regression takes them as amounts"


def _mixed_doubt(column: LabelColumn, space: LabelSpace) -> str | None:
    """One line on amounts that are taken for classes since a few rows have another text."""
    others = _among_amounts(column)
    if not len(others):
        return None
    first = pc.index(column.texts, others[0]).as_py()
    file, row = column.rows.place(first)
    missing = all(text in WORDS for text in others.to_pylist())
    remedy = "with --missing-labels drop" if missing else "once each row has a number"
    shown = f"{_listed(map(repr, others.to_pylist()))} (first in {printable(file, 200)}, row {row:,})"
    found = f"column '{printable(column.name)}' holds numbers and {shown}: taken as {len(space.names):,} classes"
    return f"{found} (single_label); --task regression, {remedy}, takes them as amounts"


def _among_amounts(column: LabelColumn) -> pa.Array:
    """The few distinct texts that keep a column from being one of amounts; none where it holds none."""
    others = column.not_numbers()
    numbers = column.distinct.filter(pc.invert(pc.is_in(column.distinct, others)))
    return others if len(numbers) > 1 and _are_amounts(numbers, len(column.texts)) else others.slice(0, 0)


def task_reason(rows: Rows, columns: Columns, space: LabelSpace) -> str:
    """Why `detect_labels` inferred the task of `space`, in a few words."""
    if len(columns.labels) > 1:
        return "columns of 0 and 1" if space.task == "multi_label" else "columns of numbers"
    column = LabelColumn(rows=rows, name=columns.labels[0])
    if space.task == "multi_label":
        return "lists of labels" if column.holds_lists else "texts that hold several labels"
    numbers = parse_numbers(column.distinct)
    if numbers is None or pc.any(pc.match_substring_regex(column.distinct, r"^[^0-9]+$"), min_count=0).as_py():
        return "one label a row"  # words, true and false among them
    is_whole = not (numbers != np.round(numbers)).any()
    return f"{len(numbers):,} whole numbers" if is_whole else "numbers with fractions"


def encode_labels(
    rows: Rows,
    columns: Columns,
    space: LabelSpace,
    row_numbers: npt.NDArray[np.int64] | None = None,
    *,
    missing_is_none: bool = False,
) -> Targets:
    """The target of each row: single_label int64 (N,); multi_label LabelRows (N, C); regression float32 (N,) or (N, K).

    row_numbers: (N,) the rows to encode; None for all. missing_is_none: in multi_label, a row without labels has none.
    Raises: DataError with file and row for a label that is missing, not finite, or not in `space`.
    """
    named = [LabelColumn(rows=rows, name=name, row_numbers=row_numbers) for name in columns.labels]
    if space.task == "regression" and len(named) == space.num_outputs:
        numbers = [column.numbers() for column in named]
        return numbers[0] if len(numbers) == 1 else np.stack(numbers, axis=1)
    if space.task == "multi_label" and len(named) > 1 and set(columns.labels) == set(space.values):
        return _encode_flags(sorted(named, key=lambda column: space.values[column.name]))
    if space.task == "regression" or len(named) != 1:
        raise DataError(
            f"the label columns do not fit the {space.num_outputs} outputs",
            file=rows.name,
            value=", ".join(columns.labels),
            hint=f"the outputs are {_listed(space.names)}: name their columns by --label-column",
        )
    (column,) = named
    if space.task == "multi_label":
        return (_encode_lists if column.holds_lists else _encode_sets)(column, space, missing_is_none)
    if column.holds_lists:
        raise column.error("holds lists, and the task is single_label")
    column.check_present()
    return _outputs(column, column.texts, space)


def has_labels(rows: Rows, columns: Columns) -> npt.NDArray[np.bool_]:
    """(N,) the rows that have a label, in all of several columns."""
    there = [LabelColumn(rows=rows, name=name).present_N() for name in columns.labels]
    return np.asarray(np.logical_and.reduce(there), np.bool_)


# What the labels are


def _detect_several(columns: Sequence[LabelColumn], task: TaskChoice) -> LabelSpace:
    names = tuple(column.name for column in columns)
    if task == "single_label":
        raise columns[0].error("is one of several label columns: they cannot be one label", "use --task multi_label")
    not_flags = [column for column in columns if not _holds_flags(column)]
    if task == "regression" or (task == "auto" and not_flags):
        return LabelSpace(task="regression", names=names)
    if not_flags:
        raise not_flags[0].error("holds more than 0 and 1, for no and yes", "use --task regression")
    return LabelSpace(task="multi_label", names=names, values={name: index for index, name in enumerate(names)})


def _holds_flags(column: LabelColumn) -> bool:
    numbers = column.numbers(gaps=True)
    return bool(np.isin(numbers[~np.isnan(numbers)], (0, 1)).all())


def _classes(column: LabelColumn, task: TaskName, classes: Iterable[str]) -> LabelSpace:
    names = sorted(classes)
    if all(re.fullmatch(r"-?[0-9]+", name) for name in names):
        names.sort(key=int)
    if not names:
        raise column.error("has no label in any row")
    if task == "single_label" and len(names) == 1:
        raise column.error("has one class only", f"a classifier needs two or more: {IS_IT_RIGHT}", names[0])
    return LabelSpace(task=task, names=tuple(names), values={name: index for index, name in enumerate(names)})


def _names_in_lists(column: LabelColumn) -> list[str]:
    bits = column.bits()
    if bits is not None:
        return _numbered(bits.num_labels)
    names: list[str] = pc.unique(column.elements).drop_null().to_pylist()
    if pa.types.is_floating(column.values.type.value_type) and _are_amounts(pa.array(names, pa.large_string()), 0):
        raise column.error("holds lists of amounts", "for several numbers per row, give each its own column")
    return names


def _names_in_sets(column: LabelColumn, *, asked: bool) -> list[str] | None:
    """The labels in a column of texts that stand for several; None if they do not look so."""
    may_be_sets = pc.match_substring_regex(column.distinct, r"^\s*\[|[|;]")
    if not asked and not pc.any(may_be_sets, min_count=0).as_py():
        return None
    sets = detect_sets(column.distinct, asked=asked)
    return None if sets is None else _numbered(sets.num_bits()) or list(sets.labels)


def _numbered(count: int) -> list[str]:
    return [str(index) for index in range(count)]


def _are_amounts(distinct: pa.Array, num_rows: int) -> bool:
    numbers = parse_numbers(distinct)
    if numbers is None:
        return False
    if (numbers != np.round(numbers)).any():
        return True
    count = len(numbers)
    if count <= _MOST_NUMBERED_CLASSES:
        return False
    return not (_are_indices(numbers) and num_rows >= _FEWEST_PER_CLASS * count)


def _are_indices(numbers: npt.NDArray[np.float64]) -> bool:
    """True for whole numbers from 0 or 1 to the highest without a gap."""
    lowest, highest = numbers.min(), numbers.max()
    return bool(lowest in (0, 1) and highest - lowest == len(numbers) - 1)


# Targets


def _encode_flags(columns: Sequence[LabelColumn]) -> LabelRows:
    """(N, C) of C columns of 0 and 1."""
    for column in columns:
        replace(column).numbers()  # one without a number is said first
    return read_flags(columns)[0]


def _encode_lists(column: LabelColumn, space: LabelSpace, missing_is_none: bool) -> LabelRows:
    """(N, C) with 1 where the list of a row has the label."""
    if not missing_is_none:
        column.check_present()
    if _is_numbered(space) and (bits := column.bits(space.num_outputs)) is not None:
        return bits
    outputs = _outputs(column, column.elements, space, column.owners)
    return LabelRows.of_pairs(column.owners, outputs, (len(column.values), space.num_outputs))


def _encode_sets(column: LabelColumn, space: LabelSpace, missing_is_none: bool) -> LabelRows:
    """(N, C) with 1 where the text of a row stands for the label. An empty text stands for none."""
    if column.values.null_count and not missing_is_none:
        column.check_present()
    sets = known_sets(column.distinct, space.values)
    if _is_numbered(space) and sets.num_bits() == space.num_outputs:
        targets = sets.bits()
    else:
        if (unknown := next((label for label in sets.labels if label not in space.values), None)) is not None:
            value = column.distinct[sets.first_value(unknown)]
            raise _unknown(column, pc.index(column.texts, value).as_py(), unknown, space)
        outputs = np.array([space.values[label] for label in sets.labels], np.int64)
        targets = sets.targets(outputs, space.num_outputs)
    places = pc.index_in(column.texts, column.distinct).fill_null(len(column.distinct)).to_numpy()
    return targets.with_empty_row().take(places)


def _outputs(
    column: LabelColumn, texts: pa.ChunkedArray, space: LabelSpace, owners: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Index of the output of each label; owners: the row of each, where a row can have several."""
    found = pc.index_in(texts, pa.array(list(space.values), pa.large_string()))
    if found.null_count:
        first = pc.index(found.is_null(), True).as_py()
        raise _unknown(column, first if owners is None else int(owners[first]), texts[first].as_py(), space)
    outputs = np.fromiter(space.values.values(), np.int64, len(space.values))
    return np.asarray(outputs[found.to_numpy()])


def _is_numbered(space: LabelSpace) -> bool:
    return list(space.values) == _numbered(space.num_outputs)


def _unknown(column: LabelColumn, index: int, label: str, space: LabelSpace) -> DataError:
    return column.error_at(index, "has an unknown label", label, f"the labels are {_listed(space.values)}; {_WAYS}")


def _listed(names: Iterable[str]) -> str:
    return listed([printable(name, 40) for name in names])
