"""Rows as a stream: the same as when read at once, each in its place, and what is said of those that cannot be read."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brimful.core.errors import DataError
from brimful.data.labels.columns import find_columns
from brimful.data.readers import delimited, lines, parts
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.sources import open_stream, read_rows
from brimful.data.readers.stream import Chunk

ROWS = [{"text": "good, really", "label": "pos"}, {"text": 'she said "no"\nand left', "label": "neg"}]
KINDS = ["csv", "tsv", "json", "jsonl", "parquet", "feather", "arrow"]
Row = dict[str, Any]

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encoded(rows: list[Row], kind: str) -> bytes:
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


def put(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


@contextlib.contextmanager
def blocks_of(num_bytes: int) -> Iterator[None]:
    """Files are read in blocks of this size, so that little data has many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", num_bytes)
        patch.setattr(parts, "BLOCK_BYTES", num_bytes)
        yield


def joined(chunks: list[Chunk]) -> list[Row]:
    return [row for chunk in chunks for row in chunk.table.to_pylist()]


def errors_of(chunks: list[Chunk]) -> dict[int, str]:
    """Errors by row; checks that chunks follow one another."""
    found, row = {}, chunks[0].first_row if chunks else 0
    for chunk in chunks:
        assert chunk.first_row == row
        assert len(chunk.errors) == chunk.table.num_rows > 0
        assert chunk.errors.type == pa.large_string()
        found |= {row + i: error for i, error in enumerate(chunk.errors.to_pylist()) if error is not None}
        row += chunk.table.num_rows
    return found


def read(spec: str | Path, encoding: str | None = None) -> tuple[list[Row], dict[int, str]]:
    chunks = list(open_stream(str(spec), form=FileFormat(encoding=encoding)).chunks())
    return joined(chunks), errors_of(chunks)


def refused(spec: str | Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(spec)
    assert "\n" not in str(caught.value)
    return caught.value


# What comes back

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
awkward = st.sampled_from(
    ['"', '""', ",", "\t", ";", "\n", "\r\n", "\r", "\0", "007", "NA", "null", "é", "👍", "x\x1by", " ", "שלום"]
)
values = st.builds("".join, st.lists(awkward | text, max_size=4))


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_every_format(tmp_path: Path, kind: str, packing: str) -> None:
    data = encoded(ROWS, kind)
    if packing:
        data = gzip.compress(data) if packing == ".gz" else pa.compress(data, codec="zstd", asbytes=True)
    file = put(tmp_path / f"rows.{kind}{packing}", data)
    stream = open_stream(file)
    assert stream.schema == pa.schema([("text", pa.large_string()), ("label", pa.large_string())])
    assert stream.num_rows == (None if kind in ("csv", "tsv", "jsonl", "arrow") else 2)
    assert read(file) == (ROWS, {})
    assert find_columns(stream.sample, need_labels=False).text == "text"


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@quick
@given(
    rows=st.lists(st.fixed_dictionaries({"text": values, "label": values}), min_size=1, max_size=12),
    block_bytes=st.integers(1, 200),
    data=st.data(),
)
def test_chunks_are_the_rows_from_any_start(
    tmp_path: Path, kind: str, rows: list[Row], block_bytes: int, data: st.DataObject
) -> None:
    file = put(tmp_path / f"rows.{kind}", encoded(rows, kind))
    start = data.draw(st.integers(0, len(rows) + 1))
    with blocks_of(block_bytes):
        stream = open_stream(file)
        chunks = list(stream.chunks(start))
    assert errors_of(chunks) == {}
    assert joined(chunks) == read_rows(file).table.to_pylist()[start:] == rows[start:]
    assert all(chunk.table.schema == stream.schema for chunk in chunks)
    assert not chunks or chunks[0].first_row == start
    if start < len(rows):
        assert stream.place(len(rows) - 1) == (file, len(rows))
        assert stream.progress(len(rows)) == 1


@quick
@given(texts=st.lists(values, min_size=1, max_size=8), block_bytes=st.integers(1, 60))
def test_one_column_of_csv_is_equal(tmp_path: Path, texts: list[str], block_bytes: int) -> None:
    file = put(tmp_path / "rows.csv", encoded([{"text": text} for text in texts], "csv"))
    with blocks_of(block_bytes):
        rows, errors = read(file)
    assert ([row["text"] for row in rows], errors) == (texts, {})


def test_labelled_text_files(tmp_path: Path) -> None:
    put(tmp_path / "neg" / "a.txt", "bad")
    latin = put(tmp_path / "pos" / "b.txt", "gut f\xfcr".encode("latin-1"))
    put(tmp_path / "pos" / "c.txt", "good")
    stream = open_stream(str(tmp_path), form=FileFormat(encoding="utf-8"))
    chunks = list(stream.chunks())
    assert joined(chunks) == [
        {"text": "bad", "label": "neg"},
        {"text": None, "label": "pos"},
        {"text": "good", "label": "pos"},
    ]
    assert errors_of(chunks) == {1: "is not UTF-8: 'gut f\\xfcr'"}
    assert (stream.place(1), stream.num_rows, stream.sample.place(1)) == ((latin, 1), 3, (latin, 1))
    assert joined(list(stream.chunks(2))) == [{"text": "good", "label": "pos"}]


def test_saved_by_datasets_ids_are_names(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, -1]}, features=features)
    rows.save_to_disk(str(tmp_path / "rows"), num_shards=2)
    assert [row["label"] for row in read(tmp_path / "rows")[0]] == ["neg", "pos", None]
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    assert read(tmp_path / "rows.parquet")[0] == read(tmp_path / "rows")[0]
    table = rows.data.table.set_column(1, "label", pa.chunked_array([[0, 7, 1]]))
    pq.write_table(table.replace_schema_metadata(features.arrow_schema.metadata), tmp_path / "outside.parquet")
    assert read(tmp_path / "outside.parquet") == (
        [{"text": "a", "label": "neg"}, {"text": "b", "label": None}, {"text": "c", "label": "pos"}],
        {1: "column 'label' has ids of classes outside the 2 names in its schema"},
    )


