"""Results of a classification as a table in memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from brimful.core.classification import Classification, Counts


class TableOutput:
    """Results that are kept. table: all of them, once the pass is finished."""

    finished = None
    lost = None

    def __init__(self) -> None:
        self._windows: list[pa.Table] = []
        self.counts = Counts()

    @property
    def rows_done(self) -> int:
        return self.counts.num_rows

    @property
    def table(self) -> pa.Table:
        return pa.concat_tables(self._windows)

    def write(self, table: pa.Table, counts: Counts) -> None:
        self._windows.append(table)
        self.counts += counts

    def finish(self, record: Classification) -> tuple[Path, ...]:
        """Nothing is left to do; there are no files."""
        return ()

    def __enter__(self) -> TableOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held back."""
