"""Files of results in each form: every value comes back, whatever it is."""

from __future__ import annotations

import base64
import csv
import datetime
import gzip
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.errors import OutputError
from brimful.data.readers.sources import read_rows
from brimful.data.writers.row_files import Form, TableFile, form_of, json_lines

TEXTS = [
    "good", "", None, 'so "so", really', "two\nlines\r\nand\ttabs", "\U0001f600 caf\u00e9 \u6620\u753b",
    "\u202eright to left", "\x1b[31mred\x7f", "\x00", "a\rb", "'", "\u2028", "\ufeff", "NaN", "null",
]  # fmt: skip
SCORES = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))
SOME = [{"label": "\U0001f600", "score": float("nan")}, None, {"label": None, "score": 0.5}]
NAMES = ["a.parquet", "a.csv", "a.tsv", "a.jsonl", "a.ndjson", "a.csv.gz", "a.tsv.zst", "a.jsonl.gz", "a.jsonl.zst"]


def nasty() -> pa.Table:
    """A column of each kind, of as many rows as there are nasty texts."""
    number = len(TEXTS)
    every = {
        "text": pa.array(TEXTS, pa.large_string()),
        "score": pa.array([float("nan"), float("-inf"), None, 0.1, *range(number - 4)], pa.float64()),
        "count": pa.array([None, 2**63 - 1, *range(number - 2)], pa.int64()),
        "truncated": pa.array([None, True, *([False] * (number - 2))]),
        "scores": pa.array([None, [], SOME, *([SOME[:1]] * (number - 3))], SCORES),
        "raw": pa.array([None, b"", b"\x00\xff", *([b"x"] * (number - 3))], pa.binary()),
        "fixed": pa.array([None, *([b"abc"] * (number - 1))], pa.binary(3)),
        "tags": pa.array([{"b": [1, None]}] * number, pa.struct([("b", pa.large_list(pa.int32()))])),
        "pairs": pa.array([[("k", 1.5)]] * number, pa.map_(pa.string(), pa.float32())),
        "kind": pa.array(["x", None, *(["y"] * (number - 2))]).dictionary_encode(),
        "price": pa.array([Decimal("1.50")] * number),
        "day": pa.array([datetime.date(2024, 2, 29)] * number),
        "at": pa.array([1_700_000_000_123_456_789] * number, pa.timestamp("ns")),
        "took": pa.array([1] * number, pa.duration("us")),
        "half": pa.array([0.5] * number, pa.float16()),
        "none": pa.nulls(number),
    }  # fmt: skip
    return pa.table(every)


def write_table(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    form = form_of(path)
    assert form is not None
    file = TableFile(path, form, table.schema)
    try:
        file.write(table)
        file.finish()
    except BaseException:
        file.discard()
        raise


def test_forms() -> None:
    assert form_of(Path("x.CSV")) == Form(suffix=".csv")
    assert form_of(Path("x.y.jsonl.gz")) == Form(suffix=".jsonl", codec="gzip")
    for name in ("x", "x.txt", "x.gz", "x.parquet.gz", "x.json", "csv"):
        assert form_of(Path(name)) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_value_comes_back(name: str, tmp_path: Path) -> None:
    table = nasty()
    write_table(table, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if name.endswith("parquet"):
        found = pq.read_table(tmp_path / name)
        assert found.schema == table.schema
        assert repr(found.to_pylist()) == repr(table.to_pylist())
        return
    text = unpacked(tmp_path / name)
    if "json" in name:
        rows = [json.loads(line, parse_constant=not_json) for line in text.split("\n")[:-1]]
        assert list(rows[0]) == table.column_names
    else:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if "tsv" in name else ","))
    plain = ["text", "count", "truncated", "score", "scores", "raw", "fixed", "tags", "pairs", "kind", "price", "half"]
    for column in plain:
        values = [shown(value, lines="json" in name) for value in table[column].to_pylist()]
        assert [row[column] for row in rows] == values, column
    assert [rows[0][column] for column in ("day", "at")] == ["2024-02-29", "2023-11-14 22:13:20.123456789"]
    assert rows[0]["none"] in (None, "")


def unpacked(path: Path) -> str:
    with pa.input_stream(path) as stream:  # by the end of the name
        return stream.read().decode()


