"""CSV and TSV, every value as the text in the file.

No file says whether it quotes its values. Most do; many TSVs hold bare quotation marks, which a quoting reader takes
for the beginning of a value, and swallows rows until the next one. The first few MB that have any decide.

A block of lines is read by pyarrow where quotation marks stand around values and nowhere else: then it is clear which
line ends are within values. Any other block, and one that pyarrow refuses, is read by Python's slow but exact parser.
There a quotation mark that opens a value and is not closed (the file ends, the row grows beyond all measure, or text
follows the next mark) makes its own line a row that cannot be read, and the rows go on in the next line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from brimful.core.errors import DataError, printable
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.header import (
    Dialect,
    bad_utf8,
    csv_reader,
    first_line_doubt,
    header_notes,
    long_values,
    read_header,
)
from brimful.data.readers.lines import ROW_BYTES, TOO_LONG, FileLines
from brimful.data.readers.parts import Part, Piece, RowsRead, in_order

_QUOTE = ord('"')
#: A value in quotation marks that goes on for longer at the end of that block is taken for one that never ends.
_LONG_ROW_BYTES = 1 << 20


class DelimitedPart(Part):
    """The rows of a CSV or TSV file, every value as the text that stands in it. delimiter: None to see it."""

    def __init__(self, file: str, delimiter: str | None = None, form: FileFormat | None = None) -> None:
        self.files, self._form = (file,), form or FileFormat()
        self._lines = FileLines(file, (b"\n", b"\r"), self._form.encoding)
        self.size_bytes = self._lines.size_bytes
        delimiter = self._form.delimiter or delimiter
        self._dialect, self._header_bytes = read_header(file, self._lines.head().data, delimiter, self._form)
        self.schema = self._dialect.schema

    def notes(self) -> list[str]:
        marks = "quotation marks are read as text, as they do not stand around values"
        quotes = [] if self._dialect.quoting else [f"{printable(self.files[0])}: {marks}"]
        return [*quotes, *filter(None, [self._lines.note()])]

    def guesses(self) -> list[str]:
        delimiter = printable(self._dialect.delimiter)
        said = [f"delimiter: '{delimiter}' (by the first line; --delimiter names another)"]
        is_usual = self._dialect.delimiter == "," or not self._dialect.is_guessed
        names = [] if self._doubt else header_notes(self._dialect.names, self._form)
        return [*([] if is_usual else said), *names]

    def warnings(self) -> list[str]:
        return [f"{printable(self.files[0])}: {self._doubt}"] if self._doubt else []

    @cached_property
    def _doubt(self) -> str | None:
        """A likely mistake about the first line, seen from the first rows."""
        apart = copy(self)  # lines that are being read count what is not UTF-8 in them
        apart._lines = FileLines(self.files[0], (b"\n", b"\r"), self._form.encoding)
        piece = None if self._form.has_header else apart.peek()
        return None if piece is None else first_line_doubt(self._dialect.names, piece.table, self._form)

    def pieces(self, start: int) -> Iterator[Piece]:
        return in_order(self._tables())

    def _tables(self) -> Iterator[RowsRead]:
        begun, is_head, is_decided = b"", True, False
        for data, is_last in self._lines.blocks():
            self.share = self._lines.share
            if data is None:
                yield _parse(begun, self._dialect, is_last=True)[0]
                yield pa.Table.from_pylist([{}], self.schema), {0: TOO_LONG}
                begun = b""
                continue
            if is_head:
                data, is_head = data[self._header_bytes :], False
            data = begun + data
            if not is_decided and b'"' in data:
                self._dialect, is_decided = _with_quoting(self._dialect, data, is_last), True
            rows, end = _parse(data, self._dialect, is_last=is_last)
            begun = data[end:]
            yield rows
        yield _parse(begun, self._dialect, is_last=True)[0]


def _with_quoting(dialect: Dialect, head: bytes, is_last: bool) -> Dialect:
    """The dialect in which fewer rows of a block are wrong; where they are equal, marks stand around values."""
    end = _end_of_rows(head, dialect)
    is_last = is_last or (end is not None and len(head) - end > _LONG_ROW_BYTES)
    if end is not None and (end == len(head) or not is_last) and _read_fast(head[:end], dialect) is not None:
        return dialect
    plain = replace(dialect, quoting=False)
    return plain if _num_wrong(head, plain, is_last) < _num_wrong(head, dialect, is_last) else dialect


def _num_wrong(data: bytes, dialect: Dialect, is_last: bool) -> int:
    lines = _decoded(data)
    with long_values():
        records = _records(lines, dialect, is_last=is_last, lenient=False)
        return sum(isinstance(record, DataError) or len(record) != len(dialect.names) for record, _ in records)


def _parse(data: bytes, dialect: Dialect, *, is_last: bool) -> tuple[RowsRead, int]:
    """The rows in `data` and where they end: before a row that may go on in the next block, unless this is the last."""
    end = _end_of_rows(data, dialect)
    if end is not None and (end == len(data) or not (is_last or len(data) - end > ROW_BYTES)):
        table = _read_fast(data[:end], dialect)
        if table is not None:
            return (table, {}), end
    return _read_slowly(data, dialect, is_last=is_last)


def _end_of_rows(data: bytes, dialect: Dialect) -> int | None:
    """End of the last whole row of lines; None where quotation marks stand elsewhere than around values."""
    if not dialect.quoting:
        return len(data)
    codes = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(codes == _QUOTE)
    is_bound = np.zeros(256, bool)  # what stands before a mark that opens, or after one that closes
    is_bound[[_QUOTE, ord("\n"), ord("\r"), ord(dialect.delimiter)]] = True
    opening, closing = quotes[::2], quotes[1::2]
    before = is_bound[codes[opening[opening > 0] - 1]]
    after = is_bound[codes[closing[closing + 1 < len(codes)] + 1]]
    if not (before.all() and after.all()):
        return None
    end = len(data)
    while (num_before := int(np.searchsorted(quotes, end))) % 2:  # the line ends within a value
        opens = int(quotes[num_before - 1])
        end = max(data.rfind(b"\n", 0, opens), data.rfind(b"\r", 0, opens)) + 1
    return end


def _read_fast(data: bytes, dialect: Dialect) -> pa.Table | None:
    """The table that pyarrow makes of whole rows, None if it refuses one."""
    if not data:
        return dialect.schema.empty_table()
    try:
        return pacsv.read_csv(
            pa.BufferReader(data),
            read_options=pacsv.ReadOptions(column_names=dialect.names, block_size=len(data) + 1, use_threads=False),
            parse_options=pacsv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char='"' if dialect.quoting else False,
                newlines_in_values=dialect.quoting,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(dialect.names, pa.large_string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid:
        return None


def _read_slowly(data: bytes, dialect: Dialect, *, is_last: bool) -> tuple[RowsRead, int]:
    lines = _decoded(data)
    records: list[Sequence[str | None]] = []
    faults: dict[int, DataError] = {}
    unread = (None,) * len(dialect.names)
    num_lines = 0
    is_mixed = any(line.endswith("\n") for line in lines)
    with long_values():
        for record, num_lines in _records(lines, dialect, is_last=is_last):
            if isinstance(record, list) and len(record) == len(dialect.names):
                records.append(record)
            else:
                cut = is_mixed and any(line.endswith("\r") for line in lines[max(0, num_lines - 2) : num_lines])
                faults[len(records)] = record if isinstance(record, DataError) else _ragged(record, dialect, cut=cut)
                records.append(unread)
    columns = zip(*records, strict=True) if records else [()] * len(dialect.names)
    arrays = [_as_column(name, values, faults) for name, values in zip(dialect.names, columns, strict=True)]
    end = len(data) - sum(len(line.encode("utf-8", "surrogateescape")) for line in lines[num_lines:])
    return (pa.table(arrays, schema=dialect.schema), faults), end


def _as_column(name: str, values: Sequence[str | None], faults: dict[int, DataError]) -> pa.Array:
    """Text, null where it is not UTF-8."""
    try:
        return pa.array(values, pa.large_string())
    except UnicodeEncodeError:
        bad = {row: raw for row, value in enumerate(values) if value and (raw := bad_utf8([value]))}
        for row, raw in bad.items():
            faults.setdefault(row, not_utf8(raw).in_column(name))
        return pa.array([None if row in bad else value for row, value in enumerate(values)], pa.large_string())


def _records(
    lines: Sequence[str], dialect: Dialect, *, is_last: bool, lenient: bool = True
) -> Iterator[tuple[list[str] | DataError, int]]:
    """Each row, or the fault of the line that one should begin in, and the number of lines up to its end.

    is_last: whether the last row ends with the last line; else it may go on elsewhere, and is left out.
    lenient: whether a row in one line may have text after a mark that closes, as in `"so" it goes,1`.
    """
    at, in_doubt = 0, False
    while at < len(lines):
        begin = at
        reader = csv_reader(lines, begin, dialect)
        try:
            for record in reader:
                first, at = at, begin + reader.line_num
                if in_doubt and at == first + 1 and lines[first].count('"') % 2:
                    yield _not_closed(lines[first], dialect), at
                elif record:
                    in_doubt = in_doubt and len(record) != len(dialect.names)
                    yield record, at
            return
        except csv.Error:
            read_to = begin + reader.line_num
        closed = _closed_line(lines[at], dialect) if lenient and read_to == at + 1 else None
        may_go_on = closed is None and read_to == len(lines) and not is_last
        if may_go_on and sum(map(len, lines[at:])) <= ROW_BYTES:
            return
        in_doubt = closed is None
        yield closed or _not_closed(lines[at], dialect), at + 1
        at += 1


def _closed_line(line: str, dialect: Dialect) -> list[str] | None:
    """A line as a row of its own, text after a mark that closes being part of the value; None if a value stays open."""
    reader = csv.reader([line.rstrip("\r\n") + "\n", ""], delimiter=dialect.delimiter)
    record = next(reader)
    return record if reader.line_num == 1 else None


def _decoded(data: bytes) -> list[str]:
    """Lines; bytes that are not UTF-8 come as lone surrogates."""
    return [line.decode("utf-8", "surrogateescape") for line in data.splitlines(keepends=True)]


def _not_closed(line: str, dialect: Dialect) -> DataError:
    said = "a quotation mark opens and does not close"
    hint = _other_delimiter(dialect) or 'close it, and write " within a value as ""'
    return DataError(said, value=line.rstrip(), hint=hint)


def _other_delimiter(dialect: Dialect) -> str | None:
    """Return a hint where the only name of a column looks like several, with another character between them."""
    found = None if len(dialect.names) > 1 else re.search(r"(?<=\w)[^\w\s.-](?=\w)", dialect.names[0])
    if found is None:
        return None
    name, between = printable(dialect.names[0], 60), printable(found[0])
    return f"the header '{name}' is one column; if '{between}' stands between columns, add --delimiter '{between}'"


def _ragged(record: Sequence[str], dialect: Dialect, *, cut: bool) -> DataError:
    """cut: whether a carriage return ends the row or the one before, in a file whose lines end otherwise."""
    delimiter = printable(dialect.delimiter)
    if other := _other_delimiter(dialect):
        hint = other
    elif any("\n" in value for value in record):
        hint = 'a quotation mark opens here and closes rows later: write " within a value as ""'
    elif cut:
        hint = "a carriage return (\\r) within a value ends the row: put quotation marks around that value"
        hint += " (pandas: to_csv(..., quoting=csv.QUOTE_ALL)), or replace it"
    elif len(record) < len(dialect.names):
        hint = f"is the row cut off? The file is read with the delimiter '{delimiter}'"
    else:
        hint = f"put quotation marks around values that hold the delimiter '{delimiter}'"
    columns = "1 column" if len(record) == 1 else f"{len(record)} columns"
    said = f"{columns}, the {'header' if dialect.has_header else 'first row'} has {len(dialect.names)}"
    return DataError(said, value=dialect.delimiter.join(record), hint=hint)