# Rows that cannot be read

tame = st.text(st.sampled_from(list("ab ,é\n")), max_size=8).map(lambda text: f"x{text}")
BAD_CSV = [b"a,b,c\n", b"a\n", b"a\xff,b\n", b'"open,b\n', b'"a" b "c\n', b'a,"open\n']
BAD_JSON = [
    b'{"text": "a"\n',
    b"[1]\n",
    b'"text"\n',
    b'{"text": "half \\ud800", "n": 1}\n',
    b'{"text": "\xff", "n": 1}\n',
    b'{"text": "a\0", "n": 1}\n',
    b'{"text": "a", "n": "many"}\n',
    b'{"text": "a", "n": 1.5}\n',
    b'{"text": "a", "text": "b", "n": 1}\n',
    b"{} {}\n",
]


def csv_line(text: str) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow([text, "y"])
    return out.getvalue().encode()


@quick
@given(lines=st.lists(tame | st.sampled_from(BAD_CSV), max_size=12), block_bytes=st.integers(1, 80))
def test_every_row_of_csv_keeps_its_place(tmp_path: Path, lines: list[str | bytes], block_bytes: int) -> None:
    """The rows at the beginning show what quotation marks are for: there are more of them than of bad ones."""
    lines = ["a, b"] * 13 + lines
    data = b"".join(line if isinstance(line, bytes) else csv_line(line) for line in lines)
    file = put(tmp_path / "rows.csv", b"text,label\n" + data)
    with blocks_of(block_bytes):
        rows, errors = read(file, "utf-8")
    assert len(rows) == len(lines)
    for row, line in enumerate(lines):
        assert (row in errors) == isinstance(line, bytes)
        if isinstance(line, str):
            assert rows[row] == {"text": line, "label": "y"}


@quick
@given(lines=st.lists(values | st.sampled_from(BAD_JSON), max_size=12), block_bytes=st.integers(1, 20))
def test_every_row_of_json_keeps_its_place(tmp_path: Path, lines: list[str | bytes], block_bytes: int) -> None:
    """Blocks are so short that the first line alone fixes the types."""
    lines = ["first", *lines]
    good = [{"text": line, "n": n} for n, line in enumerate(lines)]
    data = [line if isinstance(line, bytes) else encoded([row], "jsonl") for line, row in zip(lines, good, strict=True)]
    file = put(tmp_path / "rows.jsonl", b"".join(data))
    with blocks_of(block_bytes):
        rows, errors = read(file)
    assert len(rows) == len(lines)
    for row, line in enumerate(lines):
        assert (row in errors) == isinstance(line, bytes)
        if isinstance(line, str):
            assert rows[row] == good[row]


