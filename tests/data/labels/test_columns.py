"""Columns that are taken, and the reasons."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from brimful.core.errors import DataError
from brimful.data.labels.columns import Columns, find_columns
from brimful.data.readers.column_types import tidy
from brimful.data.readers.rows import Rows

LONG, SHORT = ["a longer sentence", "and one more of them"], ["a", "b"]


def rows_of(**columns: list[Any]) -> Rows:
    return Rows(table=tidy(pa.table(columns)), name="rows.csv", files=("rows.csv",), starts=(0,))


def taken(columns: Columns) -> tuple[str, str | None, tuple[str, ...]]:
    return columns.text, columns.pair, columns.labels


def refused(rows: Rows, **given: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        find_columns(rows, **given)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("names", "text", "label"),
    [
        (("label", "text"), "text", "label"),
        (("TEXT", "Label"), "TEXT", "Label"),
        (("id", "review", "sentiment"), "review", "sentiment"),
        (("title", "content", "stars"), "content", "stars"),
        (("text", "label", "label_text"), "text", "label"),
        (("tweet", "id", "y"), "tweet", "y"),
        (("Comment Text", "class"), "Comment Text", "class"),
    ],
)
def test_by_name(names: tuple[str, ...], text: str, label: str) -> None:
    columns = find_columns(rows_of(**dict.fromkeys(names, SHORT)))
    assert taken(columns) == (text, None, (label,))
    assert columns.reasons == {"text": "by name", "label": "by name"}


@pytest.mark.parametrize(
    ("first", "second"), [("sentence1", "sentence2"), ("Premise", "Hypothesis"), ("question", "answer")]
)
def test_pairs_by_name(first: str, second: str) -> None:
    columns = find_columns(rows_of(**{second: SHORT, "idx": [0, 1], first: SHORT, "label": [0, 1]}))
    assert taken(columns) == (first, second, ("label",))
    assert columns.reasons["pair"] == f"the pair of {first!r} by name"


def test_a_text_column_comes_before_pairs() -> None:
    rows = rows_of(question=LONG, answer=LONG, text=LONG, label=SHORT)
    assert taken(find_columns(rows)) == ("text", None, ("label",))
    assert taken(find_columns(rows, text="question")) == ("question", "answer", ("label",))
    assert taken(find_columns(rows, pair="answer")) == ("text", "answer", ("label",))


def test_the_given_label_is_no_text_and_no_pair() -> None:
    rows = rows_of(question=LONG, answer=SHORT)
    assert taken(find_columns(rows, label="answer")) == ("question", None, ("answer",))
    assert taken(find_columns(rows_of(text=SHORT, words=LONG), label="text")) == ("words", None, ("text",))


def test_by_type_the_longest_text_and_the_fewest_distinct_values() -> None:
    rows = rows_of(id=[1, 2, 3], a=["1", "2", "2000000000000000000000"], b=["x", "x", "y"], c=["one", "two", "three"])
    columns = find_columns(rows)
    assert taken(columns) == ("c", None, ("b",))
    assert columns.reasons["text"] == "the longest text, 4 characters on average"
    assert columns.reasons["label"] == "the fewest distinct values, 2"


def test_a_guessed_text_of_single_words_is_a_doubt() -> None:
    dates = ["2025-01-28", "2025-01-29", "2025-02-01"]
    (doubt,) = find_columns(rows_of(created=dates, kind=["x", "x", "y"])).doubts
    assert doubt.startswith("'created' is taken for the text, and most of its values are single words; --text-column")
    chinese = ["这部电影很好看", "这家餐厅太差了", "服务态度非常不错"]
    assert find_columns(rows_of(created=chinese, kind=["x", "x", "y"])).doubts == ()
    assert find_columns(rows_of(words=LONG, kind=["x", "y"])).doubts == ()


def test_numbers_of_rows_and_texts_are_no_doubt_about_the_label() -> None:
    more = {"Unnamed: 0": [0, 1, 2, 3], "heading": ["one", "two", "three", "four"]}
    columns = find_columns(rows_of(**more, words=[*LONG, *LONG], kind=["x", "y", "x", "y"]), text="words")
    assert (columns.labels, columns.doubts) == (("kind",), ())
    columns = find_columns(rows_of(words=[*LONG, *LONG], kind=["x", "y", "x", "y"], price=["1", "2", "3", "4"]))
    assert "price has 4" in columns.doubts[0]


def test_by_type_lists_count_their_elements() -> None:
    rows = rows_of(words=["one", "two", "three"], some=["a", "b", "c"], kinds=[["x", "y"], ["x"], []])
    assert find_columns(rows).labels == ("kinds",)


def test_labels_are_not_looked_for_when_not_needed() -> None:
    rows = rows_of(text=LONG, label=SHORT)
    assert taken(find_columns(rows, need_labels=False)) == ("text", None, ())
    assert taken(find_columns(rows, need_labels=False, label="label")) == ("text", None, ("label",))
    assert taken(find_columns(rows_of(words=LONG), need_labels=False)) == ("words", None, ())


def test_given_names() -> None:
    rows = rows_of(a=LONG, b=LONG, toxic=[0, 1], mild=[1, 1])
    columns = find_columns(rows, text="b", pair="a", label="toxic, mild")
    assert taken(columns) == ("b", "a", ("toxic", "mild"))
    assert columns.reasons == {"text": "given", "pair": "given", "label": "given"}


def test_given_name_with_a_comma_in_it() -> None:
    rows = rows_of(**{"text": LONG, "yes, or no": SHORT})
    assert find_columns(rows, label="yes, or no").labels == ("yes, or no",)


def test_wrong_name_gets_a_suggestion_and_the_columns() -> None:
    rows = rows_of(Text=LONG, label=SHORT)
    for given, name, meant in (("text", "txt", "'Text'"), ("pair", "TEXT", "'Text'"), ("label", "lable", "'label'")):
        error = refused(rows, **{given: name})
        assert str(error) == f"rows.csv: --{given}-column: there is no such column: {name!r}"
        assert error.hint == f"did you mean {meant}? columns: Text, label"
    assert refused(rows, label="label,zzz").hint == "columns: Text, label"


def test_names_with_control_characters_are_escaped() -> None:
    error = refused(rows_of(**{"te\x1bxt\n": LONG, "n": [1, 2]}), label="te\x1bxt")
    assert error.hint == "did you mean 'te\\x1bxt\\n'? columns: te\\x1bxt\\n, n"


def test_many_columns_are_not_all_listed() -> None:
    rows = rows_of(**{f"column{i}": LONG for i in range(30)})
    assert (refused(rows, text="zzz").hint or "").endswith("column19 and 10 more")


def test_text_that_is_no_text() -> None:
    error = refused(rows_of(text=LONG, n=[1, 2]), text="n")
    assert str(error) == "rows.csv: --text-column n holds int64, not text"
    assert error.hint == "columns: text, n"


def test_one_column_in_two_roles() -> None:
    rows = rows_of(text=LONG, label=SHORT)
    for one, other, name in (("text", "pair", "text"), ("text", "label", "text"), ("pair", "label", "label")):
        assert "one column cannot have two roles" in str(refused(rows, **{one: name, other: name}))
    assert "names a column twice" in str(refused(rows, label="label,label"))


def test_no_text() -> None:
    error = refused(rows_of(a=["1", "2.5"], b=[1, 2]))
    assert str(error) == "rows.csv: no column holds text"
    assert error.hint == "name it by --text-column; columns: a, b"


def test_no_label() -> None:
    error = refused(rows_of(id=[1, 2], text=LONG, constant=["x", "x"]))
    said = "no column can be the label: 'constant' has one value in all rows, 'text' is read as text"
    assert str(error) == f"rows.csv: {said}"
    assert error.hint == "name it by --label-column; columns: id, text, constant"


def test_the_label_as_weights() -> None:
    error = refused(rows_of(text=["a b", "c"], label=["x", "y"]), weight="label")
    assert "no column can be the label: 'text' is read as text, 'label' is read as weights" in str(error)
    assert error.hint == "name it by --label-column, or other weights by --weight-column; columns: text, label"


def test_two_columns_that_could_be_the_label() -> None:
    error = refused(rows_of(comment_text=LONG, toxic=[0, 1], insult=[1, 0]))
    assert str(error) == "rows.csv: 2 columns could be the label: toxic,insult"
    assert error.hint == "name it: --label-column toxic, or toxic,insult for one output each"
