"""Files, folders and globs -> rows: what is equal on both sides, and what each damaged thing is told to be."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import datasets
import pandas
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brimful.core.errors import DataError
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.locations import Splits, find_splits
from brimful.data.readers.sources import read_rows

ROWS = [{"text": "good, really", "label": "pos"}, {"text": 'she said "no"\nand left', "label": "neg"}]
FORMATS = ["csv", "tsv", "json", "jsonl", "ndjson", "parquet"]
PACKINGS = ["", ".gz", ".zst"]


def packed(data: bytes, packing: str) -> bytes:
    if packing == ".gz":
        return gzip.compress(data, mtime=0)
    return pa.compress(data, codec="zstd", asbytes=True) if packing == ".zst" else data


def delimited(rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def encoded(rows: list[dict[str, str]], kind: str) -> bytes:
    if kind in ("csv", "tsv"):
        return delimited(rows, "," if kind == "csv" else "\t")
    if kind == "json":
        return json.dumps(rows, ensure_ascii=False).encode()
    if kind in ("jsonl", "ndjson"):
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def put(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


def refused(spec: str | Path, encoding: str | None = None) -> DataError:
    with pytest.raises(DataError) as caught:
        read_rows(str(spec), FileFormat(encoding=encoding))
    assert "\n" not in str(caught.value)
    assert "\n" not in (caught.value.hint or "")
    return caught.value


# What comes back


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", FORMATS)
def test_reads_every_format(tmp_path: Path, kind: str, packing: str) -> None:
    file = put(tmp_path / f"rows.{kind}{packing}", packed(encoded(ROWS, kind), packing))
    rows = read_rows(file)
    assert rows.table.to_pylist() == ROWS
    assert rows.table.schema.types == [pa.large_string(), pa.large_string()]
    assert (rows.name, rows.num_rows, rows.place(0), rows.place(1)) == (file, 2, (file, 1), (file, 2))


@pytest.mark.parametrize("name", ["rows.arrow", "rows.feather"])
def test_reads_arrow_files(tmp_path: Path, name: str) -> None:
    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), str(tmp_path / name))
    assert read_rows(str(tmp_path / name)).table.to_pylist() == ROWS


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
awkward = st.sampled_from(
    ['"', '""', ",", "\t", ";", "\n", "\r\n", "\r", "007", "NA", "null", "é", "👍", "x\x1by", " "]
)
values = st.builds("".join, st.lists(awkward | text, max_size=4))


@pytest.mark.sampled
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({"text": values, "label": values}), min_size=1, max_size=6))
def test_written_and_read_back_is_equal(tmp_path: Path, kind: str, packing: str, rows: list[dict[str, str]]) -> None:
    file = put(tmp_path / f"rows.{kind}{packing}", packed(encoded(rows, kind), packing))
    assert read_rows(file).table.to_pylist() == rows


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(values, min_size=1, max_size=6))
def test_one_column_of_csv_is_equal(tmp_path: Path, texts: list[str]) -> None:
    file = put(tmp_path / "rows.csv", delimited([{"text": text} for text in texts]))
    assert read_rows(file).table["text"].to_pylist() == texts


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_delimiter_is_seen_from_the_header(tmp_path: Path, delimiter: str) -> None:
    file = put(tmp_path / "rows.csv", delimited(ROWS, delimiter))
    assert read_rows(file).table.to_pylist() == ROWS


@pytest.mark.parametrize("kind", FORMATS[:5])
def test_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path, kind: str) -> None:
    file = put(tmp_path / f"rows.{kind}", b"\xef\xbb\xbf" + encoded(ROWS, kind))
    assert read_rows(file).table.to_pylist() == ROWS


def test_csv_keeps_values_as_text(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.csv", 'text,label\r\n007,\r\nNA,1.0\r\n\r\n"",2020-01-01\r\n')
    assert read_rows(file).table.to_pydict() == {"text": ["007", "NA", ""], "label": ["", "1.0", "2020-01-01"]}


def test_tsv_with_bare_quotation_marks(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.tsv", 'text\tlabel\n"so it begins\t1\nsaid "no"\t0\nall "\t1\n')
    assert read_rows(file).table["text"].to_pylist() == ['"so it begins', 'said "no"', 'all "']


def test_tsv_with_quoted_header_and_values(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.tsv", '"text"\t"label"\n"a ""b"""\t"1"\n')
    assert read_rows(file).table.to_pylist() == [{"text": 'a "b"', "label": "1"}]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_values_larger_than_a_block(tmp_path: Path, kind: str) -> None:
    rows = [{"text": "long " * 2_000_000, "label": "a"}, {"text": "short,", "label": "b"}]
    file = put(tmp_path / f"rows.{kind}", encoded(rows, kind))
    assert read_rows(file).table.to_pylist() == rows


