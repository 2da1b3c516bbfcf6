"""Tables of data in memory."""

from __future__ import annotations

from brimful.data.readers.in_memory import in_memory


def test_rows_have_the_columns_of_any_of_them() -> None:
    """A row may lack what others have, the first one too."""
    rows = [{"text": "one"}, {"text": "two", "text_pair": "more", "label": "b"}, {"label": "a", "text": "three"}]
    table = in_memory(rows).table
    assert table.column_names == ["text", "text_pair", "label"]
    assert table.to_pylist() == [{"text_pair": None, "label": None, **row} for row in rows]
