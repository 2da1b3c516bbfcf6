"""Files that people have: encodings, delimiters, workbooks, fastText, texts in several columns; by the real command."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import Brimful, Files, Said, train_words
from tiny_files import review

REVIEWS = [(review(bool(i % 2), i), ("bad", "good")[i % 2]) for i in range(40)]
_SHEET = (
    '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>{}</sheetData></worksheet>'
)


def lines(rows: Iterable[Sequence[str]], between: str = ",", header: Sequence[str] = ("text", "label")) -> str:
    return "".join(f"{between.join(row)}\n" for row in [header, *rows])


def plan(brimful: Brimful, files: Files, data: Path, *more: object) -> Said:
    """A dry run of training on `data`."""
    return brimful(*train_words(data, files.base, data.parent / "run", "--dry-run", *more))


def labelled(brimful: Brimful, files: Files, data: Path, *more: object) -> list[dict[str, str]]:
    """Rows that classify writes of `data`."""
    said = brimful("classify", files.classifier, data, "--verify", 0, *more)
    assert said.code == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def workbook(path: Path, sheets: dict[str, Sequence[Sequence[object]]]) -> Path:
    """An .xlsx of these sheets, as small as Excel's standard allows."""

    def cell(value: object) -> str:
        if isinstance(value, str):
            return f'<c t="inlineStr"><is><t>{escape(value)}</t></is></c>'
        return f"<c><v>{value}</v></c>"

    names = "".join(f'<sheet name="{name}" sheetId="{i}" r:id="r{i}"/>' for i, name in enumerate(sheets, 1))
    main, office = "http://schemas.openxmlformats.org/spreadsheetml/2006/main", "http://schemas.openxmlformats.org/"
    relations = "".join(
        f'<Relationship Id="r{i}" Type="{office}officeDocument/2006/relationships/worksheet" Target="s{i}.xml"/>'
        for i in range(1, 1 + len(sheets))
    )
    package = f'<Relationships xmlns="{office}package/2006/relationships">'
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "xl/workbook.xml",
            f'<workbook xmlns="{main}" xmlns:r="{office}officeDocument/2006/relationships"><sheets>{names}</sheets>'
            "</workbook>",
        )
        whole = f'<Relationship Id="r1" Type="{office}officeDocument/2006/relationships/officeDocument" '
        file.writestr("_rels/.rels", f'{package}{whole}Target="xl/workbook.xml"/></Relationships>')
        file.writestr("xl/_rels/workbook.xml.rels", f"{package}{relations}</Relationships>")
        for i, rows in enumerate(sheets.values(), 1):
            cells = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
            file.writestr(f"xl/s{i}.xml", _SHEET.format(cells))
    return path


