"""Objects of JSON -> tables of fixed columns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import pyarrow as pa

from brimful.core.errors import DataError, encodes
from brimful.data.readers.column_types import plain_type
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.json_types import ONE_PER_LINE, REFUSED, Line, as_text, parse_line, read_arrow
from brimful.data.readers.parts import RowsRead

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


class _MisfitError(ValueError):
    """A value that its column cannot hold."""


class JsonColumns:
    """Makes tables of fixed columns. left_out: the keys that were met and are none of them."""

    def __init__(self, types: Mapping[str, pa.DataType]) -> None:
        self._types = types
        self._as_read = pa.schema(list(types.items()))
        self.schema = pa.schema([(name, plain_type(kind)) for name, kind in types.items()])
        self.left_out: dict[str, None] = {}

    def read(self, data: bytes) -> RowsRead:
        """The rows in a block of lines, one per line that is not blank."""
        table = self._read_fast(data)
        if table is not None:
            return table, {}
        return self.of(parse_line(line) for line in data.split(b"\n") if line.strip())

    def _read_fast(self, data: bytes) -> pa.Table | None:
        """The table that pyarrow makes of the lines, None if it refuses one or takes it for something else."""
        try:
            if not data.isascii():
                data.decode()
            table = read_arrow(data, self._as_read)
        except REFUSED:
            return None
        num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if table.num_rows != num_lines or any(table[name].type != kind for name, kind in self._types.items()):
            return None
        self.left_out.update(dict.fromkeys(name for name in table.column_names if name not in self._types))
        return table.select(list(self._types)).cast(self.schema)

    def of(self, lines: Iterable[Line]) -> RowsRead:
        """A row per line, null where its value cannot be had."""
        lines = list(lines)
        faults = {row: line.fault for row, line in enumerate(lines) if line.fault is not None}
        records = [line.value if isinstance(line.value, dict) else {} for line in lines]
        for row, line in enumerate(lines):
            if not isinstance(line.value, dict):
                fault = DataError("is not a JSON object", value=json.dumps(line.value), hint=ONE_PER_LINE)
                faults.setdefault(row, fault)
            elif not line.is_utf8 and (bad := next(itertools.filterfalse(encodes, line.value), None)):
                faults[row] = not_utf8(bad.encode("utf-8", "surrogateescape"))
        keys = itertools.chain.from_iterable(records)
        self.left_out.update(dict.fromkeys(key for key in keys if key not in self._types))
        arrays = [self._column(name, [record.get(name) for record in records], lines, faults) for name in self._types]
        return pa.table(arrays, schema=self.schema), faults

    def _column(self, name: str, values: list[Any], lines: Sequence[Line], faults: dict[int, DataError]) -> pa.Array:
        """The values of a column, null where they do not fit; adds why to `faults` where a row has none yet."""
        kind = self._types[name]
        if {type(value) for value in values} <= _EXACT.get(kind, set()):
            try:
                return pa.array(values, plain_type(kind))
            except (UnicodeEncodeError, OverflowError):
                pass
        for row, value in enumerate(values):
            try:
                values[row] = self._fitted(value, kind, name)
            except (UnicodeEncodeError, _MisfitError) as error:
                values[row] = None
                faults.setdefault(row, _fault(error, value, kind, lines[row].is_utf8).in_column(name))
        return pa.array(values, plain_type(kind))

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


def _fault(error: UnicodeEncodeError | _MisfitError, value: Any, kind: pa.DataType, is_utf8: bool) -> DataError:
    """The reason why a column of `kind` has not the value."""
    if isinstance(error, _MisfitError):
        holds = next((words for is_kind, words in _HOLDS if is_kind(kind)), "text")
        hint = "write all values of a column as one type, or leave the column out"
        return DataError(f"holds {holds}, not this", value=json.dumps(value), hint=hint)
    if not is_utf8:
        return not_utf8(error.object.encode("utf-8", "surrogateescape"))
    half = json.dumps(error.object[max(0, error.start - 20) : error.start + 20])
    hint = "remove it, or write the whole character"
    return DataError("has half of a surrogate pair, which is no character", value=half, hint=hint)
