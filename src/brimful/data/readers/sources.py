"""What a user calls their data -> rows: a file, a folder, a glob of these, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from brimful.data.readers.compression import not_utf8
from brimful.data.readers.formats import read_file
from brimful.data.readers.hub import read_hub
from brimful.data.readers.locations import Location, locate, refusals
from brimful.data.readers.rows import Rows, join_files

__all__ = ["Rows", "read_rows"]


def read_rows(spec: str) -> Rows:
    """The rows of `spec`, in the order of the files' names and of the rows within each.

    spec: a CSV, TSV, JSON, JSONL, Parquet (each also .gz or .zst), Arrow or Feather file; a folder of such files; a
    folder saved by `datasets`, of which several splits the one called train; a folder with one sub-folder of .txt files
    per class; a glob of any of these; or `name`, `owner/name` or `owner/name:split` of a hub data set.

    Raises: DataError for whatever is missing, damaged, empty or inconsistent, with file and row.
    """
    with refusals(spec):
        return join_files(spec, [(location.path, _read(location)) for location in locate(spec)])


def _read_text(file: str) -> str:
    """The text of a .txt file. Raises: DataError if it is not UTF-8."""
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(error.object, file=file) from error


def _read(location: Location) -> pa.Table:
    if location.otherwise is not None:
        return read_hub(location.path, location.otherwise)
    if location.label is None:
        return read_file(location.path)
    columns = {"text": [_read_text(location.path)], "label": [location.label]}
    return pa.table({name: pa.array(values, pa.large_string()) for name, values in columns.items()})
