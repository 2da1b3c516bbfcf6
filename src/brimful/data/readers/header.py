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

from brimful.core.errors import DataError, printable
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
_AS_TEXTS = "is a text, as are the values below it"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Dialect:
    """names: of the columns. quoting: quotation marks stand around values, else they are text."""

    names: tuple[str, ...]
    delimiter: str
    quoting: bool = True
    has_header: bool = True

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
        return Dialect(_given_names(file, first, best, form.names), best, has_header=False), 0
    if bad := bad_utf8(first):
        raise not_utf8(bad, file=file)
    twice = next((name for name in first if first.count(name) > 1), None)
    if twice is not None:
        hint = "rename one of them, or add --no-header if the file has none"
        raise DataError("the header has a column twice", file=file, value=twice, hint=hint)
    return Dialect(tuple(first), best), sum(map(len, lines[:num_lines]))


def header_doubt(names: Sequence[str], rows: pa.Table) -> str | None:
    """One line about a header that looks like a row, and the flags that settle it; None for any other.

    One column that must have been named by its header (a number's is no number, or a usual name) is enough to believe
    it. So is a class's that is none of the classes, unless another column's is a text as the values below it: then it
    may be a class that occurs once.
    """
    named = [name.strip() for name in names if name.strip()]
    if any(named == [str(n) for n in range(first, first + len(named))] for first in (0, 1)):
        return None  # pandas numbers the columns that have no names
    records = [record for record in rows.slice(0, _ROWS).to_pylist() if record != dict(zip(names, names, strict=True))]
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
        return _NUMBER.fullmatch(name) is None, False, f"{shown} is a number, as are all values below it"
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
