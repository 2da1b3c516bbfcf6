"""The first line of CSV and TSV files: names of columns, or a row of data."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from brimful.core.errors import DataError, listed, printable
from brimful.data.column_names import KNOWN, key_of
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.lines import TOO_LONG

if TYPE_CHECKING:
    import _csv

_DELIMITERS = ",;\t|"
#: Records that a delimiter is judged by where no header shows it.
_RECORDS = 50
#: Rows that a header is compared with.
_ROWS = 1000
#: Words of a value that is a text, and rows per distinct value of a column of classes, at least.
_WORDS, _ROWS_PER_CLASS = 4, 20
#: Names that a line shows.
_SHOWN = 5
_AS_TEXTS = "is a text, as are the values below it"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Dialect:
    """names: of the columns. quoting: quotation marks stand around values, else they are text. is_guessed: the
    delimiter was seen, not told."""

    names: tuple[str, ...]
    delimiter: str
    quoting: bool = True
    has_header: bool = True
    is_guessed: bool = False

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.large_string()) for name in self.names])


def read_header(file: str, head: bytes | None, delimiter: str | None, form: FileFormat) -> tuple[Dialect, int]:
    """The dialect that the first lines of a file are in, and the bytes before its first row.

    head: whole lines, None where the first is too long. delimiter: None to see it.
    Raises: DataError for a header that is not UTF-8 or has a column twice, and where names were given for more or
    fewer columns than there are.
    """
    if head is None:
        raise DataError(f"the first line {TOO_LONG.message}", file=file, hint="is its name what it holds?")
    lines = head.splitlines(keepends=True)
    has_header = form.has_header is not False
    found = {each: _first_records(lines, each, 1 if has_header else _RECORDS) for each in delimiter or _DELIMITERS}
    if has_header:
        best = max(found, key=lambda each: len(found[each][0][0]))
    else:
        best = max(found, key=lambda each: _agreement([record for record, _ in found[each]], form.names))
    first, num_lines = found[best][0]
    if not has_header:
        names = _given_names(file, first, best, form.names)
        return Dialect(names, best, has_header=False, is_guessed=delimiter is None), 0
    if bad := bad_utf8(first):
        raise not_utf8(bad, file=file)
    twice = next((name for name in first if first.count(name) > 1), None)
    if twice is not None:
        hint = "rename one of them, or add --no-header if the file has none"
        raise DataError("the header has a column twice", file=file, value=twice, hint=hint)
    return Dialect(tuple(first), best, is_guessed=delimiter is None), sum(map(len, lines[:num_lines]))


def header_notes(names: Sequence[str], form: FileFormat) -> list[str]:
    """A line on names of columns of which none is a usual one: they may be a row."""
    if form.has_header is not None or any(key_of(name) in KNOWN for name in names):
        return []
    shown = listed([f"'{printable(name, 40)}'" for name in names], _SHOWN)
    return [f"header: {shown} (the first line; --no-header reads it as a row)"]


def first_line_doubt(names: Sequence[str], rows: pa.Table, form: FileFormat) -> str | None:
    """One line about a first line that looks like what it is not taken for: a row, or names of columns."""
    if form.has_header is None:
        return header_doubt(names, rows)
    return None if form.has_header else row_doubt(rows)


def title_doubt(first: Sequence[str], rows: pa.Table) -> str | None:
    """One line about a sheet whose first line has one value above several columns: a title, not names."""
    titles = [value for value in first if value.strip()]
    if len(titles) != 1 or rows.num_columns == 1:
        return None
    return (
        f"the first line has one value, '{printable(titles[0], 40)}', above {rows.num_columns} columns, and is read as "
        "their names: if it is a title, delete the lines above the names"
    )


def row_doubt(rows: pa.Table) -> str | None:
    """One line about a first row that looks like names of columns: a usual name, or no number above numbers, and no
    value that is also in a row below."""
    first, *records = [list(row.values()) for row in rows.slice(0, _ROWS).to_pylist()] or [[]]
    judged = [
        _judged(name.strip(), [text.strip() for record in records if (text := record[column]) and text.strip()])
        for column, name in enumerate(first)
        if name and name.strip()
    ]
    if not any(is_name for is_name, _, _ in judged) or any(reason and _AS_TEXTS not in reason for *_, reason in judged):
        return None
    shown = listed([f"'{printable(name, 40)}'" for name in first], _SHOWN)
    return (
        f"the first line looks like names of columns ({shown}), and is read as a row: "
        "without --no-header and --column-names it is read as names"
    )


def header_doubt(names: Sequence[str], rows: pa.Table) -> str | None:
    """One line about a header that looks like a row, and the flags that settle it; None for any other.

    One column that must have been named by its header (a number's is no number, or a usual name) is enough to believe
    it. So is a class's that is none of the classes, unless another column's is a text as the values below it: then it
    may be a class that occurs once.
    """
    named = [name.strip() for name in names if name.strip()]
    if any(named == [str(n) for n in range(first, first + len(named))] for first in (0, 1)):
        return None  # pandas numbers the columns that have no names
    # Files that were put after one another repeat their header; of one column, that is a text like others.
    header = dict(zip(names, names, strict=True)) if len(names) > 1 or key_of(names[0]) in KNOWN else None
    records = [record for record in rows.slice(0, _ROWS).to_pylist() if record != header]
    reasons, has_class_name, has_text = [], False, False
    for name in sorted(names, key=len):  # a class or a number convinces more than a text
        values = [value.strip() for record in records if (value := record[name]) and value.strip()]
        is_name, is_class, reason = _judged(name.strip(), values)
        if is_name:
            return None
        has_class_name, has_text = has_class_name or is_class, has_text or (reason or "").endswith(_AS_TEXTS)
        reasons += [reason] if reason else []
    if not reasons or (has_class_name and not has_text):
        return None
    return (
        f"the first line looks like a row ({reasons[0]}), and is read as names: "
        "--no-header or --column-names reads it as one, --header as names"
    )


def _judged(name: str, values: Sequence[str]) -> tuple[bool, bool, str | None]:
    """True if `name` can only name a column of these values; else True if they are classes and it is none of them, and
    a reason, if any, to take it for one of them."""
    if not values:
        return False, False, None
    shown = f"'{printable(name, 40)}'"
    if all(map(_NUMBER.fullmatch, values)):
        is_number = _NUMBER.fullmatch(name) is not None
        return not is_number, False, f"{shown} is a number, as are all values below it" if is_number else None
    if name in values:
        return False, False, f"{shown} is also a value of its column"
    is_class = len(set(values)) * _ROWS_PER_CLASS <= len(values)
    num_words, mean_words = len(name.split()), sum(len(value.split()) for value in values) / len(values)
    is_text = not is_class and num_words >= max(_WORDS, mean_words / 4)
    return key_of(name) in KNOWN, is_class, f"{shown} {_AS_TEXTS}" if is_text else None


def _given_names(file: str, first: Sequence[str], delimiter: str, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the columns of a file without a header, whose first record is `first`."""
    if names is None:
        return tuple(f"column_{number}" for number in range(1, len(first) + 1))
    if len(names) == len(first):
        return names
    given = f"{len(names)} {'name' if len(names) == 1 else 'names'}"
    raise DataError(
        f"--column-names has {given}, and the first row {len(first)} {'column' if len(first) == 1 else 'columns'}",
        file=file,
        row=1,
        value=delimiter.join(first),
        hint=f"name all columns, in their order; the file is read with the delimiter '{printable(delimiter)}'",
    )


def _agreement(records: Sequence[Sequence[str]], names: tuple[str, ...] | None) -> tuple[bool, bool, int, int]:
    """A measure of a delimiter: it cuts all records into as many columns, into as many as there are names, ..."""
    num_columns = len(records[0])
    num_alike = sum(len(record) == num_columns for record in records) if num_columns > 1 else 0
    return num_alike == len(records), names is not None and num_columns == len(names), num_alike, num_columns


def _first_records(lines: Sequence[bytes], delimiter: str, count: int) -> list[tuple[list[str], int]]:
    """The first records that are not blank, each with the number of lines up to its end.

    Where the first is broken by quotation marks, they are read as text.
    """
    text = [line.decode("utf-8", "surrogateescape") for line in lines]
    with long_values():
        for quoting in (True, False):
            reader, found = csv_reader(text, 0, Dialect((), delimiter, quoting)), list[tuple[list[str], int]]()
            with contextlib.suppress(csv.Error):
                found.extend((record, reader.line_num) for record in itertools.islice(filter(None, reader), count))
            if found:
                return found
    return [([], len(lines))]


def csv_reader(lines: Sequence[str], begin: int, dialect: Dialect) -> _csv.Reader:
    return csv.reader(
        (lines[index] for index in range(begin, len(lines))),
        delimiter=dialect.delimiter,
        quoting=csv.QUOTE_MINIMAL if dialect.quoting else csv.QUOTE_NONE,
        strict=dialect.quoting,
    )


@contextlib.contextmanager
def long_values() -> Iterator[None]:
    """Lets csv read values of any length. Its limit belongs to the whole process, so it is put back."""
    limit = csv.field_size_limit((1 << 31) - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def bad_utf8(values: Iterable[str]) -> bytes | None:
    """The first value with bytes that are not UTF-8."""
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape")
    return None
