"""Rows into a file, by the end of its name: CSV, TSV, JSON lines (each also .gz or .zst) and Parquet."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from brimful.core import atomic_files
from brimful.core.errors import OutputError, first_line, printable
from brimful.core.json_values import value_as_json, value_as_text
from brimful.data.file_names import split_suffix

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
#: Rows that are Python objects at a time.
_LINES = 1024
#: Rows, and bytes of them, that end a row group of Parquet. A group costs its file some 5 kB of index, kept in memory
#: until the file is closed: few rows of 20 million in each would come to 30 MB.
_GROUP_ROWS, _GROUP_BYTES = 1 << 15, 8 << 20
#: Digits behind the point up to which pyarrow writes a decimal as its digits, not as 1E-7.
_MOST_PLAIN_DIGITS = 6
FORMS = ".csv, .tsv, .jsonl (each also .gz or .zst) or .parquet"


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of file. suffix: `.csv`, `.tsv`, `.jsonl`, `.ndjson` or `.parquet`. codec: None, `gzip` or `zstd`."""

    suffix: str
    codec: str | None = None


PARQUET = Form(suffix=".parquet")


def form_of(path: Path) -> Form | None:
    """The form that the name of `path` asks for; None if it asks for none that is known."""
    suffix, codec = split_suffix(path.name)
    known = suffix in _SUFFIXES and not (codec and suffix == PARQUET.suffix)
    return Form(suffix=suffix, codec=codec) if known else None


class _Writer(Protocol):
    def write_table(self, table: pa.Table) -> None: ...
    def close(self) -> None: ...


class TableFile:
    """A file of rows that grows a table at a time. Its bytes depend on the tables only, and on pyarrow's version.

    In Parquet, tables are put together into row groups of `_GROUP_ROWS` rows, or a few more. In CSV and TSV lists and
    other nested values are JSON text, bytes are base64. In JSON, NaN and infinities are null. Decimals keep all digits.

    Raises: OutputError for a column whose type has no place in this form; OSError as the system gave it.
    """

    def __init__(self, path: Path, form: Form, schema: pa.Schema) -> None:
        _check_schema(schema, form)
        self.path = path
        self._file = atomic_files.GrowingFile(path)
        self._stream = _compressed(Sink(self._file.write), form.codec)
        self._writer = _writer(self._stream, form, schema)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)

    def finish(self) -> atomic_files.Written:
        """Closes the file and returns what it holds, when it is on the disk."""
        self._writer.close()
        self._stream.close()
        written = self._file.sync()
        self._file.close()
        return written

    def discard(self) -> None:
        """Removes the file."""
        self._file.close()
        atomic_files.remove(self.path)


class Sink(io.RawIOBase):
    """`write` as a file that pyarrow can write into."""

    def __init__(self, write: Callable[[Any], int]) -> None:
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._write(data)


def _compressed(sink: Sink, codec: str | None) -> Any:
    """`sink` as a stream of its own, without a time or a name in it."""
    if codec == "gzip":
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=cast(Any, sink), mtime=0)
    stream = pa.PythonFile(sink, mode="w")
    return pa.CompressedOutputStream(stream, codec) if codec else stream


def _writer(stream: Any, form: Form, schema: pa.Schema) -> _Writer:
    if form.suffix == ".parquet":
        return _ParquetWriter(stream, schema)
    if form.suffix in (".csv", ".tsv"):
        return _DelimitedWriter(stream, schema, "\t" if form.suffix == ".tsv" else ",")
    return _LineWriter(stream)


def _check_schema(schema: pa.Schema, form: Form) -> None:
    """Check that these columns can be written; the error names the first that cannot."""
    for field in schema:
        one = pa.schema([field])
        try:
            writer = _writer(pa.BufferOutputStream(), form, one)
            writer.write_table(pa.Table.from_batches([], schema=one))
            writer.close()
        except (pa.ArrowException, TypeError) as error:
            raise OutputError(
                f"column '{printable(field.name)}' cannot be written to a {form.suffix} file, for it holds "
                f"{printable(field.type)} ({first_line(error)})",
                hint="use a name that ends in .jsonl, or leave the column out",
            ) from error


class _ParquetWriter:
    """Parquet, compressed by zstd."""

    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(stream, schema, compression="zstd")
        self._held: list[pa.Table] = []  # of the next row group
        self._num_rows = self._num_bytes = 0

    def write_table(self, table: pa.Table) -> None:
        self._held.append(table)
        self._num_rows += table.num_rows
        # As in an uncompressed stream: buffers in memory may be longer than their rows.
        self._num_bytes += sum(map(pa.ipc.get_record_batch_size, table.to_batches()))
        if self._num_rows >= _GROUP_ROWS or self._num_bytes >= _GROUP_BYTES:
            self._end_group()

    def close(self) -> None:
        if self._held:
            self._end_group()
        self._writer.close()

    def _end_group(self) -> None:
        self._writer.write_table(pa.concat_tables(self._held), row_group_size=max(1, self._num_rows))
        self._held, self._num_rows, self._num_bytes = [], 0, 0
        pa.default_memory_pool().release_unused()  # as much again as the group, which it would keep for the next one


class _DelimitedWriter:
    """CSV or TSV with a header. Text is quoted, null is nothing."""

    def __init__(self, stream: Any, schema: pa.Schema, delimiter: str) -> None:
        options = pv.WriteOptions(delimiter=delimiter)
        self._writer = pv.CSVWriter(
            stream, _flat(pa.Table.from_batches([], schema=schema)).schema, write_options=options
        )

    def write_table(self, table: pa.Table) -> None:
        self._writer.write_table(_flat(table))

    def close(self) -> None:
        self._writer.close()


class _LineWriter:
    """JSON lines."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write_table(self, table: pa.Table) -> None:
        for start in range(0, table.num_rows, _LINES):
            lines = json_lines(table.slice(start, _LINES))
            self._stream.write("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Nothing is held back."""


def json_lines(table: pa.Table) -> Iterator[str]:
    """Each row as one JSON object, a slice of the table at a time.

    A number that JSON does not have (NaN, infinities) is null, bytes are base64, decimals are numbers with all their
    digits. The lines are safe to look at.
    """
    for index, field in enumerate(table.schema):
        timed = pa.types.is_timestamp(field.type) or pa.types.is_time64(field.type)
        if timed and field.type.unit == "ns":  # Python's own times are coarser
            table = table.set_column(index, field.name, table.column(index).cast(pa.large_string()))
    for batch in table.to_batches(max_chunksize=_LINES):
        for row in batch.to_pylist():
            yield value_as_json(row)


def _flat(table: pa.Table) -> pa.Table:
    """Nested values as JSON text, bytes as base64, small decimals as their digits, and whatever else is no text or
    number as Python shows it.
    """
    for index, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not _is_plain(column.type):
            text = value_as_json if pa.types.is_nested(column.type) else value_as_text
            values = [None if value is None else text(value) for value in column.to_pylist()]
            column = pa.chunked_array([pa.array(values, pa.large_string())])
        table = table.set_column(index, table.column_names[index], column)
    return table


def _is_plain(kind: pa.DataType) -> bool:
    """True if pyarrow writes values of this type to CSV as a reader expects them."""
    types = pa.types
    simple = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
    dated = types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind)
    with_all_digits = types.is_decimal(kind) and 0 <= kind.scale <= _MOST_PLAIN_DIGITS
    return bool(simple or dated or types.is_string(kind) or types.is_large_string(kind) or with_all_digits)
