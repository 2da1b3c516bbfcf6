"""Rows that come in any order, read back in theirs, in memory that does not grow with them.

Rows are held up to a number of bytes. Then they are sorted, cut where blocks of row numbers begin, and appended to a
file without a name; a block is put together again of all the parts that it has there.

Legend: S rows of a window.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core import atomic_files
from brimful.data.writers.row_files import Sink

#: Bytes of rows that are held.
_MOST_HELD = 32 << 20
#: Rows of a block, and values of them.
_BLOCK_ROWS, _BLOCK_VALUES = 1 << 15, 1 << 21

Integers = npt.NDArray[np.int64]


class SortedRows:
    """Columns of rows by their numbers.

    folder: of the file, which is made where rows are more than are held, and ends with `close`. most_values: that a row
    has. leave_room: called with the bytes that are to be written next; it may raise.
    Raises: DiskFullError or OutputError.
    """

    def __init__(
        self, folder: Path, *, most_values: int, leave_room: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        self._folder, self._leave_room = folder, leave_room
        self._block = max(1, min(_BLOCK_ROWS, _BLOCK_VALUES // max(1, most_values)))
        self._held: list[pa.Table] = []  # row numbers first
        self._held_bytes = 0
        self._file: _BatchFile | None = None
        self._batches: dict[int, list[int]] = defaultdict(list)  # of the file, by block

    def add(self, rows_S: Integers, columns_S: Mapping[str, pa.Array]) -> None:
        """Take rows, each of which comes once."""
        table = pa.Table.from_arrays([pa.array(rows_S), *columns_S.values()], ["row of all", *columns_S])
        self._held.append(table)
        self._held_bytes += sum(map(pa.ipc.get_record_batch_size, table.to_batches()))
        if self._held_bytes > _MOST_HELD:
            self._spill()

    def blocks(self) -> Iterator[tuple[Integers, pa.Table]]:
        """Numbers of all rows, in order, with their columns, a block at a time. No more rows come then."""
        if self._file is None:
            for _, part in self._parts(self._held):
                yield _split(part)
            return
        self._spill()
        for block in sorted(self._batches):
            with atomic_files.file_errors(self._folder):
                batches = self._file.read(self._batches[block])
            yield _split(_in_order([pa.Table.from_batches([batch]) for batch in batches]))

    @property
    def file_bytes(self) -> int:
        """Bytes of the file, 0 without one."""
        return 0 if self._file is None else self._file.num_bytes

    def close(self) -> None:
        """Let go of all rows, and of the file."""
        self._held, self._held_bytes = [], 0
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        """Put what is held into the file."""
        if not self._held:
            return
        self._leave_room(self._held_bytes)
        with atomic_files.file_errors(self._folder):
            for block, part in self._parts(self._held):
                if self._file is None:
                    self._file = _BatchFile(self._folder, part.schema)
                self._batches[block].append(self._file.write(part))
        self._held, self._held_bytes = [], 0
        pa.default_memory_pool().release_unused()

    def _parts(self, tables: Sequence[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
        """Numbers of blocks with their rows, in order."""
        if not tables:
            return
        whole = _in_order(tables)
        blocks = _numbers(whole) // self._block
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(blocks)]):
            yield int(blocks[start]), whole.slice(start, end - start)


class _BatchFile:
    """A file without a name that batches are appended to, then read from. Raises: OSError as the system gave it."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix=atomic_files.TEMPORARY, buffering=0))
            #: Ends the file, which nobody else has a name of; a collected object's, too.
            self.close = weakref.finalize(self, stack.pop_all().close)
        sink = Sink(lambda data: atomic_files.write_all(file.fileno(), data))
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._file, self._writer = file, pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema, options=options)
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the file so far."""
        return os.fstat(self._file.fileno()).st_size

    def write(self, table: pa.Table) -> int:
        """Append rows as one batch, and return its number."""
        (batch,) = table.to_batches()
        self._writer.write_batch(batch)
        self._count += 1
        return self._count - 1

    def read(self, numbers: Sequence[int]) -> list[pa.RecordBatch]:
        """Return these batches; none can be appended any more."""
        if self._reader is None:
            self._writer.close()
            self._reader = pa.ipc.open_file(pa.PythonFile(self._file, mode="r"))
        return [self._reader.get_batch(number) for number in numbers]


def _in_order(tables: Sequence[pa.Table]) -> pa.Table:
    table = pa.concat_tables(tables)
    return table.take(pa.array(np.argsort(_numbers(table), kind="stable"))).combine_chunks()


def _numbers(table: pa.Table) -> Integers:
    return np.asarray(table.column(0))


def _split(table: pa.Table) -> tuple[Integers, pa.Table]:
    return _numbers(table), table.remove_column(0)
