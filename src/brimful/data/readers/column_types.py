"""Types of columns: the few that rows have in memory, and the one that holds the values of several files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError
from brimful.core.json_values import value_as_json
from brimful.data.readers.compression import not_utf8

#: Most digits of an integer of 64 bits, and of Arrow's decimals.
_INTEGER_DIGITS, _DECIMAL128_DIGITS, _DECIMAL256_DIGITS = 20, 38, 76


def tidy(table: pa.Table, file: str | None = None) -> pa.Table:
    """`table` in few types, as `plain_type` has them; ids that the schema names classes for come as these names.

    file: for messages.
    Raises: DataError for a column twice, text that is not UTF-8, ids without a name; ArrowInvalid for damage.
    """
    names = table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError("has a column twice", file=file, value=twice, hint="rename one of them")
    columns = {}
    for name, column, classes in zip(names, table.columns, _class_names(table.schema), strict=True):
        _check_values(column)
        plain = plain_type(column.type)
        column = column if column.type == plain else column.cast(plain)
        columns[name] = _named(column.combine_chunks(), classes) if classes else column
    return pa.table(columns)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Widened type of values in memory: large_string, large_list and double; other types stay."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_float16(kind):
        return pa.float64()
    if any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_large_list)):
        return pa.large_list(plain_type(kind.value_type))
    return kind


def _check_values(column: pa.ChunkedArray) -> None:
    """Raises: DataError for text that is not UTF-8, and ArrowInvalid for damage that would crash its readers."""
    column.validate()
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            if "UTF8" not in str(error):
                raise
            hint = "convert it, or leave the column out"
            raise DataError("holds a text that is not UTF-8", value=column.type, hint=hint) from error
        raw_column = column.cast(pa.large_binary())
        raw_column.validate(full=True)
        for value in raw_column:
            raw = value.as_py() or b""
            if raw.decode("utf-8", "ignore").encode() != raw:
                raise not_utf8(raw) from error
        raise AssertionError("validate names only text that is not UTF-8") from error


def _class_names(schema: pa.Schema) -> list[list[str] | None]:
    """Names behind the ids of each column, from the features that `datasets` keeps in the schema; None without."""
    stored = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(stored).get("info", {}).get("features", {}) if stored else {}
    return [_names_in(features.get(name)) for name in schema.names]


def _names_in(feature: Any) -> list[str] | None:
    if isinstance(feature, list) and len(feature) == 1:
        return _names_in(feature[0])
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel":
        return feature.get("names")
    return _names_in(feature.get("feature"))


def _named(column: pa.Array, names: Sequence[str]) -> pa.Array:
    """Ids, or lists of ids, as names; -1 is no label."""
    if pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
        return pa.LargeListArray.from_arrays(ends, _named(column.flatten(), names), mask=column.is_null())
    if not pa.types.is_integer(column.type):
        return column.cast(pa.large_string())
    try:
        return pc.take(pa.array(names, pa.large_string()), pc.if_else(pc.less(column, 0), None, column))
    except pa.ArrowIndexError as error:
        said = f"has ids of classes outside the {len(names)} names in its schema"
        raise DataError(said, hint="write the names") from error


def common_type(types: set[pa.DataType]) -> pa.DataType:
    """The type that holds values of all `types`: the wider number, or text; null says nothing.

    Decimals and floats together are text: neither holds all digits of the other.
    """
    types = {each for each in types if not pa.types.is_null(each)}
    if len(types) <= 1:
        return next(iter(types), pa.null())
    if all(pa.types.is_integer(each) or pa.types.is_floating(each) for each in types):
        return pa.int64() if all(pa.types.is_signed_integer(each) for each in types) else pa.float64()
    if all(pa.types.is_integer(each) or pa.types.is_decimal(each) for each in types):
        return _common_decimal(types)
    return pa.large_string()


def _common_decimal(types: set[pa.DataType]) -> pa.DataType:
    """The decimal that holds all digits of these decimals and whole numbers; text where there is none so wide."""
    scale = max(0, *(each.scale for each in types if pa.types.is_decimal(each)))
    whole = max(each.precision - each.scale if pa.types.is_decimal(each) else _INTEGER_DIGITS for each in types)
    if whole + scale <= _DECIMAL128_DIGITS:
        return pa.decimal128(whole + scale, scale)
    return pa.decimal256(whole + scale, scale) if whole + scale <= _DECIMAL256_DIGITS else pa.large_string()


def converted(column: pa.ChunkedArray, to: pa.DataType) -> pa.ChunkedArray:
    """`column` in the type `to`; as text nested values are JSON and decimals all their digits.

    Raises: ArrowInvalid for numbers too large for `to`.
    """
    if column.type == to:
        return column
    if pa.types.is_large_string(to) and (pa.types.is_nested(column.type) or pa.types.is_decimal(column.type)):
        texts = [None if value is None else value_as_json(value) for value in column.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.large_string())])
    return pc.cast(column, to)