def test_what_is_said_of_rows_of_csv(tmp_path: Path) -> None:
    bad = ["a,b,c,1", "a", '"so it begins,1', '"c, d",2', "caf\udce9 noir,1", '"e" f,1', '"open,1']
    lines = ['"a, b",1'] * 3 + bad
    file = put(tmp_path / "rows.csv", "\n".join(["text,label", *lines]).encode("utf-8", "surrogateescape"))
    stream = open_stream(file, form=FileFormat(encoding="utf-8"))
    chunks = list(stream.chunks())
    assert [tuple(row.values()) for row in joined(chunks)] == [
        *[("a, b", "1")] * 3,
        *[(None, None)] * 3,
        *[("c, d", "2"), (None, "1"), ("e f", "1"), (None, None)],
    ]
    assert errors_of(chunks) == {
        3: "4 columns, the header has 2: 'a,b,c,1'",
        4: "1 column, the header has 2: 'a'",
        5: "a quotation mark opens and does not close: '\"so it begins,1'",
        7: "column 'text' is not UTF-8: 'caf\\xe9 noir'",
        9: "a quotation mark opens and does not close: '\"open,1'",
    }
    assert (stream.place(5), stream.notes) == ((file, 6), ())


def test_what_is_said_of_rows_of_json(tmp_path: Path) -> None:
    good = {"text": "a", "n": 1, "x": 0.5, "ok": True, "tags": ["b"], "by": {"name": "c"}, "any": None}
    lines = [
        json.dumps(good),
        '{"text": "a", "n": "many", "x": 2, "any": 5}',
        '{"text": "half \\ud83d", "n": 2.0}',
        '{"text": 7, "ok": 1}',
        '{"tags": "b", "by": {"name": "d", "age": 3}}',
        '{"text": "cut off',
        "12",
        "",
        '{"text": "a", "lang": "de"}',
    ]
    file = put(tmp_path / "rows.jsonl", "\n".join(lines))
    with blocks_of(len(lines[0]) + 1):
        stream = open_stream(file)
        chunks = list(stream.chunks())
    rows = joined(chunks)
    assert rows[0] == good
    assert (rows[1]["text"], rows[1]["n"], rows[1]["x"], rows[1]["any"]) == ("a", None, 2.0, "5")
    assert (rows[2]["text"], rows[2]["n"], rows[3]["text"], rows[4]["by"]) == (None, 2, "7", {"name": "d"})
    assert [row["text"] for row in rows[5:]] == [None, None, "a"]
    assert errors_of(chunks) == {
        1: "column 'n' holds whole numbers, not this: '\"many\"'",
        2: "column 'text' has half of a surrogate pair, which is no character: '\"half \\ud83d\"'",
        3: "column 'ok' holds true or false, not this: '1'",
        4: "column 'tags' holds lists, not this: '\"b\"'",
        5: 'is not JSON (Unterminated string starting at at character 10): \'{"text": "cut off\'',
        6: "is not a JSON object: '12'",
    }
    assert stream.notes == (f"{file}: left out, as the first rows do not have it: 'by.age', 'lang'",)


