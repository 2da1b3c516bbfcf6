"""Rows: one Arrow table with the place in the files that each row came from."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_PIECE_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of one or more files.

    table: text as large_string; numbers, booleans and lists as the files have them.
    name: what the user asked for.
    files, starts: file i holds the rows from starts[i] on. A file of text is a file of one row.
    notes: decisions about files, and columns left out of them, a line each. warnings: doubts about them.
    """

    table: pa.Table
    name: str
    files: tuple[str, ...]
    starts: tuple[int, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def place(self, row: int) -> tuple[str, int]:
        """File as the user gave it, and 1-based row within it without the header, of the 0-based `row`."""
        part = bisect_right(self.starts, row) - 1
        return self.files[part], row - self.starts[part] + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of names, types and values in row order; the cut into files and chunks does not count."""
        digest = hashlib.sha256()
        for name, column in zip(self.table.column_names, self.table.columns, strict=True):
            digest.update(f"{name}\0{column.type}\0{len(column)}\0".encode())
            for start in range(0, len(column), _PIECE_ROWS):
                digest_values(digest, pa.concat_arrays(column.slice(start, _PIECE_ROWS).chunks))
        return digest.hexdigest()


def digest_values(digest: hashlib._Hash, values: pa.Array) -> None:
    """Add values to the digest, whatever lies in the slots of nulls and before an array's offset."""
    digest.update(values.is_null().to_numpy(zero_copy_only=False).tobytes())
    kind = values.type
    if pa.types.is_large_string(kind):
        values = values.fill_null("")
        digest.update(pc.binary_length(values).to_numpy(zero_copy_only=False).tobytes())
        ends = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
        if ends[-1] > ends[0]:
            digest.update(values.buffers()[2].slice(int(ends[0]), int(ends[-1] - ends[0])))
    elif pa.types.is_large_list(kind):
        digest.update(pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).tobytes())
        digest_values(digest, values.flatten())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        digest.update(values.fill_null(pa.scalar(0).cast(kind)).to_numpy(zero_copy_only=False).tobytes())
    else:
        digest.update(pa.record_batch([values], names=["values"]).serialize())
