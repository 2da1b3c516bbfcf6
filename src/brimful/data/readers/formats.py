"""One file -> an Arrow table, by the end of its name: text as large_string, lists as large_list, ids as names."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brimful.core.errors import DataError, first_line
from brimful.data.file_names import split_suffix
from brimful.data.readers.compression import check_text, check_whole, not_utf8, reading
from brimful.data.readers.delimited import read_delimited
from brimful.data.readers.json_rows import read_json, read_json_lines

_TEXT = {
    ".csv": lambda file: read_delimited(file),
    ".tsv": lambda file: read_delimited(file, "\t"),
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
}
_BINARY = {".parquet", ".arrow", ".feather"}
_DAMAGED = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowKeyError,
    pa.ArrowIndexError,
    pa.ArrowNotImplementedError,
    OSError,
    UnicodeDecodeError,
)
KINDS = "CSV, TSV, JSON, JSONL, NDJSON, Parquet (each also .gz or .zst), Arrow or Feather"


def is_data_file(file: str) -> bool:
    """Whether the name ends like one of the formats read here."""
    suffix = split_suffix(file)[0]
    return suffix in _TEXT or suffix in _BINARY


def read_file(file: str) -> pa.Table:
    """The rows of one file. Columns of ids that the schema has names for (ClassLabel of `datasets`) come as names.

    Raises: DataError for a file that is damaged, empty, of another format than its name says, or not UTF-8.
    """
    suffix = checked_kind(file)
    if suffix in _TEXT:
        return tidy(_TEXT[suffix](file), file)
    with damage(file):
        return tidy(_read_parquet(file) if suffix == ".parquet" else _read_arrow(file), file)


def checked_kind(file: str) -> str:
    """The end of the file's name, of those that can be read, of a file that is not empty and begins like its kind.

    Raises: DataError for any other file.
    """
    if not is_data_file(file):
        raise DataError("is not a kind of file that can be read", file=file, hint=f"it can be {KINDS}")
    check_whole(file)
    suffix = split_suffix(file)[0]
    if suffix in _TEXT:
        check_text(file)
    return suffix


@contextlib.contextmanager
def damage(file: str) -> Iterator[None]:
    """Makes a DataError of what pyarrow says of a damaged Parquet or Arrow file."""
    try:
        yield
    except pa.ArrowMemoryError as error:
        hint = "it is damaged, or larger than this machine's memory"
        raise DataError(f"cannot be read ({first_line(error)})", file=file, hint=hint) from error
    except _DAMAGED as error:
        raise DataError(
            f"is no whole {split_suffix(file)[0].removeprefix('.')} file ({first_line(error)})",
            file=file,
            hint="it is cut off or damaged: copy or download it again",
        ) from error


def tidy(table: pa.Table, file: str | None, *, decimals: bool = False) -> pa.Table:
    """`table` with few types: large_string, large_list, int, float and bool; what is none of these is left as it is.

    file: for messages; without it they name no row either. decimals: see `plain_type`.
    """
    names = table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError("has a column twice", file=file, value=twice, hint="rename one of them")
    columns = {}
    for name, column, kind in zip(names, table.columns, _class_names(table.schema), strict=True):
        _check_values(column, file)
        plain = plain_type(column.type, decimals=decimals)
        column = column if column.type == plain else column.cast(plain)
        columns[name] = _named(column, kind, file) if kind else column
    return pa.table(columns)


def _read_parquet(file: str) -> pa.Table:
    if split_suffix(file)[1] is None:
        with pq.ParquetFile(file) as parquet:
            return parquet.read()
    with reading(file) as stream:
        return pq.ParquetFile(pa.BufferReader(stream.read())).read()


def _read_arrow(file: str) -> pa.Table:
    """Feather and .arrow files are IPC files; `datasets` writes IPC streams under the same ending."""
    with reading(file) as stream:
        data = stream.read_buffer()
    is_file = data.slice(0, 6).to_pybytes() == b"ARROW1"
    with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(data) as reader:
        return reader.read_all()


def plain_type(kind: pa.DataType, *, decimals: bool = False) -> pa.DataType:
    """The type that `tidy` gives to values of the type `kind`, where no names belong to them.

    decimals: whether they stay what they are, as in rows that are written again. Labels are compared as floats.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type, decimals=decimals)
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_float16(kind) or (pa.types.is_decimal(kind) and not decimals):
        return pa.float64()
    if any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_large_list)):
        return pa.large_list(plain_type(kind.value_type, decimals=decimals))
    return kind


def _check_values(column: pa.ChunkedArray, file: str | None) -> None:
    """Raises DataError for text that is not UTF-8, and ArrowInvalid for damage that would crash whoever reads it."""
    column.validate()
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            if "UTF8" not in str(error):
                raise
            hint = "convert it, or leave the column out"
            raise DataError("holds a text that is not UTF-8", file=file, value=column.type, hint=hint) from error
        raw_column = column.cast(pa.large_binary())
        raw_column.validate(full=True)
        for row, value in enumerate(raw_column, 1):
            raw = value.as_py() or b""
            if raw.decode("utf-8", "ignore").encode() != raw:
                raise not_utf8(raw, file=file, row=row if file else None) from error
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


def _named(column: pa.ChunkedArray, names: Sequence[str], file: str | None) -> pa.ChunkedArray:
    """Ids, or lists of ids, as names; -1 means that there is no label."""
    try:
        chunks = [_named_chunk(chunk, pa.array(names, pa.large_string())) for chunk in column.chunks]
    except pa.ArrowIndexError as error:
        raise DataError(
            f"has ids of classes outside the {len(names)} names in its schema", file=file, hint="write the names"
        ) from error
    is_list = pa.types.is_large_list(column.type)
    return pa.chunked_array(chunks, type=pa.large_list(pa.large_string()) if is_list else pa.large_string())


def _named_chunk(chunk: pa.Array, names: pa.Array) -> pa.Array:
    if pa.types.is_large_list(chunk.type):
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
        return pa.LargeListArray.from_arrays(ends, _named_chunk(chunk.flatten(), names), mask=chunk.is_null())
    if not pa.types.is_integer(chunk.type):
        return chunk.cast(pa.large_string())
    missing = pc.less(chunk, 0)
    return pc.take(names, pc.if_else(missing, None, chunk))
