"""Parts of a stream: they give rows piece by piece, with an error for each row that cannot be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from brimful.core.errors import DataError, first_line
from brimful.data.readers.column_types import tidy
from brimful.data.readers.compression import not_utf8
from brimful.data.readers.text_encoding import decoded_text

#: Most rows of a table from files that say how many rows they have.
BATCH_ROWS = 16_384
#: About the most bytes that are read at a time.
BLOCK_BYTES = 4 << 20

_FILES_AT_A_TIME = 256


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a part. first_row: rows of the part before it. faults: error by row of the table."""

    first_row: int
    table: pa.Table
    faults: Mapping[int, DataError] = field(default_factory=dict)


#: Rows, and the error of each that cannot be read, by its number in the table.
RowsRead = tuple[pa.Table, dict[int, DataError]]


class Part(ABC):
    """Rows that are read together, mostly those of one file.

    files: the part's. size_bytes: how much there is to read, None for a pipe. num_rows: None where only reading tells.
    share: how much was read, 0 to 1, where num_rows is None. schema: of all its tables.
    """

    files: Sequence[str]
    size_bytes: int | None
    num_rows: int | None = None
    share: float = 0.0
    schema: pa.Schema

    @abstractmethod
    def pieces(self, start: int) -> Iterator[Piece]:
        """The rows in order, from `start` or from any row before it on."""

    @property
    def always(self) -> frozenset[str]:
        """The columns that all rows have, as far as was looked."""
        return frozenset(self.schema.names)

    @property
    def seen(self) -> frozenset[str]:
        """The columns that any row has, as far as was looked."""
        return frozenset(self.schema.names)

    def peek(self) -> Piece | None:
        """The first piece that has rows."""
        return next((piece for piece in self.pieces(0) if piece.table.num_rows), None)

    def place(self, row: int) -> tuple[str, int]:
        """File, and 1-based row within it, of the part's 0-based `row`."""
        return self.files[0], row + 1

    def notes(self) -> list[str]:
        """Decisions and columns left out so far, for the user."""
        return []

    def guesses(self) -> list[str]:
        """Guesses about the first line, for the user."""
        return []

    def warnings(self) -> list[str]:
        """Doubts about the way that the rows are read, seen from the first of them."""
        return []


def batch_rows(num_bytes: int, num_rows: int) -> int:
    """Rows to read at a time of `num_rows` that take `num_bytes`: about a block of them."""
    return min(BATCH_ROWS, max(1, BLOCK_BYTES * num_rows // max(1, num_bytes)))


def in_order(tables: Iterable[RowsRead]) -> Iterator[Piece]:
    """Tables with their faults as pieces, from row 0 on."""
    row = 0
    for table, faults in tables:
        yield Piece(row, table, faults)
        row += table.num_rows


def refit(table: pa.Table, fit: Callable[[pa.Table], pa.Table], refusal: type[Exception]) -> RowsRead:
    """`fit(table)`; values that it refuses are null, and their rows have a fault.

    fit: works on each column by itself, and on any rows of a table. refusal: raised by `fit` for a value.
    """
    tables: list[pa.Table] = []
    faults: dict[int, DataError] = {}
    parts = [(0, table)]
    while parts:
        first_row, part = parts.pop()
        try:
            tables.append(fit(part))
        except refusal:
            if part.num_rows > 1:
                half = part.num_rows // 2
                parts += [(first_row + half, part.slice(half)), (first_row, part.slice(0, half))]
            else:
                row, faults[first_row] = _refit_row(part, fit, refusal)
                tables.append(row)
    return (pa.concat_tables(tables).combine_chunks() if faults else tables[0]), faults


def _refit_row(
    row: pa.Table, fit: Callable[[pa.Table], pa.Table], refusal: type[Exception]
) -> tuple[pa.Table, DataError]:
    columns: dict[str, pa.ChunkedArray] = {}
    faults: list[DataError] = []
    for name in row.column_names:
        alone = row.select([name])
        try:
            columns[name] = fit(alone)[name]
        except refusal as error:
            fault = error if isinstance(error, DataError) else DataError(first_line(error), hint="mend the value")
            faults.append(fault.in_column(name))
            columns[name] = pa.nulls(1, fit(alone.schema.empty_table()).schema.field(name).type)
    return pa.table(columns), faults[0]


class BrokenPart(Part):
    """A file that cannot be read from its start on: it raises `error` wherever its rows are asked for."""

    def __init__(self, file: str, error: DataError) -> None:
        self.files, self.schema, self._error = (file,), pa.schema([]), error
        self.size_bytes = Path(file).stat().st_size if Path(file).is_file() else 0

    def pieces(self, start: int) -> Iterator[Piece]:
        raise self._error


class TablePart(Part):
    """Rows of a table that is in memory or mapped into it."""

    def __init__(self, name: str, table: pa.Table) -> None:
        self.files, self.size_bytes, self.num_rows = (name,), table.nbytes, table.num_rows
        self._table = table
        self.schema = tidy(table.schema.empty_table(), name).schema

    def pieces(self, start: int) -> Iterator[Piece]:
        step = batch_rows(self._table.nbytes, self._table.num_rows)
        for row in range(start, self._table.num_rows, step):
            yield Piece(row, *refit(self._table.slice(row, step), tidy, DataError))


class TextFilesPart(Part):
    """Files of text, a row each, with the class that each belongs to, or without labels with its name."""

    def __init__(self, files: Sequence[str], labels: Sequence[str] | None, encoding: str | None = None) -> None:
        self.files, self.num_rows, self._encoding = files, len(files), encoding
        self._others = {"label": labels} if labels is not None else {"file": [Path(file).name for file in files]}
        self.schema = pa.schema([(name, pa.large_string()) for name in ("text", *self._others)])
        self.size_bytes = sum(Path(file).stat().st_size for file in self.files)
        self._notes: dict[str, str] = {}

    def pieces(self, start: int) -> Iterator[Piece]:
        for row in range(start, len(self.files), _FILES_AT_A_TIME):
            texts: list[str | None] = []
            faults: dict[int, DataError] = {}
            for file in self.files[row : row + _FILES_AT_A_TIME]:
                try:
                    text, note = decoded_text(Path(file).read_bytes(), file, self._encoding)
                except UnicodeDecodeError as error:
                    text, note, faults[len(texts)] = None, None, not_utf8(error.object)
                except DataError as error:
                    text, note, faults[len(texts)] = None, None, error.at(file, 1)
                texts.append(text)
                if note is not None:
                    self._notes[file] = note
            columns = [texts, *(values[row : row + _FILES_AT_A_TIME] for values in self._others.values())]
            arrays = [pa.array(values, pa.large_string()) for values in columns]
            yield Piece(row, pa.table(arrays, schema=self.schema), faults)

    def notes(self) -> list[str]:
        first = next(iter(self._notes.values()), None)
        more = f" (and {len(self._notes) - 1:,} more of {len(self.files):,} files)" if len(self._notes) > 1 else ""
        return [] if first is None else [first + more]

    def place(self, row: int) -> tuple[str, int]:
        return self.files[row], 1
