"""Rows of JSON: an object per line of files or of a pipe, or the objects of a document.

The types of the columns are fixed by the first rows (of files: the first 4 MB, the beginnings of the others, and lines
here and there in all of them), so that all tables of a stream have the same. A column that holds several types there is
text; one of nulls is text too. Later anything fits text, and a whole number fits a column of fractions; where a value
does not fit, as text in a column of numbers, its row gets an error and keeps its other values. A key that none of the
first rows had is left out, and named in the notes.

A block of lines is read by pyarrow; one that it refuses, or reads as other types, by Python, line by line.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from brimful.core.errors import DataError, listed, printable
from brimful.data.readers.formats import NEEDS_ROWS
from brimful.data.readers.json_columns import JsonColumns
from brimful.data.readers.json_types import (
    ONE_PER_LINE,
    Keys,
    Line,
    column_types,
    keys_of,
    keys_of_objects,
    parse_line,
)
from brimful.data.readers.lines import TOO_LONG, Block, FileLines, PipeLines
from brimful.data.readers.parts import BATCH_ROWS, Part, Piece, RowsRead, in_order

#: Places in a large file where lines are read to see types and keys that its first rows do not have.
_WINDOWS = 16
_PLAIN_LINES = (
    f"{ONE_PER_LINE}; of plain lines make it by jq -Rc '{{text: .}}', or write them to a .txt file and name that"
)


class JsonLinesPart(Part):
    """The objects in the lines of a file or a pipe. types: by column. keys: those of the first objects."""

    def __init__(self, lines: FileLines | PipeLines, types: Mapping[str, pa.DataType], keys: Keys) -> None:
        self.files, self.size_bytes = (lines.file,), lines.size_bytes
        self._lines, self._columns, self._keys = lines, JsonColumns(types), keys
        self.schema = self._columns.schema

    @property
    def always(self) -> frozenset[str]:
        return self._keys.every

    @property
    def seen(self) -> frozenset[str]:
        return frozenset(self._keys.types)

    def notes(self) -> list[str]:
        names = [f"'{printable(name)}'" for name in self._columns.left_out]
        said = f"left out, as the first rows do not have it: {listed(names, 5)}"
        left_out = [f"{printable(self.files[0])}: {said}"] if names else []
        return [*left_out, *filter(None, [self._lines.note()])]

    def pieces(self, start: int) -> Iterator[Piece]:
        return in_order(self._tables())

    def _tables(self) -> Iterator[RowsRead]:
        for data, _ in self._lines.blocks():
            self.share = self._lines.share
            yield (pa.Table.from_pylist([{}], self.schema), {0: TOO_LONG}) if data is None else self._columns.read(data)


class JsonPipePart(JsonLinesPart):
    """The objects in the lines of a pipe. They can be read once."""

    def __init__(self, pipe: BinaryIO) -> None:
        lines = PipeLines(pipe)
        head = _whole_lines(lines.head(lambda data: keys_of(_whole_lines(data)) is not None))
        keys = _keys_in(lines.file, head)
        super().__init__(lines, column_types([keys]), keys)
        self._left: Iterator[Piece] | None = super().pieces(0)

    def peek(self) -> Piece | None:
        left = self.pieces(0)
        first = next((piece for piece in left if piece.table.num_rows), None)
        self._left = itertools.chain(filter(None, [first]), left)
        return first

    def pieces(self, start: int) -> Iterator[Piece]:
        if self._left is None:
            raise ValueError("a pipe can be read only once")
        left, self._left = self._left, None
        return left


class JsonObjectsPart(Part):
    """The values in the array of a document, those that are no objects too."""

    def __init__(self, file: str, values: Sequence[Any]) -> None:
        self.files, self.size_bytes, self.num_rows = (file,), Path(file).stat().st_size, len(values)
        objects = [value for value in values if isinstance(value, dict)]
        if values and not objects:
            raise DataError("is not a JSON object", file=file, row=1, value=json.dumps(values[0]), hint=ONE_PER_LINE)
        self._values, self._columns = values, JsonColumns(column_types([keys_of_objects(objects)]))
        self.schema = self._columns.schema

    def pieces(self, start: int) -> Iterator[Piece]:
        for row in range(start, len(self._values), BATCH_ROWS):
            batch = self._values[row : row + BATCH_ROWS]
            yield Piece(row, *self._columns.of(Line(value) for value in batch))


def json_lines_parts(files: Sequence[str], encoding: str | None = None) -> list[JsonLinesPart]:
    """The parts of all files of lines of a stream, with the same columns.

    encoding: None for UTF-8, as JSON is by its standard.
    Raises: DataError for a file without an object in its first lines.
    """
    all_lines = [FileLines(file, encoding=encoding or "utf-8") for file in files]
    heads = [next(lines.blocks(), Block(b"")) if index == 0 else lines.head() for index, lines in enumerate(all_lines)]
    keys = [_keys_in(file, head.data) for file, head in zip(files, heads, strict=True)]
    windows = (keys_of(window) for lines in all_lines for window in lines.windows(max(1, _WINDOWS // len(files))))
    types = column_types([*keys, *filter(None, windows)])
    return [JsonLinesPart(lines, types, each) for lines, each in zip(all_lines, keys, strict=True)]


def _keys_in(file: str, lines: bytes | None) -> Keys:
    if lines is not None and not lines.strip():
        raise DataError("is empty", file=file, hint=NEEDS_ROWS)
    keys = keys_of(lines) if lines is not None else Keys({}, frozenset())
    if keys is None:
        line = parse_line(lines.strip().split(b"\n")[0]) if lines else Line(None)
        without = "is an object without keys" if line.value == {} else "is not a JSON object"
        fault = line.fault or DataError(without, hint=ONE_PER_LINE)
        if file == PipeLines.file:
            fault = DataError(fault.message, value=fault.value, hint=_PLAIN_LINES)
        raise fault.at(file, 1)
    return keys


def _whole_lines(data: bytes) -> bytes:
    """Without a line that has begun, unless there is no other."""
    return data[: data.rfind(b"\n") + 1] or data
