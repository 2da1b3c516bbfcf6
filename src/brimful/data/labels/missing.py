"""Words that programs write where there is no label or no text, as `nan` and `NULL`: texts like others to a reader of
files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import listed, printable
from brimful.data.labels.columns import Columns
from brimful.data.readers.rows import Rows

WORDS = ("nan", "NaN", "NAN", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "null", "NULL", "NaT", "?")
#: Words that a line names.
_FEW = 3


def missing_words(rows: Rows, columns: Columns) -> dict[str, int]:
    """Such labels in a column of texts, and the rows that have each."""
    if len(columns.labels) != 1 or not pa.types.is_large_string(rows.table.schema.field(columns.labels[0]).type):
        return {}
    return _counts(rows.table[columns.labels[0]])


def missing_texts(rows: Rows, columns: Columns) -> str | None:
    """One line on rows whose whole text is such a word."""
    names = rows.table.column_names
    if columns.text not in names or not pa.types.is_large_string(rows.table.schema.field(columns.text).type):
        return None
    if not (words := _counts(rows.table[columns.text])):
        return None
    number = sum(words.values())
    whole = "1 row has" if number == 1 else f"{number:,} rows have"
    shown = listed([f"'{printable(word)}'" for word in words], _FEW)
    where = f"column '{printable(columns.text, 60)}'"
    return f"{whole} nothing but {shown} in {where}: a text like others; leave out such rows"


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    counts = pc.value_counts(column.filter(_are_words(column, WORDS))).to_pylist()
    return {each["values"]: each["counts"] for each in counts}


def said_of_words(words: Mapping[str, int]) -> str:
    """The beginning of a line on these labels."""
    shown = listed(
        [f"'{printable(word)}' ({count:,} row{'s' if count > 1 else ''})" for word, count in words.items()], _FEW
    )
    return f"the label {shown} is" if len(words) == 1 else f"the labels {shown} are"


def without_words(rows: Rows, columns: Columns, words: Collection[str]) -> Rows:
    """The rows with null in place of such labels."""
    (name,) = columns.labels
    column = rows.table[name]
    missing = pc.if_else(_are_words(column, words), pa.scalar(None, column.type), column)
    return replace(rows, table=rows.table.set_column(rows.table.column_names.index(name), name, missing))


def _are_words(column: pa.ChunkedArray, words: Collection[str]) -> pa.ChunkedArray:
    return pc.is_in(column, pa.array(words, column.type))