def test_json_strings_that_look_like_times_stay_strings(tmp_path: Path) -> None:
    rows = [{"text": "2020-01-01", "tags": ["2021-02-03"]}, {"text": "2020-01-01 10:00:00", "tags": []}]
    for kind in ("json", "jsonl"):
        file = put(tmp_path / f"rows.{kind}", encoded(rows, kind))
        assert read_rows(file).table.to_pylist() == rows


def test_json_column_of_numbers_and_text_becomes_text(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": "1"}, {"text": "c", "label": 2.0}, {"text": "d"}]
    for kind in ("json", "jsonl"):
        file = put(tmp_path / f"rows.{kind}", encoded(rows, kind))  # type: ignore[arg-type]
        assert read_rows(file).table["label"].to_pylist() == ["1", "1", "2", None]


@pytest.mark.slow
def test_json_of_mixed_types_far_apart(tmp_path: Path) -> None:
    lines = ['{"text": "a", "label": 1, "tags": ["x"]}'] * 70_000 + ['{"text": "b", "label": "one", "tags": "y"}']
    rows = read_rows(put(tmp_path / "rows.jsonl", "\n".join(lines)))
    assert rows.table.slice(69_999).to_pydict() == {"text": ["a", "b"], "label": ["1", "one"], "tags": ['["x"]', "y"]}


def test_json_object_around_one_array(tmp_path: Path) -> None:
    for document in (
        {"version": 2, "data": ROWS},
        {"tags": ["a"], "data": [{**ROWS[0], "n": 1}, {**ROWS[1], "n": "x"}]},
    ):
        for indent in (None, 2):
            rows = read_rows(put(tmp_path / "rows.json", json.dumps(document, indent=indent)))
            assert rows.table.select(["text", "label"]).to_pylist() == ROWS


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    assert read_rows(put(tmp_path / "rows.json", encoded(ROWS, "jsonl"))).table.to_pylist() == ROWS
    assert read_rows(put(tmp_path / "one.json", encoded(ROWS[:1], "jsonl"))).table.to_pylist() == ROWS[:1]


def test_parquet_types_are_kept_or_made_plain(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["a", None]).dictionary_encode(),
            "label": pa.array([1, 2], pa.int8()),
            "tags": pa.array([["x"], None]),
            "score": pa.array([0.5, None], pa.float16()),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    got = read_rows(str(tmp_path / "rows.parquet")).table
    assert got.to_pydict() == {"text": ["a", None], "label": [1, 2], "tags": [["x"], None], "score": [0.5, None]}
    assert [str(kind) for kind in got.schema.types][0::2] == ["large_string", "large_list<item: large_string>"]


def test_decimals_keep_their_digits(tmp_path: Path) -> None:
    kind = pa.decimal128(25, 2)
    table = pa.table({
        "label": pa.array([Decimal("1.00"), None], kind),
        "targets": pa.array([[Decimal("0.50")], []], pa.list_(kind)),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    got = read_rows(str(tmp_path / "rows.parquet")).table
    assert got.to_pydict() == table.to_pydict()
    assert got.schema.types == [kind, pa.large_list(kind)]


# Folders and globs


def saved() -> datasets.Dataset:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["neg", "pos"]),
            "tags": datasets.List(datasets.ClassLabel(names=["x", "y"])),
        }
    )
    columns = {"text": ["a", "b", "c"], "label": [0, 1, -1], "tags": [[0, 1], [], [1]]}
    return datasets.Dataset.from_dict(columns, features=features)


NAMED = {"text": ["a", "b", "c"], "label": ["neg", "pos", None], "tags": [["x", "y"], [], ["y"]]}


def test_folder_saved_by_datasets_has_names_for_ids(tmp_path: Path) -> None:
    saved().save_to_disk(str(tmp_path / "saved"), num_shards=2)
    rows = read_rows(str(tmp_path / "saved"))
    assert rows.table.to_pydict() == NAMED
    assert rows.place(2) == (str(tmp_path / "saved/data-00001-of-00002.arrow"), 1)


