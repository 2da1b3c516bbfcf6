"""Rows that were answered, kept as they came until the file of results that they belong to is whole.

A file of results cannot be left half written and gone on with: Parquet has its index at its end, gzip its checksum. A
stream of Arrow batches can: its beginning is a stream too. So each window of rows is appended to one first, which costs
a hundredth of writing it in its form, and after a kill the files of results are made from it once more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from brimful.core import atomic_files
from brimful.core.atomic_files import GrowingFile, Written
from brimful.core.classification import Counts
from brimful.core.manifest import Shard
from brimful.data.writers.row_files import Sink


class WriteAheadLog:
    """A file of answered rows that grows; `first_row` is the place of its first one in the input.

    counts: of all rows in it, safely on the disk or not. whole: no write was broken off.
    Raises: DiskFullError or OutputError.
    """

    def __init__(self, path: Path, schema: pa.Schema, first_row: int) -> None:
        self.counts, self.whole = Counts(), True
        self._first_row = first_row
        with atomic_files.file_errors(path):
            self._file = GrowingFile(path)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._stream = pa.ipc.new_stream(pa.PythonFile(Sink(self._file.write), mode="w"), schema, options=options)

    @property
    def path(self) -> Path:
        return self._file.path

    def write(self, batches: list[pa.RecordBatch], counts: Counts) -> None:
        """Append rows. After a crash, the log holds what it held at its last `sync`."""
        self.whole = False
        with atomic_files.file_errors(self.path):
            for batch in batches:
                self._stream.write_batch(batch)
        self.counts += counts
        self.whole = True

    def sync(self) -> Shard:
        """Flush the log to disk; return its entry for the manifest."""
        with atomic_files.file_errors(self.path):
            written = self._file.sync()
        return shard_of(self.path.name, self._first_row, written, self.counts)

    def close(self) -> None:
        self._file.close()


def shard_of(file: str, first_row: int, written: Written, counts: Counts) -> Shard:
    """The manifest's entry for a file as it was written."""
    size, digest = written.num_bytes, written.sha256
    return Shard(file=file, first_row=first_row, num_rows=counts.num_rows, num_bytes=size, sha256=digest, counts=counts)


def logged_batches(path: Path, shard: Shard) -> Iterator[pa.RecordBatch]:
    """Rows of a log up to its last `sync`; what was appended after it is cut off.

    Raises: OutputError if it cannot be read.
    """
    with atomic_files.file_errors(path):
        os.truncate(path, shard.num_bytes)
        with pa.memory_map(str(path)) as file:
            yield from pa.ipc.open_stream(file)
