"""One label column as text, as lists of text or as numbers, with the place of each value for errors.

A label is compared as text: 1, 1.0 and "1" are one label, and so are true and "true". Whole columns are worked on at
once by Arrow; Python loops over distinct values at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError, printable
from brimful.data.labels.missing import WORDS
from brimful.data.readers.rows import Rows
from brimful.tasks.label_rows import LabelRows, row_blocks

#: Hints for a label that is missing, and for one in a column of lists.
_LEAVE_OUT = (
    "give it one; --missing-labels drop leaves such rows out",
    "write [] for no label; --missing-labels none takes it for that, drop leaves such rows out",
)
_NO_NUMBER = "give the row a number; --missing-labels drop leaves such rows out"
_IN_TRAINING = "give the row a number; in training, --missing-labels drop leaves such rows out"
#: Error of rounding to fp32, as a share of the standard deviation, from which on it is told.
_COARSE = 1e-3
#: Share of rows with another text, up to which a column is one of numbers.
_FEW_OTHERS = 0.2
_A_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_DECIMAL_COMMA = r"^[+-]?\d+(,\d+)?$"
IS_IT_RIGHT = "is --label-column the right one?"


def no_label_text(num_rows: int) -> str:
    """One line on rows of several labels each whose text of labels is empty."""
    if num_rows == 1:
        return "1 row has an empty label, and is taken for one that no label is true of"
    return f"{num_rows:,} rows have an empty label, and are taken for rows that no label is true of"


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelColumn:
    """The column `name` of `rows`, or its part at row_numbers (N,)."""

    rows: Rows
    name: str
    row_numbers: npt.NDArray[np.int64] | None = None

    @cached_property
    def values(self) -> pa.ChunkedArray:
        """As the rows have it, decimals as floats."""
        column = self.rows.table[self.name]
        kind = column.type
        if pa.types.is_decimal(kind):
            column = column.cast(pa.float64())
        elif pa.types.is_large_list(kind) and pa.types.is_decimal(kind.value_type):
            column = column.cast(pa.large_list(pa.float64()))
        return column if self.row_numbers is None else column.take(pa.array(self.row_numbers))

    @property
    def holds_lists(self) -> bool:
        return bool(pa.types.is_large_list(self.values.type))

    @cached_property
    def texts(self) -> pa.ChunkedArray:
        """(N,) labels as text; null where a row has none: empty, blank, or not finite among numbers."""
        return self._as_texts(self.values)

    @cached_property
    def distinct(self) -> pa.Array:
        """The distinct `texts`, in order of appearance."""
        return pc.unique(self.texts).drop_null()

    @cached_property
    def elements(self) -> pa.ChunkedArray:
        """The labels in all lists after one another, as text."""
        return self._as_texts(pc.list_flatten(self.values))

    @cached_property
    def owners(self) -> npt.NDArray[np.int64]:
        """(E,): number of the list, of N, that each of `elements` is in."""
        lengths = pc.list_value_length(self.values).fill_null(0).to_numpy()
        return np.repeat(np.arange(len(lengths)), lengths)

    def bits(self, num_outputs: int | None = None) -> LabelRows | None:
        """Labels of lists that each hold a 0 or 1 for each of C >= 2 labels (num_outputs, if known); None of others."""
        lengths, kind = pc.unique(pc.list_value_length(self.values)), self.values.type.value_type
        size = lengths[0].as_py() if len(lengths) == 1 else None
        if size is None or size < 2 or num_outputs not in (None, size) or not _is_numeric(kind):
            return None
        elements, blocks = pc.list_flatten(self.values), row_blocks(len(self.values), size)
        parts = (_as_floats(elements[part.start * size : part.stop * size]).reshape(-1, size) for part in blocks)
        try:
            return LabelRows.of_blocks(map(_checked_bits, parts), size)
        except _NoBitsError:
            return None

    def numbers(self, *, gaps: bool = False) -> npt.NDArray[np.float32]:
        """(N,) the values as numbers. gaps: whether a row may have none, which is NaN then.

        Raises: DataError for what is no number, not finite in float32, or missing.
        """
        with np.errstate(over="ignore"):
            numbers = self._exact_numbers.astype(np.float32)
        bad = np.isinf(numbers) if gaps else ~np.isfinite(numbers)
        if bad.any():
            first = int(bad.argmax())
            hint = _NO_NUMBER if np.isnan(numbers[first]) else "give the row a number or remove it"
            raise self.error_at(first, "holds no finite number", self.values[first].as_py(), hint)
        return numbers

    @cached_property
    def has_decimal_commas(self) -> bool:
        """True if the whole column is text of numbers with a comma before their decimals: `0,5` and `12`.

        Where three digits follow each comma they may be thousands, and are not taken for decimals.
        """
        column = self.rows.table[self.name]
        if not pa.types.is_large_string(column.type):
            return False
        texts = pc.utf8_trim_whitespace(pc.unique(_without_blanks(column)).drop_null())
        after_comma = texts.filter(pc.match_substring(texts, ","))
        if not len(after_comma) or not pc.all(pc.match_substring_regex(texts, _DECIMAL_COMMA)).as_py():
            return False
        return not pc.all(pc.match_substring_regex(after_comma, r",\d{3}$")).as_py()

    def not_numbers(self) -> pa.Array:
        """The distinct `texts` that are no numbers, where most rows with a label have a number; else none."""
        if not pa.types.is_large_string(self.values.type):
            return self.distinct.slice(0, 0)
        others = self.distinct.filter(pc.invert(pc.match_substring_regex(self.distinct, _A_NUMBER)))
        words = others.filter(pc.invert(pc.is_in(others, pa.array(WORDS, others.type))))
        count = pc.sum(pc.is_in(self.texts, words)).as_py() or 0
        return others if count <= _FEW_OTHERS * (len(self.texts) - self.texts.null_count) else others.slice(0, 0)

    def number_doubts(self) -> list[str]:
        """Lines on numbers that may be read otherwise than they were meant, or are trained on coarsely."""
        doubts = [self.rounding_doubt()]
        if self.has_decimal_commas:
            doubts.append(f"column '{printable(self.name)}': commas in its numbers are read as decimal points")
        return [doubt for doubt in doubts if doubt is not None]

    def rounding_doubt(self) -> str | None:
        """One line where fp32, in which numbers are trained on and answered, is coarse beside their spread."""
        exact = self._exact_numbers[np.isfinite(self._exact_numbers)]
        spread = float(exact.std()) if len(np.unique(exact)) > 1 else 0.0
        with np.errstate(over="ignore"):
            error = float(np.abs(exact.astype(np.float32) - exact).max(initial=0))
        if not 0 < _COARSE * spread < error < np.inf:
            return None
        beside = f"by up to {error:.2g}, and their standard deviation is {spread:.2g}"
        remedy = f"subtract {exact.mean():.10g} from all of them, and add it to the answers"
        return f"column '{printable(self.name)}': fp32 rounds its numbers {beside}: {remedy}"

    def present_N(self) -> npt.NDArray[np.bool_]:
        """(N,) the rows with a label, or with a list of labels, which may be empty."""
        values = self.values if self.holds_lists else self.texts
        return np.asarray(values.is_valid().to_numpy(), np.bool_)

    def check_present(self) -> None:
        """Raises DataError for the first row without a label."""
        if not self.holds_lists:
            absent = self.texts.is_null()
        else:
            absent = self.values.is_null()
            if self.elements.null_count:
                owner = int(self.owners[pc.index(self.elements.is_null(), True).as_py()])
                raise self.error_at(owner, "has a list with an empty label", hint="give it a label or remove the row")
        first = pc.index(absent, True).as_py()
        if first >= 0:
            raise self.error_at(first, "has no label", hint=_LEAVE_OUT[self.holds_lists])

    def error(self, what: str, hint: str = IS_IT_RIGHT, value: object = None) -> DataError:
        """The error about the whole column."""
        return DataError(f"column '{printable(self.name)}' {what}", file=self.rows.name, value=value, hint=hint)

    def error_at(self, index: int, what: str, value: object = None, hint: str | None = None) -> DataError:
        """The error about row `index` of the N."""
        row = index if self.row_numbers is None else int(self.row_numbers[index])
        file, number = self.rows.place(row)
        return DataError(f"column '{printable(self.name)}' {what}", file=file, row=number, value=value, hint=hint)

    def _as_texts(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        kind = column.type
        if pa.types.is_large_string(kind):
            return _tidy_numbers(_without_blanks(column))
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, kind))
            countable = pc.less(pc.abs(column), 2.0**53)  # beyond, floats and integers are not one to one
            whole = pc.all(pc.and_(pc.equal(column, pc.round(column)), countable), min_count=0).as_py()
            return (column.cast(pa.int64()) if whole else column).cast(pa.large_string())
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
            return column.cast(pa.large_string())
        raise self.error(f"holds {printable(kind)}, which cannot be a label")

    @cached_property
    def _exact_numbers(self) -> npt.NDArray[np.float64]:
        """(N,) the values as float64, NaN for null. Raises: DataError for what is no number."""
        kind = self.values.type
        if pa.types.is_large_string(kind):
            return self._parsed_numbers()
        if _is_numeric(kind):
            return _as_floats(self.values)
        raise self.error(f"holds {printable(kind)}, not numbers")

    def _parsed_numbers(self) -> npt.NDArray[Any]:
        texts = _without_blanks(self.values)
        distinct = pc.unique(texts).drop_null()
        parsed = parse_numbers(pc.replace_substring(distinct, ",", ".") if self.has_decimal_commas else distinct)
        if parsed is None:
            wrong = next(value for value in distinct if parse_numbers(pa.array([value], texts.type)) is None)
            hint = _IN_TRAINING if wrong.as_py() in WORDS else f"give the row a number or remove it; {IS_IT_RIGHT}"
            raise self.error_at(pc.index(texts, wrong).as_py(), "holds no number", wrong.as_py(), hint)
        places = pc.index_in(texts, distinct).fill_null(len(distinct)).to_numpy()
        return np.asarray(np.append(parsed, np.nan)[places])


def read_flags(columns: Sequence[LabelColumn]) -> tuple[LabelRows, npt.NDArray[np.bool_]]:
    """(N, C) of C columns of 0 and 1, and (N,) the rows that have a number in all of them; a column at a time.

    Raises: DataError for the first row with another number, among those.
    """
    num_rows = len(columns[0].values)
    there_N, wrong = np.ones(num_rows, np.bool_), list[npt.NDArray[np.int64]]()
    rows = list[npt.NDArray[np.int64]]()
    for column in columns:
        numbers = replace(column).numbers(gaps=True)  # a column of its own, which keeps them no longer
        missing_N = np.isnan(numbers)
        there_N &= ~missing_N
        rows.append(np.flatnonzero(numbers == 1))
        wrong.append(np.flatnonzero(~missing_N & (numbers != 0) & (numbers != 1)))
    firsts = [int(each[there_N[each]].min(initial=num_rows)) for each in wrong]
    if (first := min(firsts)) < num_rows:
        column = columns[firsts.index(first)]
        said, shown = "says whether the row has this label, by 0 or 1", column.values[first].as_py()
        raise column.error_at(first, said, shown, "write 1 for yes, 0 for no")
    labels_E = np.repeat(np.arange(len(columns)), [len(each) for each in rows])
    return LabelRows.of_pairs(np.concatenate(rows), labels_E, (num_rows, len(columns))), there_N


class _NoBitsError(ValueError):
    """A number that is neither 0 nor 1."""


def _checked_bits(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not np.isin(bits, (0, 1)).all():
        raise _NoBitsError
    return bits


def parse_numbers(texts: pa.Array) -> npt.NDArray[np.float64] | None:
    """Texts as numbers, `true` and `false` as 1 and 0; None if one of them is no number."""
    texts = pc.utf8_trim_whitespace(texts)
    try:
        return np.asarray(texts.cast(pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        flags = pc.index_in(pc.utf8_lower(texts), pa.array(["false", "true"], texts.type))
    return None if flags.null_count else np.asarray(flags.cast(pa.float64()).to_numpy(zero_copy_only=False))


def _is_numeric(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _as_floats(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Numbers or booleans as float64, NaN for null."""
    numeric = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
    return np.asarray(numeric.cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy())


def _without_blanks(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), pa.scalar(None, texts.type), texts)


def _tidy_numbers(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """In a column of nothing but numbers, `nan` and `inf` become null, and 1.0 becomes 1 where all are written so."""
    distinct = pc.unique(texts).drop_null()
    numbers = parse_numbers(distinct)
    if numbers is None:
        return texts
    finite = np.isfinite(numbers)
    if not finite.all():
        unusable = pc.is_in(texts, distinct.filter(pa.array(~finite)))
        texts = pc.if_else(unusable, pa.scalar(None, texts.type), texts)
    whole = pc.match_substring_regex(distinct.filter(pa.array(finite)), r"^-?\d+\.0+$")
    return pc.replace_substring_regex(texts, r"\.0+$", "") if pc.all(whole, min_count=0).as_py() else texts
