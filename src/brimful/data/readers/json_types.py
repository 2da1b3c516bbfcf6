"""Types of JSON: of each key's values, and the one that the values of all places that were looked at fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.json as pajson

from brimful.core.errors import DataError, encodes

REFUSED = (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError)
ONE_PER_LINE = 'each line is one JSON object, as in {"text": "..."}'


@dataclass(frozen=True)
class Keys:
    """Type by key of some objects. every: the keys that all of them have, other than null."""

    types: Mapping[str, pa.DataType]
    every: frozenset[str]


class Line(NamedTuple):
    """The value in one line, or its fault. is_utf8: else bytes that are not stand as lone surrogates."""

    value: Any
    fault: DataError | None = None
    is_utf8: bool = True


def keys_of(lines: bytes) -> Keys | None:
    """The keys of the objects in `lines`, None if there is none. Lines that hold something else are passed over."""
    try:
        table = read_arrow(lines)
    except REFUSED:
        values = [parse_line(line).value for line in lines.split(b"\n")]
        objects = [value for value in values if isinstance(value, dict)]
        return keys_of_objects(objects) if objects else None
    every = frozenset(name for name in table.column_names if table[name].null_count == 0)
    return Keys({field.name: field.type for field in table.schema}, every) if table.num_columns else None


def keys_of_objects(objects: Sequence[Mapping[str, Any]]) -> Keys:
    """The keys of these objects."""
    names = dict.fromkeys(name for each in objects for name in each if encodes(name))
    columns = {name: [each.get(name) for each in objects] for name in names}
    every = frozenset(name for name, values in columns.items() if None not in values)
    return Keys({name: _type_of(values) for name, values in columns.items()}, every)


def _type_of(values: Sequence[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):  # mixed, or half a surrogate pair
        return pa.string()


def column_types(keys: Iterable[Keys]) -> dict[str, pa.DataType]:
    """Types that pyarrow's reader of JSON knows, for the values of all `keys`."""
    all_types = [each.types for each in keys]
    names = dict.fromkeys(name for types in all_types for name in types)
    merged = {name: reduce(_merged, (types[name] for types in all_types if name in types)) for name in names}
    known = (pa.int64(), pa.float64(), pa.bool_())  # the rest is text, null too
    return {name: _mapped(kind, lambda each: each if each in known else pa.string()) for name, kind in merged.items()}


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


def _mapped(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """`kind` with every type inside of its lists and objects changed."""
    if pa.types.is_list(kind):
        return pa.list_(_mapped(kind.value_type, change))
    if pa.types.is_struct(kind) and kind.num_fields:
        return pa.struct([(field.name, _mapped(field.type, change)) for field in kind])
    return change(kind)


def read_arrow(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """The table that pyarrow makes of lines or of one document, with strings that look like times kept as strings.

    schema: types of some columns.
    """
    read_options = pajson.ReadOptions(block_size=len(data) + 1)
    parse_options = pajson.ParseOptions(newlines_in_values=True, explicit_schema=schema)
    table = pajson.read_json(pa.BufferReader(data), read_options, parse_options)

    def times_as_text(kind: pa.DataType) -> pa.DataType:
        return pa.string() if pa.types.is_timestamp(kind) else kind

    with_texts = pa.schema([(field.name, _mapped(field.type, times_as_text)) for field in table.schema])
    return table if schema is not None or table.schema.equals(with_texts) else read_arrow(data, with_texts)


def parse_line(line: bytes) -> Line:
    """The value in a line. An object with a key twice is refused."""
    is_utf8 = True
    try:
        text = line.decode()
    except UnicodeDecodeError:
        text, is_utf8 = line.decode("utf-8", "surrogateescape"), False
    try:
        return Line(_DECODER.decode(text), None, is_utf8)
    except (ValueError, RecursionError) as error:
        shown = line.strip().decode("utf-8", "backslashreplace")
        return Line(None, DataError(f"is not JSON ({reason(error)})", value=shown, hint=ONE_PER_LINE))


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises: ValueError for a key twice."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return parsed


_DECODER = json.JSONDecoder(object_pairs_hook=without_twins)


def as_text(value: Any) -> str | None:
    """A value as it stands in a column of text: a string as it is, 2.0 as 2, others as JSON."""
    if value is None or isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, ensure_ascii=False)


def reason(error: Exception) -> str:
    """Python's reason for not parsing a line of JSON, and the place in it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
