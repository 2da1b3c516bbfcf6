"""Rows of any number of files, or of a pipe, in constant memory. A row that cannot be read keeps its place.

    stream = open_stream("reviews/*.jsonl")
    for chunk in stream.chunks():
        ...

The error of a row stands beside it; that of a file ends the stream, after the rows before it. Collected into memory,
rows end at the first error of either kind.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from brimful.core.errors import DataError, first_line, listed, printable
from brimful.data.readers.column_types import common_type, converted
from brimful.data.readers.formats import no_rows
from brimful.data.readers.locations import refusals
from brimful.data.readers.parts import BrokenPart, Part, Piece, RowsRead, refit
from brimful.data.readers.rows import Rows

_CHUNK_ROWS = 1 << 16
#: Files that a line names.
_SHOWN_FILES = 5
#: Tables of fewer bytes on average are joined when all rows are collected: each costs every column a chunk.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows.

    table: all columns, in the types of `RowStream.schema`.
    errors: (rows) large_string, null where the row could be read. Values of a row with an error that could not be
    read, or not be told from one another, are null; the others are as they stand there.
    first_row: rows of the input before it.
    """

    table: pa.Table
    errors: pa.Array
    first_row: int


class RowStream:
    """Rows that are read while they are asked for.

    name: what the user asked for. files: in the order of their rows. schema: the columns of all chunks.
    num_rows: where the files say it without being read (Parquet, Arrow), else None.
    fingerprint: sha256 of the files' names, sizes and times of change; of a pipe or a name on the hub, of the name.
    limit: rows of all chunks together at most.
    """

    def __init__(self, name: str, parts: Sequence[Part], limit: int | None = None) -> None:
        self.name, self._limit = name, limit
        self._parts = parts
        self._whole = [part for part in parts if not isinstance(part, BrokenPart)]
        self.files = tuple(file for part in parts for file in part.files)
        self.schema = _common_schema(self._whole or parts)
        counts = [part.num_rows for part in parts if part.num_rows is not None]
        self.num_rows = sum(counts) if len(counts) == len(parts) else None
        if limit is not None and self.num_rows is not None:
            self.num_rows = min(limit, self.num_rows)
        self.fingerprint = _fingerprint(self.files)
        self._starts = [0]  # of the parts that were reached
        self._next_row = 0
        self._marks = deque([(0, 0.0)])  # rows, and the share of the bytes that these are

    def by_part(self) -> list[RowStream]:
        """The rows of each part as a stream of their own, in the columns and types of all parts."""
        streams = []
        for part in self._parts:
            streams.append(stream := RowStream(part.files[0], [part]))
            stream.schema = self.schema
        return streams

    @functools.cached_property
    def sample(self) -> Rows:
        """The first rows: what was read first of the first file that has any, broken files left out.

        Raises: DataError where there are no rows, or none of the first can be read.
        """
        for part in self._whole:
            if piece := part.peek():
                table, faults = self._fitted(piece)
                if len(faults) == table.num_rows:
                    file, row = part.place(piece.first_row)
                    hint = f"none of the first rows can be read: {faults[0].hint}"
                    raise DataError(faults[0].message, file=file, row=row, value=faults[0].value, hint=hint)
                files = tuple(part.files[: table.num_rows])
                return Rows(table=table, name=self.name, files=files, starts=tuple(range(len(files))))
        raise no_rows(self.name, self.schema.names)

    def collect(self) -> Rows:
        """All rows in memory.

        Raises: DataError where there are none, for the first that cannot be read, and for a file that is damaged.
        """
        tables: list[pa.Table] = []
        files: list[str] = []
        starts: list[int] = []
        num_rows = 0
        for part in self._parts:
            starts += range(num_rows, num_rows + len(part.files))  # several files are of one row each
            files += part.files
            for piece in part.pieces(0):
                table, faults = self._fitted(piece)
                if faults:
                    row = min(faults)
                    raise faults[row].at(*part.place(piece.first_row + row))
                tables.append(table)
                num_rows += table.num_rows
        if not num_rows:
            raise no_rows(self.name, self.schema.names)
        table = pa.concat_tables(tables)
        if table.nbytes < len(tables) * _SMALL_BYTES:
            table = table.combine_chunks()
        said = {"notes": self.notes, "warnings": self.warnings}
        return Rows(table=table, name=self.name, files=tuple(files), starts=tuple(starts), **said)

    def beginning(self) -> Iterator[pa.Table]:
        """The sample and the rows behind it, table by table in the types of `schema`, read for as long as they are
        asked for; of a pipe the sample alone, and of a file that is damaged what comes before.
        """
        yield self.sample.table.slice(0, self._limit)
        if self._limit is not None and self._limit <= self.sample.num_rows:
            return
        with suppress(DataError), refusals(self.name):  # `chunks` says so when it is there
            files = (part for part in self._whole if part.size_bytes is not None)
            pieces = (piece for part in files for piece in part.pieces(0) if piece.table.num_rows)
            for piece in itertools.islice(pieces, 1, None):  # the first is the sample
                yield self._fitted(piece)[0]

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The rows from `start` on, in order; Parquet and Arrow files pass over those before without reading them.

        Raises: DataError for a file that is damaged or gone, when it is reached, after the rows before.
        """
        for chunk in self._all_chunks(start):
            left = None if self._limit is None else self._limit - chunk.first_row
            if left is None or chunk.table.num_rows < left:
                yield chunk
                continue
            if left > 0:
                yield replace(chunk, table=chunk.table.slice(0, left), errors=chunk.errors.slice(0, left))
            return

    def _all_chunks(self, start: int) -> Iterator[Chunk]:
        self._starts, self._next_row = [], 0
        self._marks = deque([(0, 0.0)])
        with refusals(self.name):
            for part in self._parts:
                self._starts.append(self._next_row)
                yield from self._chunks_of(part, start)
                self._mark()

    def _chunks_of(self, part: Part, start: int) -> Iterator[Chunk]:
        part_start, part.share = self._next_row, 0.0
        if part.num_rows is None or part_start + part.num_rows > start:
            for piece in part.pieces(max(0, start - part_start)):
                first_row = part_start + piece.first_row
                self._next_row = first_row + piece.table.num_rows
                self._mark()
                if self._next_row > start:
                    yield from self._cut(piece, first_row, max(0, start - first_row))
        part.share = 1.0
        if part.num_rows is not None:
            self._next_row = part_start + part.num_rows

    def _cut(self, piece: Piece, first_row: int, skipped: int) -> Iterator[Chunk]:
        table, faults = self._fitted(piece)
        for begin in range(skipped, table.num_rows, _CHUNK_ROWS):
            rows = table.slice(begin, _CHUNK_ROWS)
            errors = pa.nulls(rows.num_rows, pa.large_string())
            if faults:
                numbers = range(begin, begin + rows.num_rows)
                errors = pa.array([str(faults[row]) if row in faults else None for row in numbers], errors.type)
            yield Chunk(table=rows, errors=errors, first_row=first_row + begin)

    def _fitted(self, piece: Piece) -> RowsRead:
        """The rows in the types of the stream, with their faults."""
        if piece.table.schema.equals(self.schema):
            return piece.table, dict(piece.faults)
        table, faults = refit(piece.table, lambda rows: _conformed(rows, self.schema), pa.ArrowInvalid)
        return table, faults | dict(piece.faults)

    def place(self, row: int) -> tuple[str, int]:
        """File, and 1-based row within it without the header, of the 0-based `row`, which was read or passed over."""
        index = bisect_right(self._starts, row) - 1
        return self._parts[index].place(row - self._starts[index])

    def progress(self, num_rows: int) -> float | None:
        """Share of the input's bytes that the first rows are, about, 0 to 1; None for a pipe. They were read since the
        rows were last begun, and from call to call they become more; another thread may be reading."""
        if self._limit is not None and self.num_rows is None:
            return min(1.0, num_rows / self._limit)
        if self._bytes_before is None:
            return None
        while len(self._marks) > 1 and self._marks[1][0] <= num_rows:
            self._marks.popleft()
        row, share = self._marks[0]
        if len(self._marks) == 1:
            return share
        next_row, next_share = self._marks[1]
        return share + (next_share - share) * (num_rows - row) / (next_row - row)

    def _mark(self) -> None:
        """Remembers the share that was read by now, to the end of a block or of a file."""
        if self._bytes_before is None:
            return
        current = len(self._starts) - 1
        part, rows_read = self._parts[current], self._next_row - self._starts[current]
        share = rows_read / max(1, part.num_rows) if part.num_rows is not None else part.share
        before, behind = self._bytes_before[current : current + 2]
        read = before + (behind - before) * share
        self._marks.append((self._next_row, read / max(1, self._bytes_before[-1])))

    @functools.cached_property
    def _bytes_before(self) -> list[int] | None:
        """Bytes of the parts before each, and of all; None where there is a pipe."""
        sizes = [part.size_bytes for part in self._parts if part.size_bytes is not None]
        return [0, *itertools.accumulate(sizes)] if len(sizes) == len(self._parts) else None

    @functools.cached_property
    def warnings(self) -> tuple[str, ...]:
        """Doubts about the way that the first file is read; a line each. The others have its columns."""
        with suppress(DataError), refusals(self.name):
            return tuple(doubt for part in self._whole[:1] for doubt in part.warnings())
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions about files, and columns left out of them, so far; a line each."""
        return (*self._guesses, *(note for part in self._parts for note in part.notes()))

    @functools.cached_property
    def _guesses(self) -> tuple[str, ...]:
        """Lines on how many files there are, and on the first line of the first. The others have its columns."""
        with suppress(DataError), refusals(self.name):
            return (*self._files_note(), *(guess for part in self._whole[:1] for guess in part.guesses()))
        return ()

    def _files_note(self) -> list[str]:
        """One line on several files that are read after one another."""
        if len(self._parts) == 1:
            return []
        shown = listed([printable(Path(part.files[0]).name, 40) for part in self._parts], _SHOWN_FILES)
        return [f"{len(self._parts):,} files are read as one data set: {shown}"]


