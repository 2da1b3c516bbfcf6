"""Rows that come in any order, sorted in memory that does not grow with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core import atomic_files
from brimful.core.errors import DiskFullError, OutputError
from brimful.data.writers import sorted_rows
from brimful.data.writers.sorted_rows import SortedRows

FEW_BYTES = 1 << 12


def columns_of(rows: np.ndarray) -> dict[str, pa.Array]:
    """A text, a list and a number of each row; some are null, some lists empty."""
    texts = [None if row % 7 == 3 else f"text {row}" for row in rows]
    lists = [None if row % 5 == 2 else [f"label {row + i}" for i in range(row % 4)] for row in rows]
    return {
        "text": pa.array(texts, pa.large_string()),
        "list": pa.array(lists, pa.list_(pa.large_string())),
        "number": pa.array(rows / 8),
    }


def windows(num_rows: int, sizes: list[int], seed: int) -> Iterator[np.ndarray]:
    """All rows, in any order, of so many at a time, over and over."""
    order, start = np.random.default_rng(seed).permutation(num_rows), 0
    for size in sizes * num_rows:
        if start < num_rows:
            yield order[start : start + size]
            start += size


def whole(found: SortedRows) -> tuple[list[int], pa.Table]:
    blocks = list(found.blocks())
    assert all(len(rows) == len(table) for rows, table in blocks)
    return [row for rows, _ in blocks for row in rows.tolist()], pa.concat_tables([table for _, table in blocks])


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("most_held", [0, FEW_BYTES, sorted_rows._MOST_HELD])
@given(num_rows=st.integers(1, 300), sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_all_rows_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, most_held: int, num_rows: int, sizes: list[int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "_MOST_HELD", most_held)
        patch.setattr(sorted_rows, "_BLOCK_VALUES", 64)
        found = SortedRows(tmp_path_factory.getbasetemp(), most_values=4)
        for rows in windows(num_rows, sizes, seed):
            found.add(rows, columns_of(rows))
        numbers, table = whole(found)
        assert numbers == list(range(num_rows))
        assert table.equals(pa.table(columns_of(np.arange(num_rows))))


def test_no_rows_are_no_blocks(tmp_path: Path) -> None:
    assert list(SortedRows(tmp_path, most_values=3).blocks()) == []


def test_a_block_has_as_many_rows_as_their_values_allow(tmp_path: Path) -> None:
    """So that a file of a few thousand rows of few labels has one row group, as if it were written at once."""
    sizes = []
    for most_values, num_rows in ((2, 40_000), (1 << 20, 5), (1 << 30, 2)):
        found = SortedRows(tmp_path, most_values=most_values)
        found.add(np.arange(num_rows), {"number": pa.array(np.arange(num_rows))})
        sizes.append([len(rows) for rows, _ in found.blocks()])
    assert sizes == [[1 << 15, 40_000 - (1 << 15)], [2, 2, 1], [1, 1]]


def test_what_is_held_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that pyarrow has for 4,000 rows of 50 labels each, 4 MB of them; and nothing of the file is seen."""
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", most := 1 << 18)
    before, found, held = pa.total_allocated_bytes(), SortedRows(tmp_path, most_values=50), []
    labels = [f"a label of some length {i}" for i in range(50)]
    for rows in windows(4_000, [64], 0):
        found.add(rows, {"label": pa.array([labels] * len(rows), pa.list_(pa.large_string()))})
        held.append(pa.total_allocated_bytes() - before)
    assert max(held) < 2 * most
    assert list(tmp_path.iterdir()) == []
    assert whole(found)[0] == list(range(4_000))


def test_a_few_rows_make_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_rows, "_BatchFile", None)
    found = SortedRows(tmp_path / "is not there", most_values=3)
    found.add(rows := np.array([2, 0, 1]), columns_of(rows))
    assert whole(found)[0] == [0, 1, 2]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EIO, OutputError)])
def test_a_write_that_fails_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fails(*given: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    monkeypatch.setattr(atomic_files, "write_all", fails)
    found = SortedRows(tmp_path, most_values=3)
    with pytest.raises(kind, match=f"cannot write {tmp_path}: {os.strerror(number)}"):
        found.add(rows := np.arange(9), columns_of(rows))


def open_files(folder: Path) -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.readlink().is_relative_to(folder) for link in links)


def test_the_file_goes_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    found = SortedRows(tmp_path, most_values=3)
    found.add(rows := np.arange(9), columns_of(rows))
    assert open_files(tmp_path) == 1
    del found
    assert open_files(tmp_path) == 0


def test_the_file_ends_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its rows are read, and after; and while something else still has them."""
    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    for is_read in (False, True):
        found = SortedRows(tmp_path, most_values=3)
        found.add(rows := np.arange(9), columns_of(rows))
        assert found.file_bytes > 0
        read = list(found.blocks()) if is_read else []
        for _ in range(2):
            found.close()
            assert open_files(tmp_path) == 0
        assert [len(table) for _, table in read] == ([9] if is_read else [])
        del found


def test_the_file_takes_no_room_that_it_must_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for before each part of it, and none is asked for that is not needed."""
    asked = []

    def leave_room(num_bytes: int) -> None:
        asked.append(num_bytes)
        if len(asked) == 2:
            raise DiskFullError("others need it")

    monkeypatch.setattr(sorted_rows, "_MOST_HELD", 0)
    found = SortedRows(tmp_path, most_values=3, leave_room=leave_room)
    found.add(rows := np.arange(9), columns_of(rows))
    before = found.file_bytes
    assert whole(found)[0] == list(range(9))
    assert len(asked) == 1
    assert 0 < asked[0] < 4_000
    with pytest.raises(DiskFullError, match="others need it"):
        found.add(rows + 9, columns_of(rows))
    assert found.file_bytes >= before