def test_text_that_is_not_utf8_in_parquet(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"b\xff", "ü".encode(), b"c"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    pq.write_table(pa.table({"text": texts, "n": [1, 2, 3, 4]}), tmp_path / "rows.parquet")
    rows, errors = read(tmp_path / "rows.parquet")
    assert rows == [{"text": t, "n": n} for t, n in (("a", 1), (None, 2), ("ü", 3), ("c", 4))]
    assert errors == {1: "column 'text' is not UTF-8: 'b\\xff'"}


def test_array_of_json_with_what_is_no_object(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.json", json.dumps([{"text": "a"}, 5, {"text": "half \ud800"}]))
    rows, errors = read(file)
    assert [row["text"] for row in rows] == ["a", None, None]
    assert errors[1] == "is not a JSON object: '5'"
    assert "half of a surrogate pair" in errors[2]


def test_quotation_marks_that_are_text(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.tsv", 'text\tlabel\n"so it begins\t1\nsaid "no"\t0\nall "\t1\n')
    stream = open_stream(file)
    assert [row["text"] for row in joined(list(stream.chunks()))] == ['"so it begins', 'said "no"', 'all "']
    assert stream.notes == (f"{file}: quotation marks are read as text, as they do not stand around values",)


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_row_beyond_all_measure(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "ROW_BYTES", 1000)
    rows = [{"text": "a"}, {"text": "b" * 5000}, {"text": "c, d"}]
    file = put(tmp_path / name, encoded(rows, name.partition(".")[2]))
    with blocks_of(100):
        assert read(file) == ([rows[0], {"text": None}, rows[2]], {1: "is longer than 32 MiB"})


def test_a_quotation_mark_that_never_closes_does_not_swallow_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "ROW_BYTES", 1000)
    lines = ['"a, b",1'] * 20 + ['"open,1'] + ["c,2"] * 2000
    file = put(tmp_path / "rows.csv", "text,label\n" + "\n".join(lines))
    with blocks_of(200):
        rows, errors = read(file)
    assert len(rows) == len(lines)
    assert list(errors) == [20]
    assert rows[21:] == [{"text": "c", "label": "2"}] * 2000


# Several files


def test_the_beginning_goes_on_through_files(tmp_path: Path) -> None:
    """As far as it is asked for, and not beyond what is damaged; the rows are all there afterwards."""
    for number in range(3):
        put(tmp_path / f"{number}.jsonl", "".join(f'{{"text": "{number} {row}"}}\n' for row in range(2 + number)))
    stream = open_stream(str(tmp_path))
    beginning = stream.beginning()
    assert [len(next(beginning)) for _ in range(2)] == [2, 3]
    assert [len(table) for table in stream.beginning()] == [2, 3, 4]
    assert len(joined(list(stream.chunks()))) == 9

    put(tmp_path / "1.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9999)[:-9])
    (tmp_path / "1.jsonl").unlink()
    damaged = open_stream(str(tmp_path))
    assert sum(map(len, damaged.beginning())) < 2 + 9999
    with pytest.raises(DataError):
        list(damaged.chunks())

    pipe = open_stream("-", io.BytesIO(b'{"text": "x"}\n' * 3))
    assert [len(table) for table in pipe.beginning()] == [3]
    assert len(joined(list(pipe.chunks()))) == 3


def test_types_of_several_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "n": [1], "id": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"text": ["b"], "n": [0.5], "id": ["x"]}), tmp_path / "2.parquet")
    put(tmp_path / "3.csv", "id,text,n\ny,c,2\n")
    stream = open_stream(f"{tmp_path}/*.parquet")
    assert stream.schema.types == [pa.large_string(), pa.float64(), pa.large_string()]
    assert joined(list(stream.chunks(1))) == [{"text": "b", "n": 0.5, "id": "x"}]
    assert stream.place(0) == (str(tmp_path / "1.parquet"), 1)
    assert stream.place(1) == (str(tmp_path / "2.parquet"), 1)
    assert [row["n"] for row in read(tmp_path)[0]] == ["1", "0.5", "2"]


def test_a_number_too_large_for_the_common_type(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"], "n": [1, (1 << 60) + 1, 3]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"text": ["d"], "n": [0.5]}), tmp_path / "2.parquet")
    rows, errors = read(tmp_path)
    assert [tuple(row.values()) for row in rows] == [("a", 1), ("b", None), ("c", 3), ("d", 0.5)]
    assert list(errors) == [1]
    assert errors[1].startswith("column 'n' Integer value 1152921504606846977")


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.json", encoded(ROWS, "jsonl") + b"broken\n")
    rows, errors = read(file)
    assert rows == [*ROWS, {"text": None, "label": None}]
    assert list(errors) == [2]


def test_types_and_keys_seen_all_over_files_of_json(tmp_path: Path) -> None:
    """A column of whole numbers in the first block with fractions later, and a key that only later rows have."""
    rows_1 = [{"text": f"number {n}", "x": n} for n in range(20_000)] + [{"text": "", "x": 0.5, "rare": 1}] * 5_000
    put(tmp_path / "1.jsonl", encoded(rows_1, "jsonl"))
    put(tmp_path / "2.jsonl", encoded([{"text": "last", "x": None}], "jsonl"))
    with blocks_of(10_000), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "HEAD_BYTES", 1000)
        rows, errors = read(tmp_path)
    assert errors == {}
    assert (rows[0], rows[-2]) == (
        {"text": "number 0", "x": 0.0, "rare": None},
        {"text": "", "x": 0.5, "rare": 1},
    )


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_files_of_different_columns(tmp_path: Path, kind: str) -> None:
    put(tmp_path / f"1.{kind}", encoded([{"text": "a", "label": "b"}], kind))
    put(tmp_path / f"2.{kind}", encoded([{"text": "a", "topic": "b"}], kind))
    error = refused(tmp_path)
    assert str(error) == (
        f"{tmp_path}/2.{kind}: has not the columns of {tmp_path}/1.{kind}; they differ in 'label', 'topic'"
    )


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_progress_is_that_of_the_rows_asked_about(tmp_path: Path, kind: str) -> None:
    """However much was read at once, and before them."""
    rows = [{"text": f"number {1000 + n}"} for n in range(1000)]
    for file in ("1", "2"):
        put(tmp_path / f"{file}.{kind}", encoded(rows, kind))
    stream = open_stream(str(tmp_path))
    list(stream.chunks())
    found = [stream.progress(done) for done in (0, 10, 500, 1000, 1500, 1999, 2000)]
    assert found == pytest.approx([0, 0.005, 0.25, 0.5, 0.75, 0.9995, 1], abs=1e-9)
    list(stream.chunks(1500))
    assert stream.progress(1500) == pytest.approx(0.75)


