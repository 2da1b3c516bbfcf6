"""Fields of objects as columns: `review.text` is the field `text` of the objects in the column `review`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.options.checks import split_names
from brimful.data.readers.column_types import plain_type
from brimful.data.readers.rows import Rows


def with_fields(table: pa.Table, *names: str | None) -> pa.Table:
    """The table, and a column for each of `names` that is none, and a field of objects at any depth.

    names: as options have them, several separated by commas. What is no field is left out.
    """
    for name in _single(table, names):
        column = None if name in table.column_names else _field(table, name)
        table = table if column is None else table.append_column(name, column)
    return table


def rows_with_fields(rows: Rows, *names: str | None) -> Rows:
    """The rows, and columns as of `with_fields`."""
    table = with_fields(rows.table, *names)
    return rows if table is rows.table else dataclasses.replace(rows, table=table)


def field_names(schema: pa.Schema) -> list[str]:
    """Names of the columns, and of the fields of objects in their place."""
    return [name for field in schema for name in _within(field.name, field.type)]


def _within(path: str, kind: pa.DataType) -> Iterator[str]:
    if not pa.types.is_struct(kind):
        yield path
        return
    for field in kind:
        yield from _within(f"{path}.{field.name}", field.type)


def _single(table: pa.Table, names: tuple[str | None, ...]) -> Iterator[str]:
    for name in names:
        if name is not None and "." in name:
            is_one = name in table.column_names or _field(table, name) is not None
            yield from ([name] if is_one else split_names(name))


def _field(table: pa.Table, path: str) -> pa.ChunkedArray | None:
    """The values at a path, null where there is no object; names may have dots of their own."""
    for name in table.column_names:
        if path.startswith(f"{name}."):
            steps = _steps(table.schema.field(name).type, path.removeprefix(f"{name}."))
            if steps is not None:
                column = pc.struct_field(table[name], steps)
                return column.cast(plain_type(column.type))
    return None


def _steps(kind: pa.DataType, path: str) -> list[str] | None:
    """Names of fields from an object of type `kind` to a value that is no object."""
    for field in kind if pa.types.is_struct(kind) else ():
        if path == field.name and not pa.types.is_struct(field.type):
            return [field.name]
        if path.startswith(f"{field.name}."):
            rest = _steps(field.type, path.removeprefix(f"{field.name}."))
            if rest is not None:
                return [field.name, *rest]
    return None
