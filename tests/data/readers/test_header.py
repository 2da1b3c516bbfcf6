"""The first line of CSV and TSV: names of columns, or a row like the others, and the flags that settle it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brimful.core.errors import DataError, InputError, OptionError
from brimful.core.options.checks import split_names
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.train import TrainOptions
from brimful.data.labels.columns import find_columns
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.sources import open_stream, read_rows
from tiny_files import review

NO_HEADER = FileFormat(False)
REVIEWS = [(review(bool(n % 2), n), ("bad", "good")[n % 2]) for n in range(24)]
SETTLED = "--no-header or --column-names reads it as one, --header as names"


def put(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def rows_of(reviews: list[tuple[str, str]], delimiter: str = ",") -> list[str]:
    return [f'"{text}"{delimiter}{label}' for text, label in reviews]


def refused(spec: object, header: FileFormat) -> InputError:
    with pytest.raises(InputError) as caught:
        read_rows(str(spec), header)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (rows_of(REVIEWS), "'bad' is also a value of its column"),
        (rows_of(REVIEWS)[::-1], "'good' is also a value of its column"),
        (["so it goes,4", "not at all,1", "never again,1"], "'4' is a number, as are all values below it"),
        (["0.5,so it goes", "1.5,and goes on", "2,never"], "'0.5' is a number, as are all values below it"),
        (["it was a good film", "it was a bad film", "both"], "'it was a good film' is a text, as are the values"),
        (["good,good", "bad,bad", "good,bad", "fine,good"], "a column twice"),
        (["a b,1", "c d,1"], "'1' is a number"),
        (["good movie", "bad film", "good movie", "a bore"], "'good movie' is also a value of its column"),
    ],
)
def test_a_row_in_place_of_the_header_is_told(tmp_path: Path, lines: list[str], reason: str) -> None:
    file = put(tmp_path / "rows.csv", lines)
    if "twice" in reason:
        error = refused(file, FileFormat())
        assert reason in str(error)
        assert "--no-header" in str(error.hint)
        return
    (warning,) = read_rows(file).warnings
    assert reason in warning
    assert warning.startswith(f"{file}: the first line looks like a row ('")
    assert SETTLED in warning
    assert open_stream(file).warnings == (warning,)
    assert read_rows(file, FileFormat(True)).warnings == read_rows(file, NO_HEADER).warnings == ()


@pytest.mark.parametrize(
    "lines",
    [
        ["text,label", *rows_of(REVIEWS)],
        ["utterance,cls", *rows_of(REVIEWS)],
        ["what did you like about the film,rating"] + [f"the film was {n},{n}" for n in range(9)],
        [",review,sentiment"] + [f"{n},{text},{label}" for n, (text, label) in enumerate(REVIEWS)],
        ["0,1"] + [f"{text},{n % 2}" for n, (text, _) in enumerate(REVIEWS)],
        [",0,1"] + [f"{n},{text},{n % 2}" for n, (text, _) in enumerate(REVIEWS)],
        ["text,12,45", "one film,0,1", "two films,1,0"],
        ["id,2019,2020", "7,12,13", "8,14,15"],
        ["text,label", "text,label", "a film,good", "text,label"],  # files put after one another
        ["words,is it a question", *[f"one two three four,{('yes', 'no')[n % 2]}" for n in range(40)]],
        ["text"],
    ],
)
def test_a_header_is_believed(tmp_path: Path, lines: list[str]) -> None:
    file = put(tmp_path / "rows.csv", [*lines, *(["so it goes"] if len(lines) == 1 else [])])
    assert read_rows(file).warnings == ()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["reset password", "card lost", "where is it"], "header: 'reset password' (the first line; --no-header"),
        (["good fun,great", "a bore,bad", "so so,fine"], "header: 'good fun', 'great' (the first line; --no-header"),
        (["text;label", "a film;good", "a bore;bad"], "delimiter: ';' (by the first line; --delimiter names another)"),
        (["text,label", "a film,good", "a bore,bad"], None),
    ],
)
def test_guesses_about_the_first_line_are_said(tmp_path: Path, lines: list[str], said: str | None) -> None:
    file = put(tmp_path / "rows.csv", lines)
    notes = read_rows(file).notes
    assert (notes == ()) if said is None else (len(notes) == 1 and notes[0].startswith(said))
    assert open_stream(file).notes == notes
    settled = FileFormat(True, delimiter=";" if said and ";" in said.partition("(")[0] else ",")
    assert read_rows(file, settled).notes == ()


@pytest.mark.parametrize(
    ("lines", "is_said"),
    [
        (["text,label", *rows_of(REVIEWS)], True),
        (["words,length", "a film,4", "a bore,1"], True),
        (rows_of(REVIEWS), False),
        (["so it goes,4", "not at all,1"], False),
        (["reset password", "card lost"], False),
        (["the text,", "a film,good"], False),
    ],
)
def test_names_in_place_of_the_first_row_are_told(tmp_path: Path, lines: list[str], is_said: bool) -> None:
    file = put(tmp_path / "rows.csv", lines)
    names = ("words", "class") if "," in lines[0] else ("words",)
    for form in (NO_HEADER, FileFormat(False, names)):
        warnings = read_rows(file, form).warnings
        said = ["the first line looks like names of columns ('" in each for each in warnings]
        assert said == [True] * is_said


def test_without_a_header_no_row_is_lost(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.csv", rows_of(REVIEWS))
    rows = read_rows(file, NO_HEADER)
    assert rows.table.column_names == ["column_1", "column_2"]
    assert [tuple(row.values()) for row in rows.table.to_pylist()] == REVIEWS
    assert rows.place(0) == (file, 1)
    columns = find_columns(rows)
    assert (columns.text, columns.labels) == ("column_1", ("column_2",))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    delimiter=st.sampled_from(",;\t|"),
    reviews=st.lists(st.sampled_from(REVIEWS), min_size=1, max_size=9),
    names=st.sampled_from([None, "text,label", " a , b "]),
    packing=st.sampled_from(["", ".gz"]),
)
def test_rows_without_a_header_come_as_they_were_written(
    tmp_path: Path, delimiter: str, reviews: list[tuple[str, str]], names: str | None, packing: str
) -> None:
    data = "\ufeff" + "".join(f"{line}\n" for line in rows_of(reviews, delimiter))
    file = tmp_path / f"rows.csv{packing}"
    file.write_bytes(gzip.compress(data.encode()) if packing else data.encode())
    header = FileFormat(False, split_names(names) if names else None)
    rows, stream = read_rows(str(file), header), open_stream(str(file), form=header)
    assert [tuple(row.values()) for row in rows.table.to_pylist()] == reviews
    assert rows.table.equals(stream.sample.table)
    expected = [name.strip() for name in names.split(",")] if names else ["column_1", "column_2"]
    assert rows.table.column_names == expected


def test_the_delimiter_is_the_one_that_rows_agree_on(tmp_path: Path) -> None:
    """Commas of the first text are not taken for it, unless as many names were given."""
    lines = ["good, really, a lot\tpos", "bad\tneg", "fine, so far\tpos"]
    file = put(tmp_path / "rows.csv", lines)
    assert read_rows(file, NO_HEADER).table["column_2"].to_pylist() == ["pos", "neg", "pos"]
    file = put(tmp_path / "rows.csv", ["a;b,1", "c;d,2", "e;f;g,3"])
    assert read_rows(file, FileFormat(False, ("text", "label"))).table.to_pydict()["text"] == ["a;b", "c;d", "e;f;g"]


def test_one_name_takes_whole_lines_for_texts(tmp_path: Path) -> None:
    """Rows that commas do not cut alike."""
    file = put(tmp_path / "rows.csv", ["good, really, a lot", "bad", "fine, so far"])
    assert read_rows(file, FileFormat(False, ("text",))).table["text"].to_pylist() == [
        "good, really, a lot",
        "bad",
        "fine, so far",
    ]


@pytest.mark.parametrize(("names", "said"), [("text", "1 name"), ("text,label,more", "3 names")])
def test_names_for_another_number_of_columns(tmp_path: Path, names: str, said: str) -> None:
    file = put(tmp_path / "rows.csv", rows_of(REVIEWS))
    error = refused(file, FileFormat(False, split_names(names)))
    assert f"row 1: --column-names has {said}, and the first row 2 columns: 'the film was" in str(error)
    assert error.hint == "name all columns, in their order; the file is read with the delimiter ','"


def test_a_ragged_row_below_no_header(tmp_path: Path) -> None:
    file = put(tmp_path / "rows.csv", ["a film,good", "a,film,bad"])
    assert "row 2: 3 columns, the first row has 2: 'a,film,bad'" in str(refused(file, NO_HEADER))


@pytest.mark.parametrize(
    ("header", "given"), [(NO_HEADER, "--no-header"), (FileFormat(False, ("a",)), "--column-names")]
)
def test_formats_without_a_header(tmp_path: Path, header: FileFormat, given: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a film"}\n')
    error = refused(tmp_path / "rows.jsonl", header)
    assert isinstance(error, OptionError)
    assert str(error) == f"{given} is for CSV, TSV and Excel files, and there is none in the data"
    with pytest.raises(OptionError):
        open_stream("-", form=header)
    put(tmp_path / "rows.csv", ["another film"])
    assert read_rows(str(tmp_path), FileFormat(False, ("text",))).num_rows == 2
    assert read_rows(str(tmp_path / "rows.jsonl"), FileFormat(True)).num_rows == 1


def test_files_that_all_begin_with_a_row(tmp_path: Path) -> None:
    """Their first rows differ, and so would their columns."""
    first = put(tmp_path / "1.csv", rows_of(REVIEWS[:12]))
    put(tmp_path / "2.csv", rows_of(REVIEWS[12:]))
    with pytest.raises(DataError, match="has not the columns of") as caught:
        read_rows(str(tmp_path))
    assert (caught.value.hint or "").startswith(f"{first}: the first line looks like a row")
    assert read_rows(str(tmp_path), NO_HEADER).num_rows == 24


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"header": True, "column_names": "a,b"}, "--header and --column-names are both given"),
        ({"column_names": "a,,b"}, "--column-names is 'a,,b': a name is empty"),
        ({"column_names": ""}, "--column-names is '': a name is empty"),
        ({"column_names": "a,b, a"}, "--column-names has 'a' twice"),
    ],
)
def test_options_that_contradict_themselves(options: dict[str, object], said: str) -> None:
    for make in (lambda: TrainOptions(data="d", model="m", output="o", **options),
                 lambda: ClassifyOptions(data="d", model="m", **options)):  # fmt: skip
        with pytest.raises(OptionError) as caught:
            make()
        assert str(caught.value) == said
        assert caught.value.hint
