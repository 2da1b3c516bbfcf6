"""Rows to a file, by the suffix of its name, or as lines of JSON."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from brimful.core import durable
from brimful.core.errors import OptionError
from brimful.core.records import json_text


def check_output(path: Path, data: str) -> None:
    """That results can be written as `path`, before they are made.

    data: the file that is read. Raises: OptionError for an unknown suffix, for a folder, and for the data's own file.
    """
    if path.suffix not in (".csv", ".tsv", ".jsonl", ".parquet"):
        raise OptionError(
            f"--output {durable.path_text(path)}: no form of file is known by the suffix '{path.suffix}'",
            hint="use .csv, .tsv, .jsonl or .parquet",
        )
    if path.is_dir():
        raise OptionError(f"--output {durable.path_text(path)} is a folder", hint="give the name of a file")
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise OptionError(f"--output {durable.path_text(path)} is the file that is read", hint="give another name")


def write_table(table: pa.Table, path: Path) -> None:
    """Writes `table` as .csv, .tsv, .jsonl or .parquet: whole or not at all.

    Raises: OutputError or DiskFullError.
    """
    temporary = durable.temporary_path(path)
    durable.make_folder(path.parent)
    with durable.file_errors(path), _removed_on_error(temporary):
        if path.suffix == ".parquet":
            pq.write_table(table, temporary)
        elif path.suffix in (".csv", ".tsv"):
            options = pv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
            pv.write_csv(_flat(table), temporary, options)
        else:
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in json_lines(table))
        durable.sync_file(temporary)
        temporary.replace(path)
    durable.sync_folder(path.parent)


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def json_lines(table: pa.Table) -> Iterator[str]:
    """Each row as one JSON object, a slice of the table at a time.

    A number that JSON does not have (NaN, infinities) is null, bytes are base64. The lines are safe to look at.
    """
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            yield _json(row)


def _json(value: Any) -> str:
    try:
        return json_text(value, default=_plain)
    except ValueError:
        return json_text(_finite(value), default=_plain)


def _plain(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _flat(table: pa.Table) -> pa.Table:
    """Lists and other nested values as JSON text, bytes as base64, for files that have only plain ones."""
    for index, column in enumerate(table.columns):
        if pa.types.is_nested(column.type):
            text = [None if value is None else _json(value) for value in column.to_pylist()]
        elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            text = [None if value is None else _plain(value) for value in column.to_pylist()]
        else:
            continue
        table = table.set_column(index, table.column_names[index], pa.array(text, pa.large_string()))
    return table
