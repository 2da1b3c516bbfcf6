"""JSON as a stream: an object per line of files or of a pipe, or a document that is read whole.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from brimful.core.errors import DataError, printable
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.formats import plain_type
from brimful.data.readers.json_rows import DECODER, REFUSED, as_text, column_of, read_arrow, reason
from brimful.data.readers.streams.lines import TOO_LONG, Block, FileLines, PipeLines
from brimful.data.readers.streams.parts import BATCH_ROWS, Part, Piece, RowsRead, in_order, said, unread_row

#: Places in a large file where lines are read to see types and keys that its first rows do not have.
_WINDOWS = 16
_HINT = "each line is one JSON object"
_HOLDS = (
    (pa.types.is_integer, "whole numbers"),
    (pa.types.is_floating, "numbers"),
    (pa.types.is_boolean, "true or false"),
    (pa.types.is_list, "lists"),
    (pa.types.is_struct, "objects"),
)
#: The types of Python's values that a column takes as they are.
_EXACT: dict[pa.DataType, set[type]] = {
    pa.string(): {str, NoneType},
    pa.int64(): {int, NoneType},
    pa.float64(): {float, NoneType},
    pa.bool_(): {bool, NoneType},
}


@dataclass(frozen=True)
class Keys:
    """Type by key of some objects. every: the keys that all of them have, other than null."""

    types: Mapping[str, pa.DataType]
    every: frozenset[str]


class _Line(NamedTuple):
    """What one line holds, or what is wrong with it. is_utf8: else bytes that are not stand as lone surrogates."""

    value: Any
    fault: str | None = None
    is_utf8: bool = True


class JsonLinesPart(Part):
    """The objects in the lines of a file or a pipe. types: by column. keys: those of the first objects."""

    def __init__(self, lines: FileLines | PipeLines, types: Mapping[str, pa.DataType], keys: Keys) -> None:
        self.files, self.size_bytes = (lines.file,), lines.size_bytes
        self._lines, self._columns, self._keys = lines, _Columns(types), keys
        self.schema = self._columns.schema

    @property
    def always(self) -> frozenset[str]:
        return self._keys.every

    @property
    def seen(self) -> frozenset[str]:
        return frozenset(self._keys.types)

    def notes(self) -> list[str]:
        names = [f"'{printable(name)}'" for name in self._columns.left_out]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        said = f"left out, as the first rows do not have it: {', '.join(names[:5])}{more}"
        return [f"{printable(self.files[0])}: {said}"] if names else []

    def pieces(self, start: int) -> Iterator[Piece]:
        return in_order(self._tables())

    def _tables(self) -> Iterator[RowsRead]:
        for data, _ in self._lines.blocks():
            self.share = self._lines.share
            yield (unread_row(self.schema), {0: TOO_LONG}) if data is None else self._columns.read(data)


class JsonPipePart(JsonLinesPart):
    """The objects in the lines of a pipe. They can be read once."""

    def __init__(self, pipe: BinaryIO) -> None:
        lines = PipeLines(pipe)
        head = _whole_lines(lines.head(lambda data: keys_of(_whole_lines(data)) is not None))
        keys = _keys_in(lines.file, head)
        super().__init__(lines, _column_types([keys]), keys)
        self._rest = super().pieces(0)
        self._first: Piece | None = None
        self._is_given = False

    def peek(self) -> Piece | None:
        self._first = self._first or next((piece for piece in self._rest if piece.table.num_rows), None)
        return self._first

    def pieces(self, start: int) -> Iterator[Piece]:
        if self._is_given:
            raise ValueError("a pipe can be read only once")
        self._is_given = True
        if first := self.peek():
            self._first = None
            yield first
            yield from self._rest


class JsonObjectsPart(Part):
    """The values in the array of a document, those that are no objects too."""

    def __init__(self, file: str, values: Sequence[Any]) -> None:
        self.files, self.size_bytes, self.num_rows = (file,), Path(file).stat().st_size, len(values)
        objects = [value for value in values if isinstance(value, dict)]
        if values and not objects:
            raise DataError("is not a JSON object", file=file, row=1, value=json.dumps(values[0]), hint=_HINT)
        self._values, self._columns = values, _Columns(_column_types([_keys_of_objects(objects)]))
        self.schema = self._columns.schema

    def pieces(self, start: int) -> Iterator[Piece]:
        for row in range(start, len(self._values), BATCH_ROWS):
            batch = self._values[row : row + BATCH_ROWS]
            yield Piece(row, *self._columns.of(_Line(value) for value in batch))


def json_lines_parts(files: Sequence[str]) -> list[JsonLinesPart]:
    """The parts of all files of lines of a stream, with the same columns.

    Raises: DataError for a file without an object in its first lines.
    """
    all_lines = [FileLines(file) for file in files]
    heads = [next(lines.blocks(), Block(b"")) if index == 0 else lines.head() for index, lines in enumerate(all_lines)]
    keys = [_keys_in(file, head.data) for file, head in zip(files, heads, strict=True)]
    windows = (keys_of(window) for lines in all_lines for window in lines.windows(max(1, _WINDOWS // len(files))))
    types = _column_types([*keys, *filter(None, windows)])
    return [JsonLinesPart(lines, types, each) for lines, each in zip(all_lines, keys, strict=True)]


# The types of columns


def keys_of(lines: bytes) -> Keys | None:
    """The keys of the objects in `lines`, None if there is none. Lines that hold something else are passed over."""
    try:
        table = read_arrow(lines, len(lines) + 1)
    except REFUSED:
        values = [_parsed(line).value for line in lines.split(b"\n")]
        objects = [value for value in values if isinstance(value, dict)]
        return _keys_of_objects(objects) if objects else None
    every = frozenset(name for name in table.column_names if table[name].null_count == 0)
    return Keys({field.name: field.type for field in table.schema}, every) if table.num_columns else None


def _keys_in(file: str, lines: bytes | None) -> Keys:
    if lines is not None and not lines.strip():
        raise DataError("is empty", file=file, hint="it needs rows of texts: is it the right file?")
    keys = keys_of(lines) if lines is not None else Keys({}, frozenset())
    if keys is None:
        line = _parsed(lines.strip().split(b"\n")[0]) if lines else _Line(None)
        without = "is an object without keys" if line.value == {} else "is not a JSON object"
        raise DataError(line.fault or without, file=file, row=1, hint=_HINT)
    return keys


def _keys_of_objects(objects: Sequence[Mapping[str, Any]]) -> Keys:
    names = dict.fromkeys(name for each in objects for name in each if _is_text(name))
    columns = {name: [each.get(name) for each in objects] for name in names}
    every = frozenset(name for name, values in columns.items() if None not in values)
    return Keys({name: _type_of(values) for name, values in columns.items()}, every)


def _type_of(values: Sequence[Any]) -> pa.DataType:
    try:
        return column_of(values).type
    except UnicodeEncodeError:  # half of a surrogate pair in a text
        return pa.string()


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _column_types(keys: Iterable[Keys]) -> dict[str, pa.DataType]:
    """Types that pyarrow's reader of JSON knows, for the values of all `keys`."""
    all_types = [each.types for each in keys]
    names = dict.fromkeys(name for types in all_types for name in types)
    return {
        name: _without_null(reduce(_merged, (types[name] for types in all_types if name in types))) for name in names
    }