def test_progress_and_fingerprint(tmp_path: Path) -> None:
    rows = [{"text": f"number {n}"} for n in range(500)]
    files = [put(tmp_path / name, encoded(rows, name[2:])) for name in ("1.csv", "2.jsonl", "3.parquet", "4.feather")]
    with blocks_of(500):
        stream = open_stream(str(tmp_path))
        shares = [stream.progress(chunk.first_row + len(chunk.table)) for chunk in stream.chunks()]
    assert shares == sorted(shares)
    assert len(set(shares)) > 20
    assert stream.progress(2000) == 1
    assert stream.files == tuple(files)
    before = stream.fingerprint
    assert open_stream(str(tmp_path)).fingerprint == before
    os.utime(files[1], ns=(1, 1))
    assert open_stream(str(tmp_path)).fingerprint != before


# Files that are damaged


def test_damage_ends_the_stream_after_the_rows_before(tmp_path: Path) -> None:
    rows = [{"text": os.urandom(20).hex()} for _ in range(5000)]
    packed = gzip.compress(encoded(rows, "csv"))
    put(tmp_path / "1.csv", encoded(rows, "csv"))
    broken = put(tmp_path / "2.csv.gz", packed[: len(packed) // 2])
    put(tmp_path / "3.csv", encoded(rows, "csv"))
    with blocks_of(64 << 10):
        stream = open_stream(str(tmp_path))
        given: list[Chunk] = []
        with pytest.raises(DataError) as caught:
            given.extend(stream.chunks())
    assert 5000 < sum(chunk.table.num_rows for chunk in given) < 10_000
    assert str(caught.value).startswith(f"{broken}: cannot be unpacked as gzip")


@pytest.mark.parametrize("kind", ["csv.gz", "jsonl.gz", "json", "parquet", "arrow"])
def test_a_broken_file_keeps_its_place_beside_others(tmp_path: Path, kind: str) -> None:
    """The others have the columns and the first rows; where all are broken, the stream is."""
    rows = [{"text": f"number {n}"} for n in range(5)]
    whole = encoded(rows, kind.partition(".")[0])
    whole = gzip.compress(whole) if kind.endswith(".gz") else whole
    first, second, third = (str(tmp_path / f"{n}.{kind}") for n in (1, 2, 3))
    for file, data in ((first, whole[: len(whole) // 2]), (second, whole), (third, b"")):
        put(Path(file), data)
    with pytest.raises(DataError, match=f"{first}|{third}"):
        open_stream(str(tmp_path))
    stream = open_stream(str(tmp_path), keep_broken=True)
    assert stream.files == (first, second, third)
    assert joined(list(stream.by_part()[1].chunks())) == rows
    assert pa.concat_tables(stream.beginning()).to_pylist() == rows
    for number, file in ((0, first), (2, third)):
        alone = stream.by_part()[number]
        assert (alone.warnings, alone.notes) == ((), ())
        with pytest.raises(DataError, match=file):
            list(alone.chunks())
    Path(second).write_bytes(b"")
    with pytest.raises(DataError, match=r"is empty|cannot be|no whole|not JSON"):
        open_stream(str(tmp_path), keep_broken=True)


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_a_damaged_batch(tmp_path: Path, kind: str) -> None:
    whole = encoded([{"text": "some words", "n": n} for n in range(90)], kind)
    middle = len(whole) // 2
    file = put(tmp_path / f"rows.{kind}", whole[:middle] + b"\xff" * 200 + whole[middle + 200 :])
    with contextlib.suppress(DataError):  # or rows with errors: no damage is anything else
        read(file)


def test_parquet_passes_over_row_groups_before_the_start(tmp_path: Path) -> None:
    """Not even damage there is noticed."""
    table = pa.table({"text": [f"number {n}" for n in range(100)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=50, compression="none", use_dictionary=False)
    data = (tmp_path / "rows.parquet").read_bytes()
    stream = open_stream(put(tmp_path / "rows.parquet", data))
    put(tmp_path / "rows.parquet", data[:10] + b"\xff" * 60 + data[70:])
    assert joined(list(stream.chunks(70))) == table.to_pylist()[70:]
    with pytest.raises(DataError, match="is no whole parquet file"):
        list(stream.chunks(0))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("rows.csv", "", "is empty"),
        ("rows.csv", "text,label\n", "has a header and no rows"),
        ("rows.csv", "text,text\na,b\n", "the header has a column twice: 'text'"),
        ("rows.csv", "a\n1,2\n3,4\n", "2 columns, the header has 1: '1,2'"),
        ("rows.jsonl", "[1]\n[2]\n", "is not a JSON object"),
        ("rows.jsonl", "{}\n", "is an object without keys"),
        ("rows.jsonl", "{\n  'a': 1\n}\n", "is not JSON"),
        ("rows.json", "[]", "has no rows"),
        ("rows.json", "[1]", "is not a JSON object: '1'"),
        ("rows.parquet", "PAR1", "is no whole parquet file"),
        ("rows.pdf", "PK", "is not a kind of file that can be read"),
    ],
)
def test_files_without_rows_that_can_be_read(tmp_path: Path, name: str, data: str, said: str) -> None:
    error = refused(put(tmp_path / name, data))
    assert said in str(error)
    assert error.hint


def test_missing_file(tmp_path: Path) -> None:
    put(tmp_path / "rows.csv", "text\na\n")
    assert "there is no such file or folder" in str(refused(tmp_path / "row.csv"))
    stream = open_stream(str(tmp_path / "rows.csv"))
    (tmp_path / "rows.csv").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(stream.chunks())


# Pipes


def test_rows_of_a_pipe_come_as_they_arrive() -> None:
    """Each row is there before the next is written; the pipe never ends."""
    source, sink = os.pipe()
    with os.fdopen(source, "rb") as stdin, os.fdopen(sink, "wb", buffering=0) as out:
        out.write(b'{"text": "first", "n": 1}\n{"text": "sec')
        stream = open_stream("-", stdin)
        assert stream.sample.table.to_pylist() == [{"text": "first", "n": 1}]
        assert (stream.files, stream.num_rows, stream.progress(0)) == (("stdin",), None, None)
        chunks = stream.chunks()
        assert joined([next(chunks)]) == [{"text": "first", "n": 1}]
        out.write(b'ond", "n": 2}\n')
        assert joined([next(chunks)]) == [{"text": "second", "n": 2}]
        out.write(b"not JSON\n")
        assert errors_of([chunk := next(chunks)]) == {2: "is not JSON (Expecting value at character 1): 'not JSON'"}
        assert (chunk.first_row, stream.place(2)) == (2, ("stdin", 3))
        out.write(b'{"text": "last"}')
        out.close()
        assert joined(list(chunks)) == [{"text": "last", "n": None}]
        with pytest.raises(ValueError, match="only once"):
            list(stream.chunks())


def test_a_pipe_of_bytes_in_memory_begins_with_what_is_no_row() -> None:
    rows = [{"text": f"number {n}"} for n in range(50_000)]
    stream = open_stream("-", io.BytesIO(b"starting ...\n" + encoded(rows, "jsonl")))
    chunks = list(stream.chunks())
    assert joined(chunks)[1:] == rows
    assert list(errors_of(chunks)) == [0]


@pytest.mark.parametrize(("data", "said"), [(b"", "stdin: is empty"), (b"text,label\n", "stdin, row 1: is not JSON")])
def test_a_pipe_without_rows(data: bytes, said: str) -> None:
    with pytest.raises(DataError) as caught:
        open_stream("-", io.BytesIO(data))
    assert str(caught.value).startswith(said)


# Memory

MEASURED = """
import sys, threading, time
from brimful.data.readers.sources import open_stream

def resident():  # without pages of mapped files, which the system takes back when it needs them
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.001)

peak = 0
sum(chunk.table.num_rows for chunk in open_stream(sys.argv[1]).chunks())
threading.Thread(target=watch, daemon=True).start()
for file in sys.argv[2:]:
    before = peak = resident()
    print(sum(chunk.table.num_rows for chunk in open_stream(file).chunks()), peak - before)
"""


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Files of 140 MB, those of columns with one row group or batch of all rows each."""
    words = [os.urandom(32).hex() for _ in range(1000)]
    table = pa.table({"text": [" ".join(words[n % 1000 : n % 1000 + 25]) + str(n) for n in range(90_000)]})
    pyarrow.csv.write_csv(table, str(tmp_path / "rows.csv"))
    with (tmp_path / "rows.jsonl").open("w") as out:
        out.writelines(f'{{"text": "{value}"}}\n' for value in table["text"].to_pylist())
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1 << 30, compression="none", use_dictionary=False)
    pyarrow.feather.write_feather(table, str(tmp_path / "rows.feather"), compression="uncompressed")
    files = [tmp_path / f"rows.{kind}" for kind in ("csv", "jsonl", "parquet", "feather")]
    sizes = [file.stat().st_size for file in files]
    small = put(tmp_path / "small.csv", "text\na\n")
    command = [sys.executable, "-c", MEASURED, small, *map(str, files)]
    # Freed pages stay with pyarrow's allocator for some ms, which the machine's load decides: here, for none.
    environment = {**os.environ, "MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    for size, line in zip(sizes, done.stdout.splitlines(), strict=True):
        num_rows, grown = map(int, line.split())
        assert num_rows == 90_000
        assert size > 140e6
        assert grown < 60e6, line


# Decimals


PRICES = [Decimal("12345678901234567.89"), None, Decimal("-0.10")]


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_decimals_keep_their_type_and_digits(kind: str, tmp_path: Path) -> None:
    rows = [{"text": "a", "price": price, "prices": [price]} for price in PRICES]
    stream = open_stream(put(tmp_path / f"rows.{kind}", encoded(rows, kind)))
    found = pa.concat_tables([chunk.table for chunk in stream.chunks()])
    assert found.to_pylist() == rows
    assert [str(each) for each in found.schema.types[1:]] == [
        "decimal128(19, 2)",
        "large_list<item: decimal128(19, 2)>",
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.decimal128(25, 2), pa.decimal128(30, 5), pa.decimal128(30, 5)),
        (pa.decimal128(38, 2), pa.decimal128(30, 10), pa.decimal256(46, 10)),
        (pa.decimal128(25, 2), pa.int64(), pa.decimal128(25, 2)),
        (pa.decimal32(5, 2), pa.uint64(), pa.decimal128(22, 2)),
        (pa.decimal256(76, 0), pa.decimal256(76, 76), pa.large_string()),
        (pa.decimal128(25, 2), pa.float64(), pa.large_string()),
        (pa.list_(pa.decimal128(25, 2)), pa.list_(pa.int64()), pa.large_string()),
    ],
)
def test_decimals_of_several_files_keep_their_digits(
    first: pa.DataType, second: pa.DataType, expected: pa.DataType, tmp_path: Path
) -> None:
    for name, kind in (("a", first), ("b", second)):
        number: Any = Decimal(1) if pa.types.is_decimal(kind) else 1
        number = [1] if pa.types.is_list(kind) else None if kind == pa.decimal256(76, 76) else number
        put(tmp_path / f"{name}.arrow", arrow_of(pa.table({"text": ["t"], "n": pa.array([number], kind)})))
    stream = open_stream(str(tmp_path))
    found = pa.concat_tables([chunk.table for chunk in stream.chunks()])
    assert found.schema.field("n").type == expected
    if pa.types.is_decimal(expected):
        assert found["n"].to_pylist() == [1, 1]


def arrow_of(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()
