"""Rows of any number of files, or of a pipe, in constant memory. A row that cannot be read keeps its place.

    stream = open_stream("reviews/*.jsonl")
    for chunk in stream.chunks():
        ...

What is wrong with a row stands beside it; what is wrong with a file ends the stream, after the rows before it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from brimful.core.errors import DataError, first_line
from brimful.data.readers.compression import reading
from brimful.data.readers.formats import checked_kind
from brimful.data.readers.hub import load_hub
from brimful.data.readers.json_rows import has_lines, parse_document
from brimful.data.readers.locations import Location, locate, refusals
from brimful.data.readers.rows import Rows, common_type, converted, no_rows, other_columns
from brimful.data.readers.streams.columnar import ArrowPart, ParquetPart
from brimful.data.readers.streams.delimited import DelimitedPart
from brimful.data.readers.streams.json_rows import JsonObjectsPart, JsonPipePart, json_lines_parts
from brimful.data.readers.streams.lines import FileLines
from brimful.data.readers.streams.parts import Part, Piece, RowsRead, TablePart, TextFilesPart, refit

_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows.

    table: all columns, in the types of `RowStream.schema`.
    errors: (rows) large_string, null where the row could be read, else what is wrong with it. Values of such a row that
    could not be read, or not be told from one another, are null; the others are as they stand there.
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
    """

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self._parts = parts
        self.files = tuple(file for part in parts for file in part.files)
        self.schema = _common_schema(parts)
        counts = [part.num_rows for part in parts if part.num_rows is not None]
        self.num_rows = sum(counts) if len(counts) == len(parts) else None
        self.fingerprint = _fingerprint(self.files)
        self._starts = [0]  # of the parts that were reached
        self._next_row = 0
        self._marks = deque([(0, 0.0)])  # rows, and the share of the bytes that these are

    def sample(self) -> Rows:
        """The first rows: what was read first of the first file that has any. Asked again, the same.

        Raises: DataError where there are no rows, or none of the first can be read.
        """
        return self._sample

    @functools.cached_property
    def _sample(self) -> Rows:
        for part in self._parts:
            if piece := part.peek():
                table, faults = self._fitted(piece)
                if len(faults) == table.num_rows:
                    file, row = part.place(piece.first_row)
                    raise DataError(faults[0], file=file, row=row, hint="none of the first rows can be read")
                files = tuple(part.files[: table.num_rows])
                return Rows(table=table, name=self.name, files=files, starts=tuple(range(len(files))))
        raise no_rows(self.name, self.schema.names)

    def beginning(self) -> Iterator[pa.Table]:
        """The sample and the rows behind it, table by table in the types of `schema`, read for as long as they are
        asked for; of a pipe the sample alone, and of a file that is damaged what comes before.
        """
        yield self._sample.table
        with suppress(DataError), refusals(self.name):  # `chunks` says so when it is there
            files = (part for part in self._parts if part.size_bytes is not None)
            pieces = (piece for part in files for piece in part.pieces(0) if piece.table.num_rows)
            for piece in itertools.islice(pieces, 1, None):  # the first is the sample
                yield self._fitted(piece)[0]

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The rows from `start` on, in order; Parquet and Arrow files pass over those before without reading them.

        Raises: DataError for a file that is damaged or gone, when it is reached, after the rows before.
        """
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
            errors = [faults.get(row) for row in range(begin, begin + rows.num_rows)] if faults else [None] * len(rows)
            yield Chunk(table=rows, errors=pa.array(errors, pa.large_string()), first_row=first_row + begin)

    def _fitted(self, piece: Piece) -> RowsRead:
        """The rows in the types of the stream, with what is wrong with them."""
        if piece.table.schema.equals(self.schema):
            return piece.table, dict(piece.faults)
        table, faults = refit(piece.table, lambda rows: _conformed(rows, self.schema), pa.ArrowInvalid)
        return table, faults | dict(piece.faults)

    def place(self, row: int) -> tuple[str, int]:
        """File, and 1-based row within it without the header, of the 0-based `row`, which was read or passed over."""
        index = bisect_right(self._starts, row) - 1
        return self._parts[index].place(row - self._starts[index])

    def progress(self, num_rows: int) -> float | None:
        """How much of the input's bytes the first rows are, about, 0 to 1; None for a pipe. They were read since the
        rows were last begun, and from call to call they become more; another thread may be reading."""
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
        """What was read by now, to the end of a block or of a file."""
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided about files, and left out of them, so far; a line each."""
        return tuple(note for part in self._parts for note in part.notes())


def open_stream(spec: str, stdin: BinaryIO | None = None) -> RowStream:
    """The rows of `spec`, which is what `sources.read_rows` takes, or `-` for JSON lines on `stdin`.

    A column has one type in all files: the wider number, or text, where their types differ.

    Raises: DataError for what is missing, empty, of different columns, or damaged where that is seen from the start.
    """
    with refusals(spec):
        if spec == "-":
            stream = RowStream(spec, [JsonPipePart(stdin or sys.stdin.buffer)])
        else:
            stream = RowStream(spec, _parts_at(locate(spec)))
        stream.sample()
    return stream


def _parts_at(locations: Sequence[Location]) -> list[Part]:
    files = [location.path for location in locations if location.label is None and location.otherwise is None]
    kinds = {file: _kind_of(file) for file in files}
    json_files = [file for file in files if kinds[file] == ".jsonl"]
    json_parts = dict(zip(json_files, json_lines_parts(json_files), strict=True))
    parts: list[Part] = []
    for label, group in itertools.groupby(locations, key=lambda location: location.label is not None):
        if label:
            parts.append(TextFilesPart([(each.path, each.label or "") for each in group]))
        else:
            parts.extend(json_parts.get(each.path) or _part_at(each, kinds.get(each.path)) for each in group)
    return parts


def _kind_of(file: str) -> str:
    """The end of its name; .jsonl for all files with an object per line."""
    kind = checked_kind(file)
    if kind == ".json":
        head = next(FileLines(file).blocks()).data
        kind = ".jsonl" if head is not None and has_lines(head) else kind
    return ".jsonl" if kind == ".ndjson" else kind


def _part_at(location: Location, kind: str | None) -> Part:
    if location.otherwise is not None:
        return TablePart(location.path, load_hub(location.path, location.otherwise))
    file = location.path
    if kind == ".json":
        with reading(file) as stream:
            rows = parse_document(stream.read().removeprefix(b"\xef\xbb\xbf"), file)
        return TablePart(file, rows) if isinstance(rows, pa.Table) else JsonObjectsPart(file, rows)
    if kind in (".csv", ".tsv"):
        return DelimitedPart(file, "\t" if kind == ".tsv" else None)
    return ParquetPart(file) if kind == ".parquet" else ArrowPart(file)


def _common_schema(parts: Sequence[Part]) -> pa.Schema:
    """The columns of all parts, in the order of the first. Raises: DataError where they have not the same."""
    first = parts[0]
    for part in parts:
        if differing := (part.always - first.seen) | (first.always - part.seen):
            raise other_columns(part.files[0], part.schema.names, first.files[0], differing)
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
