"""Lengths of a dataset's rows, read from its table and not by running it."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from brimful.integrations.trainer_data import lengths_of

ROWS: dict[str, Any] = {
    "input_ids": [[5, 6, 7, 0], [5, 0, 0, 0], [5, 6, 0, 0]],
    "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
}


def test_padding_is_not_counted() -> None:
    dataset = Dataset.from_dict(ROWS)
    assert list(lengths_of(dataset)) == [3, 1, 2]  # type: ignore[arg-type]
    assert list(lengths_of(dataset.with_format("torch"))) == [3, 1, 2]  # type: ignore[arg-type]
    assert list(lengths_of(dataset.select([2, 0]))) == [2, 3]  # type: ignore[arg-type]
    assert list(lengths_of(dataset.remove_columns("attention_mask"))) == [4, 4, 4]  # type: ignore[arg-type]


def test_a_list_of_rows_is_read() -> None:
    rows = [{name: values[index] for name, values in ROWS.items()} for index in range(3)]
    assert list(lengths_of(rows)) == [3, 1, 2]  # type: ignore[arg-type]
    assert list(lengths_of([{"input_ids": row["input_ids"]} for row in rows])) == [4, 4, 4]  # type: ignore[arg-type]
    assert lengths_of([*rows, {"text": "a"}]) is None


def test_rows_that_are_made_when_asked_for_are_not_read() -> None:
    dataset = Dataset.from_dict(ROWS)
    assert lengths_of(dataset.with_transform(lambda rows: rows)) is None
    assert lengths_of([{"text": "a"}]) is None
    assert lengths_of(Dataset.from_dict({"text": ["a"]})) is None
    assert lengths_of(None) is None
