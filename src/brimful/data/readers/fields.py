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
    for name in _single(table.schema, names):
        place = None if name in table.column_names else _place(table.schema, name)
        if place is not None:
            values = pc.struct_field(table[place[0]], place[1])
            table = table.append_column(name, values.cast(plain_type(values.type)))
    return table


def rows_with_fields(rows: Rows, *names: str | None) -> Rows:
    """The rows, and columns as of `with_fields`."""
    table = with_fields(rows.table, *names)
    return rows if table is rows.table else dataclasses.replace(rows, table=table)


def field_names(schema: pa.Schema) -> list[str]:
    """Names of the columns, and of the fields of objects in their place, each once."""
    return list(dict.fromkeys(name for field in schema for name in _within(field.name, field.type)))


def _within(path: str, kind: pa.DataType) -> Iterator[str]:
    if not pa.types.is_struct(kind):
        yield path
        return
    for field in kind:
        yield from _within(f"{path}.{field.name}", field.type)


def _single(schema: pa.Schema, names: tuple[str | None, ...]) -> Iterator[str]:
    for name in names:
        if name is not None and "." in name:
            is_one = name in schema.names or _place(schema, name) is not None
            yield from ([name] if is_one else split_names(name))


def _place(schema: pa.Schema, path: str) -> tuple[str, list[str]] | None:
    """The column that a path begins with, and the names of fields from there on. Names may have dots of their own."""
    for field in schema:
        if path.startswith(f"{field.name}."):
            steps = _steps(field.type, path.removeprefix(f"{field.name}."))
            if steps is not None:
                return field.name, steps
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
