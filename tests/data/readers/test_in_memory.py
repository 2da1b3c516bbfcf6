"""Tables of data in memory."""

from __future__ import annotations

import datasets
import pandas
import pytest

from brimful.core.errors import DataError, OptionError
from brimful.data.readers.in_memory import in_memory

NAN = float("nan")


def test_rows_have_the_columns_of_any_of_them() -> None:
    """A row may lack what others have, the first one too."""
    rows = [{"text": "one"}, {"text": "two", "text_pair": "more", "label": "b"}, {"label": "a", "text": "three"}]
    table = in_memory(rows).table
    assert table.column_names == ["text", "text_pair", "label"]
    assert table.to_pylist() == [{"text_pair": None, "label": None, **row} for row in rows]


def test_nan_among_texts_is_none() -> None:
    """As pandas has it in columns of texts, and so in the lists that are made of them."""
    expected = {"text": [None, "a film"], "label": ["good", None]}
    texts, labels = [NAN, "a film"], ["good", NAN]
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    series = (pandas.Series([pandas.NA, "a film"], dtype=object), pandas.Series(labels))
    for given in ((texts, labels), rows, {"text": texts, "label": labels}, series):
        assert in_memory(given).table.to_pydict() == expected
    assert in_memory([("a", NAN), ("b", "c")]).table["text_pair"].to_pylist() == [None, "c"]


def test_a_row_that_is_no_text_is_named() -> None:
    with pytest.raises(DataError) as caught:
        in_memory(["a film", None, 7])
    assert str(caught.value) == "list of texts, row 3: int is no text: '7'"


def test_splits_and_streams_of_datasets_are_refused() -> None:
    data = datasets.Dataset.from_dict({"text": ["a film"]})
    stream = data.to_iterable_dataset()
    for splits in (datasets.DatasetDict(test=data), datasets.IterableDatasetDict(test=stream)):
        with pytest.raises(OptionError, match="data is splits, not rows: test") as caught:
            in_memory(splits)
        assert caught.value.hint == "give one, as data['test']"
    with pytest.raises(OptionError, match="data is IterableDataset"):
        in_memory(stream)
    assert in_memory(list(stream)).table.to_pydict() == {"text": ["a film"]}