def shown(value: Any, *, lines: bool) -> Any:
    """A value as it stands in JSON lines, or in a field of a CSV."""
    if isinstance(value, bytes):
        value = base64.b64encode(value).decode()
    if lines:
        return float(value) if isinstance(value, Decimal) else finite(value)
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(finite(value), ensure_ascii=False)
    if isinstance(value, float) and not math.isnan(value):
        return "-inf" if math.isinf(value) else f"{value:g}"
    return str(value).lower() if isinstance(value, bool | float) else str(value)


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_can_be_classified(name: str, tmp_path: Path) -> None:
    """Our own reader has the texts again."""
    texts = [text for text in TEXTS if text and "\x00" not in text]
    write_table(pa.table({"text": texts, "id": range(len(texts))}), tmp_path / name)
    assert read_rows(str(tmp_path / name)).table["text"].to_pylist() == texts


LONG = [Decimal("12345678901234567.89"), Decimal("-0.10"), None]


@pytest.mark.parametrize("name", NAMES)
def test_decimals_keep_all_digits(name: str, tmp_path: Path) -> None:
    kind = pa.decimal128(25, 2)
    table = pa.table({
        "price": pa.array(LONG, kind),
        "prices": pa.array([LONG, [], None], pa.large_list(kind)),
        "wide": pa.array([Decimal("9" * 70 + ".000001"), None, Decimal(0)], pa.decimal256(76, 6)),
        "small": pa.array([Decimal("1E-10"), None, Decimal(0)], pa.decimal128(25, 10)),
    })  # fmt: skip
    write_table(table, tmp_path / name)
    if name.endswith("parquet"):
        assert pq.read_table(tmp_path / name).equals(table)
        return
    text = unpacked(tmp_path / name)
    if "json" in name:
        found = [json.loads(line, parse_float=Decimal) for line in text.splitlines()]
        assert found == table.to_pylist()
        assert '"small": 0.0000000001}' in text
        assert text.splitlines()[0].startswith('{"price": 12345678901234567.89, "prices": [12345678901234567.89, -0.10')
        return
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if "tsv" in name else ","))
    assert [row["price"] for row in rows] == ["12345678901234567.89", "-0.10", ""]
    assert [row["prices"] for row in rows] == ["[12345678901234567.89, -0.10, null]", "[]", ""]
    assert [row["wide"] for row in rows] == ["9" * 70 + ".000001", "", "0.000000"]
    assert [row["small"] for row in rows] == ["0.0000000001", "", "0.0000000000"]


def test_nothing_that_a_terminal_obeys_stands_in_lines() -> None:
    [line] = json_lines(pa.table({"text": ["\x1b[31m \x7f \u202e \u2028 \u0085"]}))
    assert line.isascii()
    assert not set(line) & {"\x1b", "\x7f"}


@given(st.lists(st.text() | st.none(), max_size=5), st.sampled_from([",", "\t"]))
def test_any_text_in_any_form(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None], delimiter: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    table = pa.table({"text": pa.array(texts, pa.large_string()), "id": range(len(texts))})
    name = "a.csv" if delimiter == "," else "a.tsv"
    for each in (name, "a.jsonl", "a.parquet"):
        write_table(table, folder / each)
    with (folder / name).open(encoding="utf-8", newline="") as file:
        assert [row["text"] for row in csv.DictReader(file, delimiter=delimiter)] == [text or "" for text in texts]
    lines = (folder / "a.jsonl").read_bytes().decode().split("\n")[:-1]
    assert [json.loads(line)["text"] for line in lines] == texts
    assert pq.read_table(folder / "a.parquet")["text"].to_pylist() == texts


@pytest.mark.parametrize("name", NAMES)
def test_equal_tables_are_equal_bytes(name: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_table(nasty(), tmp_path / folder / name)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_gzip_says_nothing_of_when_and_where(tmp_path: Path) -> None:
    write_table(nasty(), tmp_path / "a.csv.gz")
    assert (tmp_path / "a.csv.gz").read_bytes()[3:8] == bytes(5)  # flags, time
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()).startswith(b'"text"')


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_is_told_and_leaves_nothing(name: str, disk: Any) -> None:
    noise = pa.table({"text": [f"{i * 7919 % 100003:x}" * 9 for i in range(20000)]})
    folder = disk("64k")
    with pytest.raises(OSError, match="No space left on device"):
        write_table(noise, folder / name)
    assert list(folder.iterdir()) == []


def test_a_file_that_is_given_up_is_gone(tmp_path: Path) -> None:
    form = form_of(Path("a.parquet"))
    assert form is not None
    file = TableFile(tmp_path / "a.parquet", form, nasty().schema)
    file.write(nasty())
    file.discard()
    del file
    assert list(tmp_path.iterdir()) == []


def test_a_column_without_a_place_in_the_form(tmp_path: Path) -> None:
    table = pa.table({"a": [1], "b\x1b": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pytest.raises(OutputError, match=r"column 'b\\x1b' cannot be written to a \.parquet file, for it holds month"):
        write_table(table, tmp_path / "a.parquet")
    write_table(table, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.csv"]
