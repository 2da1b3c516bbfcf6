"""Parquet and Arrow files as a stream: batches of rows, without ever holding a row group or mapping a whole file.

A record batch of an Arrow file that is compressed is unpacked whole: its writer decides how large that is.

A file that is compressed as a whole (.parquet.gz) is unpacked into a temporary file, as its end must be read first.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from brimful.core.errors import DataError, first_line
from brimful.data.file_names import split_suffix
from brimful.data.readers.column_types import tidy
from brimful.data.readers.compression import COPY_AGAIN, reading
from brimful.data.readers.parts import Part, Piece, batch_rows, refit

_ARROW_FILE = b"ARROW1"
_BUFFER_BYTES = 1 << 20
_MAPPED_BYTES = 64 << 20


class ParquetPart(Part):
    """The rows of a Parquet file."""

    def __init__(self, file: str) -> None:
        self.files, self.size_bytes = (file,), Path(file).stat().st_size
        with _opened(file) as plain, pq.ParquetFile(plain) as parquet:
            self.num_rows = parquet.metadata.num_rows
            self.schema = tidy(parquet.schema_arrow.empty_table(), file).schema

    def pieces(self, start: int) -> Iterator[Piece]:
        file, end = self.files[0], 0
        # Otherwise pyarrow reads all of a column of a row group at once.
        with _opened(file) as plain, pq.ParquetFile(plain, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
            for index in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(index)
                row, end = end, end + group.num_rows
                if end <= start:
                    continue
                num_rows = batch_rows(group.total_byte_size, group.num_rows)
                for batch in parquet.iter_batches(num_rows, row_groups=[index]):
                    yield _piece(row, batch, parquet.schema_arrow.metadata)
                    row += batch.num_rows


class ArrowPart(Part):
    """The rows of an Arrow or Feather file, or of an IPC stream under such a name, as `datasets` writes them."""

    def __init__(self, file: str) -> None:
        self.files, self.size_bytes = (file,), Path(file).stat().st_size
        with _opened(file) as plain:
            with Path(plain).open("rb") as raw:
                self._is_file = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
            with pa.OSFile(plain) as raw, (pa.ipc.open_file if self._is_file else pa.ipc.open_stream)(raw) as reader:
                self._metadata = reader.schema.metadata
                self.schema = tidy(reader.schema.empty_table(), file).schema
            if self._is_file:
                self.num_rows = _count_rows(plain)

    def pieces(self, start: int) -> Iterator[Piece]:
        first_row = 0
        with _opened(self.files[0]) as plain:
            for batch in _mapped_batches(plain) if self._is_file else self._streamed_batches(plain):
                step = batch_rows(batch.nbytes, batch.num_rows)
                for row in range(0, batch.num_rows, step):
                    if first_row + row + step > start:
                        yield _piece(first_row + row, batch.slice(row, step), self._metadata)
                first_row += batch.num_rows

    def _streamed_batches(self, file: str) -> Iterator[pa.RecordBatch]:
        with pa.OSFile(file) as raw, pa.ipc.open_stream(raw) as reader:
            for batch in reader:
                self.share = raw.tell() / raw.size()
                yield batch


def _count_rows(file: str) -> int:
    with pa.memory_map(file) as mapped, pa.ipc.open_file(mapped) as reader:
        if hasattr(reader, "count_rows"):  # from what describes batches; pyarrow 20 has to read them
            return int(reader.count_rows())
        return sum(reader.get_batch(index).num_rows for index in range(reader.num_record_batches))


def _mapped_batches(file: str) -> Iterator[pa.RecordBatch]:
    """A mapping is given up after some batches, as all that was read of it counts as this process's memory."""
    index, num_batches = 0, 1
    while index < num_batches:
        with pa.memory_map(file) as mapped, pa.ipc.open_file(mapped) as reader:
            num_batches, num_bytes = reader.num_record_batches, 0
            while index < num_batches and num_bytes < _MAPPED_BYTES:
                batch = reader.get_batch(index)
                yield batch
                index, num_bytes = index + 1, num_bytes + batch.nbytes


def _piece(first_row: int, batch: pa.RecordBatch, metadata: dict[bytes, bytes] | None) -> Piece:
    table = pa.Table.from_batches([batch]).replace_schema_metadata(metadata)
    return Piece(first_row, *refit(table, tidy, DataError))


@contextlib.contextmanager
def _opened(file: str) -> Iterator[str]:
    """The file, or a temporary one with what it is once decompressed. Errors of pyarrow about it become DataErrors."""
    try:
        if split_suffix(file)[1] is None:
            yield file
            return
        with tempfile.NamedTemporaryFile() as plain:
            with reading(file) as (stream, _):
                shutil.copyfileobj(stream, plain)
            plain.flush()
            yield plain.name
    except pa.ArrowMemoryError as error:
        hint = "it is damaged, or larger than this machine's memory"
        raise DataError(f"cannot be read ({first_line(error)})", file=file, hint=hint) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = f"is no whole {split_suffix(file)[0].removeprefix('.')} file ({first_line(error)})"
        raise DataError(said, file=file, hint=COPY_AGAIN) from error