def test_windows_1252_is_seen_and_said(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_bytes(lines([("the café was good £5", "good"), *REVIEWS]).encode("cp1252"))
    said = plan(brimful, files, data)
    assert said.code == 0, said.err
    assert "rows.csv: 2 bytes are not UTF-8, so it is read as windows-1252 ('café')" in said.err
    assert "--encoding names another" in said.err
    assert labelled(brimful, files, data)[0]["text"] == "the café was good £5"


def test_one_pound_sign_in_a_folder_of_texts(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    for label in ("bad", "good"):
        (tmp_path / "news" / label).mkdir(parents=True)
        for number in range(8):
            text = review(label == "good", number) + (" £5" if number == 3 else " naïve")
            (tmp_path / "news" / label / f"{number}.txt").write_bytes(text.encode("cp1252" if number == 3 else "utf-8"))
    said = plan(brimful, files, tmp_path / "news")
    assert said.code == 0, said.err
    assert "3.txt: 1 byte is not UTF-8, so it is read as windows-1252 ('£5')" in said.err
    assert "(and 1 more of 16 files)" in said.err


def test_the_form_is_also_that_of_rows_to_evaluate_on(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """As much of it as they can have: fastText has an encoding, columns of text a delimiter too, Parquet nothing."""
    rows = [(f"Привет {review(bool(i % 2), i)}", ("bad", "good")[i % 2]) for i in range(24)]
    names = ("rows.csv", "fast.txt", "rows.txt", "rows.parquet")
    data, fast_text, columns, parquet = (tmp_path / name for name in names)
    for path in (data, columns):
        path.write_bytes(lines(rows, ";").encode("cp1251"))
    fast_text.write_bytes("".join(f"__label__{label} {text}\n" for text, label in rows).encode("cp1251"))
    pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), parquet)
    for held_out in (fast_text, columns, parquet):
        said = plan(brimful, files, data, "--eval-data", held_out, "--encoding", "cp1251", "--delimiter", ";")
        assert (said.code, "windows-1252" in said.err) == (0, False), said.err


@pytest.mark.parametrize("encoding", ["cp1251", "utf-16", "gb18030"])
def test_encodings_that_are_named(brimful: Brimful, files: Files, tmp_path: Path, encoding: str) -> None:
    text = "你好 世界 " * 4 if encoding == "gb18030" else "Привет мир, это текст"
    data = tmp_path / "rows.tsv"
    data.write_bytes(lines([(text, "good")] * 3, "\t").encode(encoding))
    assert [row["text"] for row in labelled(brimful, files, data, "--encoding", encoding)] == [text] * 3


def test_a_cyrillic_file_is_not_taken_for_windows_1252(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_bytes(lines([("Привет мир это текст", "a")]).encode("cp1251"))
    said = brimful("classify", files.classifier, data)
    assert said.code == 2
    assert "is not UTF-8, and 6" in said.err
    assert "--encoding cp1251" in said.err
    assert brimful("classify", files.classifier, data, "--encoding", "klingon").err.startswith(
        "error: --encoding is 'klingon': no such encoding is known"
    )


def test_a_delimiter_that_is_named(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text(lines([("good, really", "good"), ("bad; so bad", "bad")], "^"))
    assert [row["text"] for row in labelled(brimful, files, data, "--delimiter", "^")] == [
        "good, really",
        "bad; so bad",
    ]
    assert "it must be one character" in brimful("classify", files.classifier, data, "--delimiter", "::").err


def test_texts_of_several_columns_are_joined(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data, run = tmp_path / "rows.csv", tmp_path / "run"
    rows = [(f"title {i}", text if i % 5 else "", label) for i, (text, label) in enumerate(REVIEWS)]
    with data.open("w", newline="") as file:
        csv.writer(file).writerows([("title", "body", "label"), *rows])
    said = brimful(*train_words(data, files.base, run, "--text-column", "title,body", "--max-steps", 1))
    assert said.code == 0, said.err
    assert "text: column 'title,body' (given)" in said.err
    card = (run / "model" / "README.md").read_text()
    assert "The text is in columns `title`, `body`, joined by line breaks (a blank one is left out)" in card
    assert r'classify("text 1\ntext 2")' in card
    said = brimful("classify", run / "model", data, "--logits")
    assert "text: column 'title,body' (as in training" in said.err
    joined = tmp_path / "joined.jsonl"
    joined.write_text("".join(json.dumps({"text": "\n".join(filter(None, row[:2]))}) + "\n" for row in rows))
    of_parts = [json.loads(line)["logits"] for line in said.out.splitlines()]
    whole = brimful("classify", run / "model", joined, "--logits")
    assert of_parts == [json.loads(line)["logits"] for line in whole.out.splitlines()]
    assert "no such column: 'bodi'" in brimful("classify", run / "model", data, "--text-column", "title,bodi").err


def test_fields_of_objects(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Training, classification with that model, and evaluation read them by their paths; rows stay as they are."""
    data, output = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = [{"review": {"body": text, "stars": {"kind": label}}} for text, label in REVIEWS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    missing = brimful(*train_words(data, files.base, output))
    assert "columns: review.body, review.stars.kind" in missing.err
    named = ("--text-column", "review.body", "--label-column", "review.stars.kind", "--max-steps", 1, "--no-baselines")
    said = brimful(*train_words(data, files.base, output, *named))
    assert said.code == 0, said.err
    said = brimful("classify", output / "model", data, "--verify", 0)
    assert [{"review": json.loads(line)["review"]} for line in said.out.splitlines()] == rows
    assert "text: column 'review.body' (as in training" in said.err
    said = brimful("evaluate", output / "model", data, "--verify", 0)
    assert "Evaluated  40 rows" in said.out, said.err


@pytest.mark.slow
def test_workbooks(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [("text", "label", "stars"), *((text, label, i) for i, (text, label) in enumerate(REVIEWS))]
    data = workbook(tmp_path / "rows.xlsx", {"Notes": [], "Reviews": rows, "More": [("text",), ("one text",)]})
    said = plan(brimful, files, data)
    assert said.code == 0, said.err
    assert "sheet 'Reviews' is read, of Notes, Reviews, More; --sheet names another" in said.err
    assert labelled(brimful, files, data)[7]["stars"] == 7
    assert [row["text"] for row in labelled(brimful, files, data, "--sheet", "More")] == ["one text"]
    assert "has no sheet 'Some'" in brimful("classify", files.classifier, data, "--sheet", "Some").err
    bare = workbook(tmp_path / "bare.xlsx", {"One": REVIEWS})
    said = plan(brimful, files, bare)
    assert "looks like a row" in said.err
    assert len(labelled(brimful, files, bare, "--column-names", "text,label")) == 40
    titled = workbook(tmp_path / "titled.xlsx", {"One": [("My survey", ""), ("text", "label"), *REVIEWS]})
    assert "the first line has one value, 'My survey', above 2 columns" in plan(brimful, files, titled).err


@pytest.mark.parametrize(
    ("before", "more", "sheet"),
    [
        ([("Customer survey",), ("by the marketing department",), ("2024",)], (), "Answers"),
        ([("Author", "Ann"), ("Date", "2024"), ("Version", 2)], (), "Answers"),
        ([("remark", "kind"), *REVIEWS, *REVIEWS], (), "First"),
        ([("text", "label"), *REVIEWS], (), "First"),
        ([("text", "label"), *REVIEWS], ("--text-column", "text", "--label-column", "grade"), "Answers"),
    ],
)
def test_the_sheet_with_the_table_is_read(
    brimful: Brimful, files: Files, tmp_path: Path, before: list[tuple[object, ...]], more: tuple[str, ...], sheet: str
) -> None:
    """Not a title page, nor one without the columns that are asked for."""
    named = [("text", "grade", "label"), *((text, label, label) for text, label in REVIEWS)]
    data = workbook(tmp_path / "rows.xlsx", {"First": before, "Answers": named})
    said = plan(brimful, files, data, *more)
    assert said.code == 0, said.err
    assert f"sheet '{sheet}' is read, of First, Answers; --sheet names another" in said.err


def test_fast_text(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "train.txt"
    data.write_text("".join(f"__label__{label} {text}\n" for text, label in REVIEWS))
    said = plan(brimful, files, data)
    assert "read as fastText, one label a line, as it begins with __label__" in said.err
    assert "single_label, 2 labels: bad, good" in said.err
    data.write_text("".join(f"__label__{label} __label__all {text}\n" for text, label in REVIEWS))
    assert "multi_label, 3 labels: all, bad, good" in plan(brimful, files, data).err


def test_texts_in_lines(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "lines.txt"
    data.write_text("a good film\n\na bad film\n")
    assert [(row["text"], row["label"] is None) for row in labelled(brimful, files, data)] == [
        ("a good film", False),
        ("", True),
        ("a bad film", False),
    ]
    data.write_text("good\ta film\nbad\tanother\n")
    assert "--delimiter tab reads columns" in brimful("classify", files.classifier, data).err
    folder = tmp_path / "letters"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("a letter\nof two lines")
    rows = labelled(brimful, files, folder)
    assert [(row["file"], row["text"]) for row in rows] == [(n, "a letter\nof two lines") for n in ("a.txt", "b.txt")]