def _common_schema(parts: Sequence[Part]) -> pa.Schema:
    """The columns of all parts, in the order of the first. Raises: DataError where they have not the same."""
    first = parts[0]
    for part in parts:
        if differing := (part.always - first.seen) | (first.always - part.seen):
            shown = ", ".join(map(repr, sorted(differing)[:5]))
            doubts = (*first.warnings(), *part.warnings())
            raise DataError(
                f"has not the columns of {printable(first.files[0])}; they differ in {shown}",
                file=part.files[0],
                hint=doubts[0] if doubts else f"it has {printable(', '.join(part.schema.names))}",
            )
    names = dict.fromkeys(name for part in parts for name in part.schema.names)
    types = {n: common_type({part.schema.field(n).type for part in parts if n in part.schema.names}) for n in names}
    schema = pa.schema(list(types.items()))
    for part in parts:
        try:
            _conformed(part.schema.empty_table(), schema)
        except pa.ArrowException as error:
            said = f"has columns that cannot be read like those of the other files ({first_line(error)})"
            raise DataError(said, file=part.files[0], hint="write all files with the same types") from error
    return schema


def _conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows in the columns and types of `schema`; a column that they lack is null."""
    names = set(rows.column_names)
    columns = [
        converted(rows[field.name], field.type) if field.name in names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _fingerprint(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0".encode("utf-8", "surrogateescape"))
        if Path(file).is_file():
            status = Path(file).stat()
            digest.update(f"{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()
