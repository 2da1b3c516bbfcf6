"""Fields of objects read as columns by their paths."""

from __future__ import annotations

import pyarrow as pa

from brimful.data.readers.fields import field_names, with_fields

TABLE = pa.table(
    {
        "review": [{"text": "a", "by": {"name": "x"}}, None, {"text": None, "by": None}],
        "review.lang": ["en", "de", "fr"],
        "a.b": [{"c": 1.5}, {"c": None}, None],
        "tags": [["x"], [], None],
    }
)


def values(*names: str | None) -> dict[str, list[object]]:
    added = with_fields(TABLE, *names)
    return {name: added[name].to_pylist() for name in added.column_names[TABLE.num_columns :]}


def test_a_field_is_null_where_there_is_no_object() -> None:
    assert values("review.text") == {"review.text": ["a", None, None]}
    assert values("review.by.name", None) == {"review.by.name": ["x", None, None]}
    assert with_fields(TABLE, "review.text")["review.text"].type == pa.large_string()


def test_names_with_dots_and_several_names() -> None:
    assert values("a.b.c") == {"a.b.c": [1.5, None, None]}
    assert list(values("review.text, review.by.name,a.b.c")) == ["review.text", "review.by.name", "a.b.c"]


def test_what_is_no_field_is_left_out() -> None:
    assert values("review", "review.lang", "review.by", "tags.x", "review.text.length", "other", "") == {}


def test_names_of_fields_stand_for_their_objects() -> None:
    assert field_names(TABLE.schema) == ["review.text", "review.by.name", "review.lang", "a.b.c", "tags"]