def test_parquet_by_datasets_has_names_for_ids(tmp_path: Path) -> None:
    saved().to_parquet(str(tmp_path / "rows.parquet"))
    assert read_rows(str(tmp_path / "rows.parquet")).table.to_pydict() == NAMED


def test_folder_with_splits_by_datasets_gives_train(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"test": saved().select([0]), "train": saved()})
    splits.save_to_disk(str(tmp_path / "saved"))
    assert read_rows(str(tmp_path / "saved")).num_rows == 3
    assert read_rows(str(tmp_path / "saved" / "test")).num_rows == 1


def test_folder_with_splits_but_no_train(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"test": saved(), "dev": saved()})
    splits.save_to_disk(str(tmp_path / "saved"))
    error = refused(tmp_path / "saved")
    assert "has no split called train" in str(error)
    assert error.hint == f"give one of them: {tmp_path}/saved/test, {tmp_path}/saved/dev"


def test_ids_outside_the_names(tmp_path: Path) -> None:
    schema = saved().features.arrow_schema
    table = pa.table({"text": ["a"], "label": [7], "tags": [[0]]}).cast(schema)
    pq.write_table(table, tmp_path / "rows.parquet")
    assert "ids of classes outside the 2 names" in str(refused(tmp_path / "rows.parquet"))


def test_folder_of_text_files_per_class(tmp_path: Path) -> None:
    put(tmp_path / "pos/1.txt", "great\n")
    put(tmp_path / "neg/1.txt", "\ufeffbad")
    put(tmp_path / "neg/2.txt", "worse")
    put(tmp_path / "README.md", "about")
    rows = read_rows(str(tmp_path))
    assert rows.table.to_pydict() == {"text": ["bad", "worse", "great\n"], "label": ["neg", "neg", "pos"]}
    assert rows.place(1) == (str(tmp_path / "neg/2.txt"), 1)


def test_many_text_files_are_not_many_chunks(tmp_path: Path) -> None:
    for number in range(1100):
        put(tmp_path / f"pos/{number:04}.txt", str(number))
    rows = read_rows(str(tmp_path))
    assert rows.table["text"].num_chunks == 1
    assert rows.place(1099) == (str(tmp_path / "pos/1099.txt"), 1)


def test_text_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = put(tmp_path / "pos/1.txt", b"caf\xe9!")
    error = refused(tmp_path, "utf-8")
    assert (error.file, error.value) == (file, "caf\\xe9!")
    assert read_rows(str(tmp_path)).table["text"].to_pylist() == ["café!"]


def test_glob_and_folder_read_files_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "d/b.jsonl", '{"label": 2, "text": "b"}\n')
    put(tmp_path / "d/a.csv", "text,label\nx,1\ny,1\n")
    put(tmp_path / "d/.hidden.csv", "other\n1\n")
    monkeypatch.chdir(tmp_path)
    for spec in ("d", "d/*", f"{tmp_path}/d/*.*"):
        rows = read_rows(spec)
        assert rows.table.to_pydict() == {"text": ["x", "y", "b"], "label": ["1", "1", "2"]}
    monkeypatch.chdir(tmp_path / "d")
    assert read_rows("../d/*.csv").place(0) == ("../d/a.csv", 1)
    monkeypatch.chdir(tmp_path)
    assert (read_rows("d").place(1), read_rows("d/*").place(2)) == (("d/a.csv", 2), ("d/b.jsonl", 1))


def test_files_of_different_columns(tmp_path: Path) -> None:
    first = put(tmp_path / "a.csv", "text,label\nx,1\n")
    second = put(tmp_path / "b.csv", "text,class\nx,1\n")
    error = refused(tmp_path)
    assert str(error) == f"{second}: has not the columns of {first}; they differ in 'class', 'label'"
    assert error.hint == "it has text, class"


