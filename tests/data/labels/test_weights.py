"""Weights of rows: read from a column, checked with their place, and gone with rows of weight 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import brimful
from brimful.core.errors import DataError
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import find_columns
from brimful.data.labels.examples import Examples, make_examples
from brimful.data.labels.label_space import detect_labels
from brimful.data.labels.weights import weighted
from brimful.data.readers.rows import Rows
from brimful.tasks.task import MultiLabel, SingleLabel, make_task
from tiny_files import review, save_base

TEXTS = [f"text {i}" for i in range(4)]


def rows_of(**columns: Any) -> Rows:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    table = pa.table(
        {
            n: c.cast(pa.large_string()) if c.type == pa.string() else c
            for n, c in zip(table.column_names, table.columns, strict=True)
        }
    )
    return Rows(table=table, name="a.csv", files=("a.csv",), starts=(0,))


def read(values: list[Any], notes: list[str] | None = None) -> Examples:
    rows = rows_of(text=TEXTS, label=["a", "b", "a", "b"], weight=values)
    columns = find_columns(rows, weight="weight")
    assert (columns.text, columns.labels, columns.weight) == ("text", ("label",), "weight")
    return weighted(make_examples(rows, columns, detect_labels(rows, columns))[0], (notes or []).append)


@pytest.mark.parametrize("values", [[1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], ["1", "2.0", " 3", "4"]])
def test_numbers_and_numbers_as_text_are_weights(values: list[Any]) -> None:
    found = read(values)
    assert found.weights is not None
    assert found.weights.dtype == np.float32
    assert found.weights.tolist() == [1, 2, 3, 4]


def test_rows_of_weight_0_are_not_there() -> None:
    notes: list[str] = []
    rows = rows_of(text=TEXTS, label=["a", "b", "a", "b"], weight=[1, 0, 0.5, 0])
    columns = find_columns(rows, weight="weight")
    found = weighted(make_examples(rows, columns, detect_labels(rows, columns))[0], notes.append)
    assert found.row_numbers.tolist() == [0, 2]
    assert found.texts.to_pylist() == ["text 0", "text 2"]
    assert found.weights is not None
    assert found.weights.tolist() == [1, 0.5]
    assert notes == ["left out for a weight of 0: 2 rows"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, -2, 1, 1], "a.csv, row 2: column 'weight' has a negative weight: '-2'"),
        ([1.0, 1.0, float("inf"), 1.0], "row 3: column 'weight' holds no finite number"),
        ([1.0, None, 1.0, 1.0], "row 2: column 'weight' holds no finite number"),
        (["1", "2", "heavy", "1"], "row 3: column 'weight' holds no number: 'heavy'"),
        ([0, 0, 0, 0], "column 'weight' has no weight above 0"),
    ],
)
def test_what_is_no_weight_is_an_error_with_its_place(values: list[Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        read(values)
    assert said in str(caught.value)
    assert caught.value.hint is not None
    assert "weight" in caught.value.hint


def test_a_column_of_weights_is_neither_text_nor_label() -> None:
    rows = rows_of(a=["some words here"] * 2, b=["x", "y"], w=["1", "2"])
    assert find_columns(rows, weight="w").labels == ("b",)
    with pytest.raises(DataError, match="two roles"):
        find_columns(rows, weight="b", label="b")
    with pytest.raises(DataError, match="--weight-column: there is no such column"):
        find_columns(rows, weight="weights")


@pytest.mark.parametrize("task", ["single_label", "multi_label"])
def test_balanced_weights_count_a_row_as_often_as_its_weight(task: Any) -> None:
    space = LabelSpace(task=task, names=("a", "b", "c"), values={"a": 0, "b": 1, "c": 2})
    random, weights = np.random.default_rng(0), np.array([1, 3, 2, 1, 4, 2], dtype=np.float32)
    targets = random.integers(0, 3, 6) if task == "single_label" else random.integers(0, 2, (6, 3)).astype(np.uint8)
    one = make_task(space, targets, "balanced", 0.0, weights)
    other = make_task(space, np.repeat(targets, weights.astype(int), axis=0), "balanced")
    assert isinstance(one, SingleLabel | MultiLabel)
    assert isinstance(other, SingleLabel | MultiLabel)
    assert one.class_weights_C == pytest.approx(other.class_weights_C, rel=1e-6)


@pytest.mark.slow
def test_a_run_with_weights_is_a_run_with_repeated_rows(tmp_path: Path) -> None:
    """Whole numbers as weights, every row in each batch, and as many copies of the rows."""
    base, times = save_base(tmp_path / "base"), [1, 3, 2, 0, 1, 4]
    rows = [{"text": review(i % 2 == 0, i), "label": "xy"[i % 2], "weight": times[i]} for i in range(6)]
    copies = [row for row in rows for _ in range(int(row["weight"]))]
    fixed = {"model": base, "eval_split": 0, "max_steps": 3, "batch_size": 16, "learning_rate": 1e-2, "device": "cpu"}
    one = brimful.train(rows, output=tmp_path / "weights", weight_column="weight", class_weights="balanced", **fixed)
    other = brimful.train(
        copies, output=tmp_path / "copies", class_weights="balanced", text_column="text", label_column="label", **fixed
    )
    assert one.data["weights"] == {"min": 1, "mean": pytest.approx(11 / 5), "max": 4}
    assert one.first_batch is not None
    assert one.first_batch.passed
    texts = [row["text"] for row in rows]
    models = [Path(run.options["output"]) / "model" for run in (one, other)]
    logits = [brimful.Classifier(model, precision="fp32").logits(texts) for model in models]
    assert np.abs(logits[0] - logits[1]).max() < 5e-5  # order of sums, grown by the steps of a default run
