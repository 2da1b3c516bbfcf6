"""Training and classification read the same rows of every format, in blocks of any size, and name the same faults."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brimful.core.errors import DataError
from brimful.data.readers import lines, parts
from brimful.data.readers.sources import open_stream, read_rows

FORMATS = ["csv", "tsv", "json", "jsonl", "parquet", "arrow", "feather", "csv.gz", "tsv.zst", "json.zst", "jsonl.gz"]
Row = dict[str, Any]

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
awkward = st.sampled_from(['"', '""', '" ', ",", "\t", ";", "\n", "\r\n", "\r", "007", "NA", "null", "é", "👍", " "])
texts = st.builds(
    "".join, st.lists(awkward | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=4)
)
typed = st.fixed_dictionaries({
    "text": texts,
    "n": st.integers(-(2**62), 2**62),
    "x": st.floats(allow_nan=False, allow_infinity=False),
    "ok": st.booleans(),
    "tags": st.lists(texts, max_size=3),
})  # fmt: skip


@contextlib.contextmanager
def blocks_of(num_bytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", num_bytes)
        patch.setattr(parts, "BLOCK_BYTES", num_bytes)
        yield


def encoded(rows: list[Row], name: str) -> bytes:
    kind, _, packing = name.partition(".")
    if packing:
        data = encoded(rows, kind)
        return gzip.compress(data) if packing == "gz" else pa.compress(data, codec="zstd", asbytes=True)
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    if kind == "json":
        return json.dumps(rows).encode()
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    out, table = io.BytesIO(), pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, out, row_group_size=3)
    elif kind == "feather":
        pyarrow.feather.write_feather(table, out, chunksize=3, compression="uncompressed")
    else:
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return out.getvalue()


def streamed(file: Path) -> tuple[pa.Table, dict[int, str]]:
    stream = open_stream(str(file))
    chunks = list(stream.chunks())
    errors = pa.chunked_array([chunk.errors for chunk in chunks], pa.large_string()).to_pylist()
    faults = {row: error for row, error in enumerate(errors) if error is not None}
    return pa.Table.from_batches([b for c in chunks for b in c.table.to_batches()], stream.schema), faults


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMATS)
@quick
@given(rows=st.lists(typed, min_size=1, max_size=9), blocks=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_both_commands_read_what_was_written(
    tmp_path: Path, name: str, rows: list[Row], blocks: tuple[int, int]
) -> None:
    if name.startswith(("csv", "tsv")):
        rows = [{"text": row["text"], "label": str(row["n"])} for row in rows]
    file = tmp_path / f"rows.{name}"
    file.write_bytes(encoded(rows, name))
    with blocks_of(blocks[0]):
        collected = read_rows(str(file))
    with blocks_of(blocks[1]):
        table, faults = streamed(file)
    assert faults == {}
    assert collected.table.to_pylist() == table.to_pylist() == rows
    assert collected.table.schema == table.schema or name.startswith("json")  # types are those of the first block
    assert collected.place(len(rows) - 1) == (str(file), len(rows))


raw = st.lists(
    st.sampled_from(
        [b'"', b'""', b",", b"\n", b"\r\n", b"\r", b"\xff", b"\0", b"{", b"}", b'{"text": "a"}\n', b"[1]\n"]
    )
    | st.sampled_from([b'"a, b",1\n', b'"so" it goes,1\n', b'{"text": 1}\n', b'{"n": 1.5}\n', b'{"text": "\xe9"}\n'])
    | st.binary(max_size=4),
    max_size=20,
).map(b"".join)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["csv", "tsv", "json", "jsonl"])
@quick
@given(data=raw, block_bytes=st.integers(1, 60))
def test_of_whatever_bytes_training_refuses_the_first_fault_of_classification(
    tmp_path: Path, name: str, data: bytes, block_bytes: int
) -> None:
    head = {"csv": b"text,label\na,b\n", "tsv": b"text\tlabel\na\tb\n", "jsonl": b'{"text": "a"}\n'}.get(name, b"")
    file = tmp_path / f"rows.{name}"
    file.write_bytes(head + data)
    with blocks_of(block_bytes):
        table, said = pa.table({}), None
        try:
            table, faults = streamed(file)
            if faults:
                said = f"{file}, row {min(faults) + 1}: {faults[min(faults)]}"
        except DataError as error:
            said = str(error)
        if said is None:
            assert read_rows(str(file)).table.equals(table)
        else:
            with pytest.raises(DataError) as caught:
                read_rows(str(file))
            assert str(caught.value) == said
            assert caught.value.hint


def test_quotes_of_a_long_file_are_judged_once(tmp_path: Path) -> None:
    """Millions of bytes of quoted values, and a last line with text after a mark that closes."""
    file = tmp_path / "rows.csv"
    quoted = "".join(f'"a film, number {n}, with a plot","{("bad", "good")[n % 2]}"\n' for n in range(130_000))
    file.write_text(f'text,label\n{quoted}"so" it goes,good\n')
    assert file.stat().st_size > 5_200_000
    rows = read_rows(str(file))
    table, faults = streamed(file)
    assert faults == {}
    assert rows.table.equals(table)
    assert sorted(rows.table["label"].unique().to_pylist()) == ["bad", "good"]
    assert rows.table.slice(129_999).to_pylist() == [
        {"text": "a film, number 129999, with a plot", "label": "good"},
        {"text": "so it goes", "label": "good"},
    ]


def test_quotes_are_judged_where_the_first_of_them_stand(tmp_path: Path) -> None:
    """Nothing before them says what they are for."""
    file = tmp_path / "rows.tsv"
    bare = '"so it begins\t1\nsaid "no"\t0\nall "\t1\n'
    file.write_text("text\tlabel\n" + "a film\t0\n" * 99 + bare)
    with blocks_of(200):
        rows = read_rows(str(file))
        table, faults = streamed(file)
    assert faults == {}
    assert rows.table.equals(table)
    assert rows.table["text"].to_pylist()[99:] == ['"so it begins', 'said "no"', 'all "']
    assert "quotation marks are read as text" in rows.notes[0]


def test_decisions_about_a_file_are_told_to_both(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text('text\tlabel\n"so it begins\t1\nsaid "no"\t0\n')
    note = f"{file}: quotation marks are read as text, as they do not stand around values"
    stream = open_stream(str(file))
    list(stream.chunks())
    assert read_rows(str(file)).notes == stream.notes == (note,)