def test_folder_with_training_and_test_files(tmp_path: Path) -> None:
    for name in ("train.csv", "test.csv", "trainer.csv"):
        put(tmp_path / name, "text,label\nx,1\n")
    error = refused(tmp_path)
    assert "the folder holds several splits: test, train" in str(error)
    assert error.hint == f"give one of them, as {tmp_path}/train.csv, or a glob"
    assert read_rows(f"{tmp_path}/trai*.csv").num_rows == 2


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("training.csv", "testing.csv"), ("training.csv", "testing.csv")),
        (("news_train.csv", "news_test.csv"), ("news_train.csv", "news_test.csv")),
        (("newsTrain.csv", "newsTest.csv", "newsDev.csv"), ("newsTrain.csv", "newsDev.csv")),
        (("trainset.csv", "testset.csv", "sample.csv"), ("trainset.csv", "testset.csv")),
        (("train_v2.csv", "test-final.csv", "test-final.csv.manifest.json"), ("train_v2.csv", "test-final.csv")),
        (("a_train.csv", "b_test.csv"), None),
        (("train.csv", "a_test.csv"), None),
        (("a_train.csv", "a_test.csv", "b_train.csv", "b_test.csv"), None),
    ],
)
def test_splits_by_the_names_of_files(tmp_path: Path, names: tuple[str, ...], found: tuple[str, str] | None) -> None:
    """Rows of a test are never read together with those of training."""
    for name in names:
        put(tmp_path / name, "text,label\nx,1\n")
    splits = find_splits(str(tmp_path))
    assert splits == (None if found is None else Splits(*(f"{tmp_path}/{name}" for name in found)))
    assert "the folder holds several splits: " in str(refused(tmp_path))


@pytest.mark.parametrize(
    "names", [("latest.csv", "trained.csv"), ("contest.csv", "train.csv"), ("a.csv", "ab_test.csv")]
)
def test_files_of_a_folder_that_are_one_data_set(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        put(tmp_path / name, "text,label\nx,1\n")
    assert find_splits(str(tmp_path)) is None
    rows = read_rows(str(tmp_path))
    assert (rows.num_rows, rows.notes) == (2, (f"2 files are read as one data set: {', '.join(names)}",))


def test_folders_without_data(tmp_path: Path) -> None:
    assert "it can hold CSV" in (refused(tmp_path).hint or "")
    put(tmp_path / "train/pos/1.txt", "x")
    assert refused(tmp_path).hint == f"give one of its folders: {tmp_path}/train"


def test_glob_without_match(tmp_path: Path) -> None:
    put(tmp_path / "part-1.csv", "text\nx\n")
    error = refused(tmp_path / "parts-*.csv")
    assert "no file has a name like this" in str(error)
    assert error.hint == f"did you mean {tmp_path}/part-1.csv?"
    assert "cannot be read as a pattern" in str(refused(tmp_path / "part**.csv"))


# Fingerprint


def test_fingerprint_follows_values_and_order_and_nothing_else(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["ab", "c", None],
            "n": [1, 2, None],
            "f": [0.5, None, 1.0],
            "b": [True, None, False],
            "t": [["x"], [], None],
        }
    )

    def fingerprint(table: pa.Table, **options: int) -> str:
        pq.write_table(table, tmp_path / "rows.parquet", **options)
        return read_rows(str(tmp_path / "rows.parquet")).fingerprint

    seen = fingerprint(table)
    assert seen == fingerprint(table, row_group_size=1)
    changed = [
        table.take([1, 0, 2]),
        table.set_column(0, "text", pa.array(["a", "bc", None])),
        table.set_column(0, "text", pa.array(["ab", "c", ""])),
        table.set_column(1, "n", pa.array([1, 2, 0])),
        table.set_column(2, "f", pa.array([0.5, None, 1.5])),
        table.set_column(3, "b", pa.array([True, False, False])),
        table.set_column(4, "t", pa.array([["x"], None, []])),
        table.set_column(4, "t", pa.array([[], ["x"], None])),
        table.rename_columns(["text", "m", "f", "b", "t"]),
        table.slice(0, 2),
    ]
    assert len({seen, *map(fingerprint, changed)}) == len(changed) + 1


def test_fingerprint_of_the_same_rows_in_other_files(tmp_path: Path) -> None:
    fingerprints = set()
    for kind in FORMATS:
        for packing in PACKINGS:
            file = put(tmp_path / f"rows.{kind}{packing}", packed(encoded(ROWS, kind), packing))
            fingerprints.add(read_rows(file).fingerprint)
    assert len(fingerprints) == 1


# What is broken


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet", "arrow"])
def test_empty_file(tmp_path: Path, kind: str) -> None:
    error = refused(put(tmp_path / f"rows.{kind}", b""))
    assert str(error) == f"{tmp_path}/rows.{kind}: is empty"


