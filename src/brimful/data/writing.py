"""Rows to a file, by the suffix of its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from brimful.core import durable
from brimful.core.errors import OptionError


def write_table(table: pa.Table, path: Path) -> None:
    """Writes `table` as .csv, .tsv, .jsonl or .parquet: whole or not at all.

    Raises: OptionError for another suffix; OutputError or DiskFullError.
    """
    check_suffix(path)
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


def check_suffix(path: Path) -> None:
    """Raises: OptionError for a file name whose suffix says no form that can be written."""
    if path.suffix not in (".csv", ".tsv", ".jsonl", ".parquet"):
        raise OptionError(
            f"--output {path.name}: no form is known by the suffix {path.suffix!r}",
            hint="use .csv, .tsv, .jsonl or .parquet",
        )


def json_lines(table: pa.Table) -> Iterator[str]:
    """Each row as one JSON object, a slice of the table at a time."""
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            yield json.dumps(row, ensure_ascii=False, default=str)


def _flat(table: pa.Table) -> pa.Table:
    """Lists as JSON text, for files that have no lists."""
    for index, column in enumerate(table.columns):
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            text = pa.array([None if v is None else json.dumps(v) for v in column.to_pylist()])
            table = table.set_column(index, table.column_names[index], text)
    return table
