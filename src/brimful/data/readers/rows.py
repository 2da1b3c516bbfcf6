"""Rows: one Arrow table with the place in the files that each row came from."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError, printable
from brimful.core.json_values import value_as_json

_PIECE_ROWS = 1 << 16
_MANY_TABLES = 1000
#: Most digits of an integer of 64 bits, and of Arrow's decimals.
_INTEGER_DIGITS, _DECIMAL128_DIGITS, _DECIMAL256_DIGITS = 20, 38, 76


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of one or more files.

    table: text as large_string; numbers, booleans and lists as the file has them.
    name: what the user asked for.
    files, starts: file i holds the rows from starts[i] on. A file of text is a file of one row.
    """

    table: pa.Table
    name: str
    files: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def place(self, row: int) -> tuple[str, int]:
        """File as the user gave it, and 1-based row within it without the header, of the 0-based `row`."""
        part = bisect_right(self.starts, row) - 1
        return self.files[part], row - self.starts[part] + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of names, types and values in row order; how the rows are cut into files and chunks does not count."""
        digest = hashlib.sha256()
        for name, column in zip(self.table.column_names, self.table.columns, strict=True):
            digest.update(f"{name}\0{column.type}\0{len(column)}\0".encode())
            for start in range(0, len(column), _PIECE_ROWS):
                _digest(digest, pa.concat_arrays(column.slice(start, _PIECE_ROWS).chunks))
        return digest.hexdigest()


def join_files(name: str, parts: Sequence[tuple[str, pa.Table]]) -> Rows:
    """The rows of all files after one another, in the order given.

    Raises: DataError for files of different columns, and where there are no rows.
    """
    first_file, first = parts[0]
    for file, table in parts:
        if differing := set(table.column_names) ^ set(first.column_names):
            raise other_columns(file, table.column_names, first_file, differing)
    starts = np.cumsum([0, *(table.num_rows for _, table in parts)])
    rows = Rows(
        table=stack([table for _, table in parts]),
        name=name,
        files=tuple(file for file, _ in parts),
        starts=tuple(starts[:-1].tolist()),
    )
    if rows.num_rows == 0:
        raise no_rows(name, first.column_names)
    return rows


def other_columns(file: str, names: Sequence[str], first_file: str, differing: Collection[str]) -> DataError:
    """The error for a `file` whose columns `names` are not those of the first file."""
    shown = ", ".join(map(repr, sorted(differing)[:5]))
    return DataError(
        f"has not the columns of {printable(first_file)}; they differ in {shown}",
        file=file,
        hint=f"it has {printable(', '.join(names))}",
    )


def no_rows(name: str, columns: Sequence[str]) -> DataError:
    """The error for data without a row, with or without a header."""
    said = "has a header and no rows" if columns else "has no rows"
    return DataError(said, file=name, hint="it needs rows of texts: is it the right file?")


def stack(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables after one another. A column of several types becomes the wider number, or text; one that misses, null."""
    if len(tables) == 1:
        return tables[0]
    columns = {}
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        parts = [t[name] if name in t.column_names else pa.chunked_array([pa.nulls(t.num_rows)]) for t in tables]
        common = common_type({part.type for part in parts})
        columns[name] = pa.chunked_array([c for part in parts for c in converted(part, common).chunks], type=common)
    table = pa.table(columns)
    return table if len(tables) <= _MANY_TABLES else table.combine_chunks()


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


def _digest(digest: hashlib._Hash, values: pa.Array) -> None:
    """Adds values to the digest, whatever lies in the slots of nulls and before an array's offset."""
    digest.update(values.is_null().to_numpy(zero_copy_only=False).tobytes())
    kind = values.type
    if pa.types.is_large_string(kind):
        values = values.fill_null("")
        digest.update(pc.binary_length(values).to_numpy(zero_copy_only=False).tobytes())
        ends = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
        if ends[-1] > ends[0]:
            digest.update(values.buffers()[2].slice(int(ends[0]), int(ends[-1] - ends[0])))
    elif pa.types.is_large_list(kind):
        digest.update(pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).tobytes())
        _digest(digest, values.flatten())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        digest.update(values.fill_null(pa.scalar(0).cast(kind)).to_numpy(zero_copy_only=False).tobytes())
    else:
        digest.update(pa.record_batch([values], names=["values"]).serialize())