@pytest.mark.parametrize("data", [b"\n \n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_file_without_characters(tmp_path: Path, data: bytes) -> None:
    name = "rows.csv.gz" if data.startswith(b"\x1f") else "rows.csv"
    assert str(refused(put(tmp_path / name, data))).endswith(": is empty")


@pytest.mark.parametrize(
    ("name", "data"),
    [("h.csv", b"text,label"), ("h.csv", b"text,label\n"), ("h.tsv", b"text\tlabel\n\n"), ("h.json", b"[]")],
)
def test_no_rows(tmp_path: Path, name: str, data: bytes) -> None:
    assert "no rows" in str(refused(put(tmp_path / name, data)))


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.parquet", "r.csv.gz"])
def test_git_lfs_pointer(tmp_path: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    error = refused(put(tmp_path / name, pointer))
    assert "is a git-lfs pointer, not the data" in str(error)
    assert error.hint == "fetch the data: git lfs pull"


@pytest.mark.parametrize(
    ("data", "what", "hint"),
    [
        (b"PK\x03\x04rest", "a zip archive or an Excel workbook", "unpack it"),
        (gzip.compress(b"text", mtime=0), "compressed by gzip", ".gz"),
        (b"PAR1", "a Parquet file", ".parquet"),
    ],
)
def test_another_format_under_a_text_name(tmp_path: Path, data: bytes, what: str, hint: str) -> None:
    error = refused(put(tmp_path / "rows.csv", data))
    assert f"is not UTF-8 text but {what}" in str(error)
    assert hint in (error.hint or "")


def test_binary_under_a_text_name(tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.csv", b"text\n\0\1\xff\xff"))
    assert "is not text: NUL byte at offset 5" in str(error)
    error = refused(put(tmp_path / "rows.csv", "text\nsome\n".encode("utf-16-le")))
    assert "is not text: NUL byte at offset 1" in str(error)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_text_may_have_a_nul_character(tmp_path: Path, kind: str) -> None:
    rows = [{"text": 'a\0"b"\0', "label": "x"}]
    assert read_rows(put(tmp_path / f"rows.{kind}", encoded(rows, kind))).table.to_pylist() == rows


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.json", "rows.jsonl"])
def test_not_utf8(tmp_path: Path, name: str) -> None:
    rows = [{"text": "fine", "label": "a"}, {"text": "café au lait", "label": "b"}]
    data = encoded(rows, name.partition(".")[2]).decode().encode("latin-1")
    error = refused(put(tmp_path / name, data), "utf-8")
    assert "is not UTF-8" in str(error)
    assert "caf\\xe9 au lait" in str(error.value)
    assert (error.file, error.row) == (str(tmp_path / name), 2)
    assert "--encoding" in (error.hint or "")


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("shift_jis", "\u3053\u308c\u306f\u826f\u3044\u6620\u753b\u3067\u3059"),
        ("euc_jp", "\u3053\u308c\u306f\u826f\u3044\u6620\u753b\u3067\u3059"),
        ("gbk", "\u8fd9\u662f\u4e00\u90e8\u597d\u7535\u5f71"),
        ("big5", "\u9019\u662f\u4e00\u90e8\u597d\u96fb\u5f71"),
        ("euc_kr", "\uc88b\uc740 \uc601\ud654\uc785\ub2c8\ub2e4"),
        ("cp1251", "\u044d\u0442\u043e \u0445\u043e\u0440\u043e\u0448\u0438\u0439 \u0444\u0438\u043b\u044c\u043c"),
    ],
)
def test_other_encodings_are_refused_whatever_is_utf8_by_chance(tmp_path: Path, encoding: str, text: str) -> None:
    """Their bytes, two of which make a character of UTF-8 here and there."""
    lines = [b"text,label\n", *[text.encode(encoding) + b",a\n"] * 9, b"\xc3\xa9,b\n"]
    error = refused(put(tmp_path / "rows.csv", b"".join(lines)))
    assert "is not UTF-8, and " in str(error)
    assert "--encoding" in (error.hint or "")
    assert read_rows(error.file or "", FileFormat(encoding="latin-1")).num_rows == 10


def test_few_bytes_among_characters_of_utf8_are_windows_1252(tmp_path: Path) -> None:
    lines = [b"text,label\n", *["\u042d\u0442\u043e,a\n".encode()] * 20, *[b"caf\xe9,b\n"] * 20]
    rows = read_rows(put(tmp_path / "rows.csv", b"".join(lines)))
    assert rows.table["text"].unique().to_pylist() == ["\u042d\u0442\u043e", "caf\u00e9"]


def test_not_utf8_in_the_header_or_a_key(tmp_path: Path) -> None:
    assert "is not UTF-8" in str(refused(put(tmp_path / "rows.csv", b"text,\xe9\nx,1\n"), "utf-8"))
    assert refused(put(tmp_path / "rows.jsonl", b'{"text": "a"}\n{"\xe9": "x"}\n')).row == 2


def test_not_utf8_in_parquet(tmp_path: Path) -> None:
    offsets, data = pa.array([0, 1, 3], pa.int32()), pa.py_buffer(b"a\xe9!")
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets.buffers()[1], data])
    pq.write_table(pa.table({"text": broken}), tmp_path / "rows.parquet")
    error = refused(tmp_path / "rows.parquet")
    assert (error.row, error.value) == (2, "\\xe9!")