def _merged(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type that values of both fit."""
    if left == right or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if pa.types.is_list(left) and pa.types.is_list(right):
        return pa.list_(_merged(left.value_type, right.value_type))
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        fields = {field.name: field.type for field in left}
        for field in right:
            fields[field.name] = _merged(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items()))
    if {left, right} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return pa.string()


def _without_null(kind: pa.DataType) -> pa.DataType:
    """Text for what holds nothing."""
    if pa.types.is_list(kind):
        return pa.list_(_without_null(kind.value_type))
    if pa.types.is_struct(kind) and kind.num_fields:
        return pa.struct([(field.name, _without_null(field.type)) for field in kind])
    return kind if kind in (pa.int64(), pa.float64(), pa.bool_()) else pa.string()


# Objects -> columns


class _MisfitError(ValueError):
    """A value that its column cannot hold."""


class _Columns:
    """Makes tables of fixed columns. left_out: the keys that were met and are none of them."""

    def __init__(self, types: Mapping[str, pa.DataType]) -> None:
        self._types = types
        self._as_read = pa.schema(list(types.items()))
        self.schema = pa.schema([(name, plain_type(kind)) for name, kind in types.items()])
        self.left_out: dict[str, None] = {}

    def read(self, data: bytes) -> RowsRead:
        """The rows in a block of lines, one per line that is not blank."""
        table = self._read_fast(data)
        return (
            (table, {}) if table is not None else self.of(_parsed(line) for line in data.split(b"\n") if line.strip())
        )

    def _read_fast(self, data: bytes) -> pa.Table | None:
        """What pyarrow makes of the lines, None if it refuses one or takes it for something else."""
        try:
            if not data.isascii():
                data.decode()
            table = read_arrow(data, len(data) + 1, self._as_read)
        except REFUSED:
            return None
        num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if table.num_rows != num_lines or any(table[name].type != kind for name, kind in self._types.items()):
            return None
        self.left_out.update(dict.fromkeys(name for name in table.column_names if name not in self._types))
        return table.select(list(self._types)).cast(self.schema)

    def of(self, lines: Iterable[_Line]) -> RowsRead:
        """A row per line, null where its value cannot be had."""
        lines = list(lines)
        faults = {row: line.fault for row, line in enumerate(lines) if line.fault is not None}
        for row, line in enumerate(lines):
            if not isinstance(line.value, dict):
                faults.setdefault(row, said("is not a JSON object", json.dumps(line.value)))
        records = [line.value if isinstance(line.value, dict) else {} for line in lines]
        for key in itertools.chain.from_iterable(records):
            if key not in self._types:
                self.left_out[key] = None
        arrays = [self._column(name, [record.get(name) for record in records], lines, faults) for name in self._types]
        return pa.table(arrays, schema=self.schema), faults

    def _column(self, name: str, values: list[Any], lines: Sequence[_Line], faults: dict[int, str]) -> pa.Array:
        """The values of a column, null where they do not fit; adds to `faults` why, where nothing is said of a row."""
        kind = self._types[name]
        if {type(value) for value in values} <= _EXACT.get(kind, set()):
            try:
                return pa.array(values, plain_type(kind))
            except (UnicodeEncodeError, OverflowError):
                pass
        for row, value in enumerate(values):
            values[row], fault = self._value(name, value, kind, lines[row].is_utf8)
            if fault is not None:
                faults.setdefault(row, fault)
        return pa.array(values, plain_type(kind))

    def _value(self, name: str, value: Any, kind: pa.DataType, is_utf8: bool) -> tuple[Any, str | None]:
        """The value as the column has it, or None and what is wrong with it."""
        try:
            return self._fitted(value, kind, name), None
        except UnicodeEncodeError as error:
            if not is_utf8:
                wrong = str(not_utf8(error.object.encode("utf-8", "surrogateescape")))
            else:
                half = json.dumps(error.object[max(0, error.start - 20) : error.start + 20])
                wrong = said("has half of a surrogate pair, which is no character", half)
        except _MisfitError:
            holds = next((words for is_kind, words in _HOLDS if is_kind(kind)), "text")
            wrong = said(f"holds {holds}, not this", json.dumps(value))
        return None, f"column '{printable(name)}' {wrong}"

    def _fitted(self, value: Any, kind: pa.DataType, path: str) -> Any:
        if value is None:
            return None
        if pa.types.is_string(kind):
            text = as_text(value) or ""
            text.encode()
            return text
        if pa.types.is_list(kind) and isinstance(value, list):
            return [self._fitted(each, kind.value_type, path) for each in value]
        if pa.types.is_struct(kind) and isinstance(value, dict):
            types = {field.name: field.type for field in kind}
            self.left_out.update(dict.fromkeys(f"{path}.{key}" for key in value.keys() - types.keys()))
            return {key: self._fitted(value.get(key), each, f"{path}.{key}") for key, each in types.items()}
        if pa.types.is_boolean(kind) and isinstance(value, bool):
            return value
        return _number(value, kind)


def _number(value: Any, kind: pa.DataType) -> int | float:
    """Raises: _MisfitError for what is no number, or none that the type can hold."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if pa.types.is_floating(kind) and (isinstance(value, float) or abs(value) < 1 << 1023):
            return float(value)
        if pa.types.is_integer(kind) and -(2.0**63) <= value < 2.0**63 and value == int(value):
            return int(value)
    raise _MisfitError


# Lines -> objects


def _parsed(line: bytes) -> _Line:
    is_utf8 = True
    try:
        text = line.decode()
    except UnicodeDecodeError:
        text, is_utf8 = line.decode("utf-8", "surrogateescape"), False
    try:
        return _Line(DECODER.decode(text), None, is_utf8)
    except (ValueError, RecursionError) as error:
        return _Line(None, said(f"is not JSON ({reason(error)})", line.strip().decode("utf-8", "backslashreplace")))


def _whole_lines(data: bytes) -> bytes:
    """Without a line that has begun, unless there is no other."""
    return data[: data.rfind(b"\n") + 1] or data