def test_ragged_csv(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.csv", 'text,label\n"a\nb",1\n\nc,d,2\n')
    error = refused(file)
    assert str(error) == f"{file}, row 2: 3 columns, the header has 2: 'c,d,2'"
    assert error.hint == "put quotation marks around values that hold the delimiter ','"


@pytest.mark.parametrize("row", ["a, b, and c^1", 'he said "no, c^1'])
def test_a_separator_that_is_not_looked_for(row: str, tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.csv", f"text^label\n{row}\n"))
    assert error.hint == "the header 'text^label' is one column; if '^' stands between columns, add --delimiter '^'"


def test_a_carriage_return_that_cuts_a_row(tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.csv", "text,label\nfine,1\nas pandas\rwrites it,1\n"))
    assert "row 2: 1 column, the header has 2: 'as pandas'" in str(error)
    assert "a carriage return (\\r) within a value ends the row" in str(error.hint)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,label\nas pandas\rwrites it,1\nfine,1\n", "row 1: 1 column, the header has 2: 'as pandas'"),
        ("label,text\n1,as pandas\rwrites it\n1,fine\n", "row 2: 1 column, the header has 2: 'writes it'"),
    ],
)
def test_a_carriage_return_in_the_first_value_or_the_last(content: str, said: str, tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.csv", content))
    assert said in str(error)
    hint = "a carriage return (\\r) within a value ends the row: put quotation marks around that value (pandas: to_csv("
    assert str(error.hint).startswith(hint)


def test_what_pandas_quotes_is_read_with_its_carriage_return(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["as pandas\rwrites it", "fine"], "label": ["1", "2"]})
    frame.to_csv(tmp_path / "rows.csv", index=False, quoting=csv.QUOTE_ALL)
    assert read_rows(str(tmp_path / "rows.csv")).table.to_pydict() == frame.to_dict("list")


def test_ragged_tsv_with_few_columns(tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.tsv", "text\tlabel\nx\n"))
    assert "row 1: 1 column, the header has 2: 'x'" in str(error)
    assert error.hint == "is the row cut off? The file is read with the delimiter '\\t'"


def test_quotation_mark_that_never_closes(tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.csv", 'text,label\n"a, b",1\n"c,1\nd,2\n'))
    assert error.row == 2
    assert "row 2: a quotation mark opens and does not close: '\"c,1'" in str(error)
    assert error.hint == 'close it, and write " within a value as ""'


@pytest.mark.parametrize("packing", PACKINGS)
def test_column_twice(tmp_path: Path, packing: str) -> None:
    error = refused(put(tmp_path / f"rows.csv{packing}", packed(b"text,label,text\na,b,c\n", packing)))
    assert (error.value, error.hint) == ("text", "rename one of them, or add --no-header if the file has none")
    assert "the header has a column twice" in str(error)


def test_column_twice_in_parquet(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "rows.parquet")
    assert "has a column twice: 'text'" in str(refused(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b", "label": ', "is not JSON (Expecting value at character"),
        ('{"text": "b" "label": 2}', "is not JSON (Expecting ',' delimiter at character 14)"),
        ('{"text": "b", "text": "c"}', "is not JSON (the key 'text' stands twice)"),
        ('["b", 1]', "is not a JSON object"),
        ("3", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('"\x1b[31m"', "is not JSON (Invalid control character at at character 2)"),
        ("[" * 100_000, "is not JSON (nested too deeply)"),
    ],
)
def test_broken_json_line(tmp_path: Path, line: str, message: str) -> None:
    file = put(tmp_path / "rows.jsonl", f'{{"text": "a", "label": 1}}\n\n{line}\n{{"text": "c", "label": "x"}}\n')
    error = refused(file)
    assert str(error).startswith(f"{file}, row 2: {message}")
    assert "\x1b" not in str(error)
    assert error.hint == 'each line is one JSON object, as in {"text": "..."}'


def test_half_a_character_in_json(tmp_path: Path) -> None:
    for name, data in (
        ("r.jsonl", '{"text": "a"}\n{"text": "\\ud83d"}\n'),
        ("r.json", '[{"text": 1}, {"text": "\\ud83d"}]'),
    ):
        error = refused(put(tmp_path / name, data))
        assert "column 'text' has half of a surrogate pair, which is no character" in str(error)
        assert (error.row, error.hint) == (2, "remove it, or write the whole character")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('[{"text": "a"}, {"text": ', "is not JSON (Expecting value in line 1, column 26)"),
        ('[{"text": "a"}] x', "is not JSON (Extra data in line 1, column 17)"),
        ('{"a": [{"t": 1}], "b": [{"t": 2}]}', "has 2 arrays of objects: 'a', 'b'"),
        ('"text"', "is no array of objects"),
        ('{"text": {"0": "a", "1": "b"}, "label": {"0": 0, "1": 1}}', "holds columns, not rows"),
        ('{"text": ["a", "b"], "label": [0, 1]}', "holds columns, not rows"),
        ('["a", "b"]', "row 1: is not a JSON object: '\"a\"'"),
        ('[{"text": "a"}, null]', "row 2: is not a JSON object"),
        ('[{"text": "a"}, {"text": "b", "text": "c"}]', "the key 'text' stands twice"),
        ("[" * 100_000, "is not JSON (nested too deeply)"),
    ],
)
def test_json_that_is_no_array_of_objects(tmp_path: Path, document: str, message: str) -> None:
    assert message in str(refused(put(tmp_path / "rows.json", document)))


@pytest.mark.parametrize("packing", PACKINGS[1:])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
def test_packed_file_cut_off_anywhere(tmp_path: Path, kind: str, packing: str) -> None:
    whole = packed(encoded(ROWS * 50, kind), packing)
    for length in (1, 8, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        error = refused(put(tmp_path / f"rows.{kind}{packing}", whole[:length]))
        assert "cannot be unpacked as" in str(error)
        assert error.hint == "it is cut off or damaged: copy or download it again"


def test_damaged_files_under_their_own_name(tmp_path: Path) -> None:
    assert "cannot be unpacked as gzip" in str(refused(put(tmp_path / "rows.csv.gz", b"text,label\na,b\n")))
    parquet = encoded(ROWS, "parquet")
    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS * 99), str(tmp_path / "whole"), compression="uncompressed")
    arrow = (tmp_path / "whole").read_bytes()
    for name, data in (
        ("r.parquet", parquet[:-9]),
        ("r.parquet", b"text"),
        ("r.arrow", arrow[:-9]),
        ("r.arrow", b"text"),
    ):
        error = refused(put(tmp_path / name, data))
        assert f"is no whole {name[2:]} file (" in str(error)
        assert error.hint == "it is cut off or damaged: copy or download it again"


# What is not there


def test_missing_file_with_a_near_name(tmp_path: Path) -> None:
    put(tmp_path / "reviews.csv", "text\nx\n")
    error = refused(tmp_path / "review.csv")
    assert "there is no such file or folder" in str(error)
    assert error.hint == f"did you mean {tmp_path}/reviews.csv?"


def test_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert refused(tmp_path / "dta" / "deep" / "rows.csv").hint == f"did you mean {tmp_path}/data?"
    assert "has a similar name" in (refused(tmp_path / "zzz" / "rows.csv").hint or "")


def test_unknown_kind_of_file(tmp_path: Path) -> None:
    error = refused(put(tmp_path / "rows.pdf", b"PK"))
    assert "is not a kind of file that can be read" in str(error)
    assert (error.hint or "").startswith("it can be CSV, TSV, JSON")


def test_names_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read (File name too long)" in str(refused("x" * 5000))
    (tmp_path / "dataset_dict.json").write_text("{")
    assert str(refused(tmp_path)) == f"{tmp_path}/dataset_dict.json: is not JSON"
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert f"{tmp_path}/train/state.json: cannot be read (No such file" in str(refused(tmp_path))
    put(tmp_path / "train/state.json", "{}")
    assert "does not name its files" in str(refused(tmp_path))


def test_no_name() -> None:
    assert refused("").hint == "give a file, a folder or a hub name"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.csv", "text\nx\n")
    Path(file).chmod(0)
    assert str(refused(file)) == f"{file}: cannot be read (Permission denied)"


# The hub


def in_a_process(code: str, **environment: str) -> str:
    script = f"from brimful.core.errors import DataError\nfrom brimful.data.readers.sources import read_rows\n{code}"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


REFUSED = "try: read_rows({!r})\nexcept DataError as error: print(error, '|', error.hint)"


@pytest.mark.slow
def test_hub_name_without_a_network(tmp_path: Path) -> None:
    said = in_a_process(REFUSED.format("owner/reviews:train"), HF_HOME=str(tmp_path))
    assert said.count("\n") == 1
    assert said.startswith("there is no such file or folder, and the hub cannot be reached: ")
    assert "'owner/reviews:train'" in said


def test_hub_name_without_datasets(tmp_path: Path) -> None:
    put(tmp_path / "datasets.py", "raise ImportError('as if not installed')")
    said = in_a_process(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + REFUSED.format("owner/reviews"))
    assert "reading it from the hub needs the package `datasets`: 'owner/reviews'" in said
    assert "| pip install 'brimful[datasets]'; " in said


@pytest.mark.slow
def test_hub_name_from_the_cache(tmp_path: Path) -> None:
    """A data set that `datasets` has in its cache is read offline, ids as names."""
    folder = tmp_path / "datasets/owner___reviews/default/0.0.0/0123456789abcdef"
    for split, rows in (("train", saved()), ("test", saved().select([0]))):
        rows.save_to_disk(str(tmp_path / split))
        arrow = (tmp_path / split / "data-00000-of-00001.arrow").read_bytes()
        put(folder / f"reviews-{split}.arrow", arrow)
    info = datasets.DatasetInfo(features=saved().features, builder_name="reviews", dataset_name="reviews")
    info.config_name, info.version = "default", datasets.Version("0.0.0")
    info.splits = datasets.SplitDict(
        {
            split: datasets.SplitInfo(split, num_examples=n, dataset_name="reviews")
            for split, n in (("train", 3), ("test", 1))
        }
    )
    info.write_to_directory(str(folder))
    code = "for name in ('owner/reviews', 'owner/reviews:test'):\n"
    code += "    rows = read_rows(name); print(rows.num_rows, rows.table['label'].to_pylist(), rows.place(0))\n"
    code += "from brimful.data.readers.sources import open_stream; stream = open_stream('owner/reviews')\n"
    code += "print(stream.num_rows, [chunk.table['label'].to_pylist() for chunk in stream.chunks(1)], stream.place(2))"
    assert in_a_process(code, HF_HOME=str(tmp_path)).splitlines() == [
        "3 ['neg', 'pos', None] ('owner/reviews', 1)",
        "1 ['neg'] ('owner/reviews:test', 1)",
        "3 [['pos', None]] ('owner/reviews', 3)",
    ]


@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kind=st.sampled_from(["parquet", "arrow", "csv.gz", "json", "jsonl"]), data=st.data())
def test_damage_anywhere_is_a_data_error_or_rows(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    """Whatever a bit that flips in a file does to it, the user gets rows or one line that says what is wrong."""
    if kind == "arrow":
        pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS * 9), str(tmp_path / "whole"))
        whole = bytearray((tmp_path / "whole").read_bytes())
    else:
        whole = bytearray(packed(encoded(ROWS * 9, kind.removesuffix(".gz")), ".gz" if kind.endswith("gz") else ""))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file = put(tmp_path / f"rows.{kind}", bytes(whole))
    try:
        said = read_rows(file).fingerprint
    except DataError as error:
        said = str(error)
    assert said.startswith(file) or len(said) == 64
    assert "\n" not in said
