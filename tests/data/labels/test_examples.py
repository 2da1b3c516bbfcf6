"""Examples: which rows become one, how they are split, and what is told about them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.errors import DataError
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import Columns, find_columns
from brimful.data.labels.examples import Examples, _combinations, describe, make_examples, split_examples
from brimful.data.labels.label_space import detect_labels
from brimful.data.readers.column_types import tidy
from brimful.data.readers.rows import Rows
from brimful.tasks.label_rows import LabelRows, dense


def rows_of(**columns: list[Any]) -> Rows:
    return Rows(table=tidy(pa.table(columns)), name="rows.csv", files=("rows.csv",), starts=(0,))


def examples_of(
    *, pair: str | None = None, labels: str | None = "label", task: Any = "auto", **columns: Any
) -> Examples:
    rows = rows_of(**columns)
    found = find_columns(rows, text="text", pair=pair, label=labels, need_labels=labels is not None)
    return make_examples(rows, found, detect_labels(rows, found, task) if labels else None)[0]


def numbered(targets: list[Any], task: Any = "auto") -> Examples:
    return examples_of(text=[f"text {i}" for i in range(len(targets))], label=targets, task=task)


def rows_in(part: Examples) -> list[int]:
    return [int(row) for row in part.row_numbers]


# Making


def test_rows_without_text_are_left_out_and_counted() -> None:
    rows = rows_of(text=["a", "", None, " \n\t\v\x85\u00a0\u3000", "b"], label=["x", "y", None, "", "y"])
    columns = Columns(text="text", pair=None, labels=("label",), reasons={})
    examples, num_empty = make_examples(rows, columns, detect_labels(rows, columns))
    assert num_empty == 3
    assert (len(examples), examples.texts.to_pylist(), rows_in(examples)) == (2, ["a", "b"], [0, 4])
    assert examples.targets is not None
    assert dense(examples.targets).tolist() == [0, 1]
    assert examples.row_numbers.dtype == np.int64
    assert (examples.place(0), examples.place(1)) == (("rows.csv", 1), ("rows.csv", 5))


def test_pairs_need_both_texts() -> None:
    rows = rows_of(premise=["a", "b", ""], hypothesis=["c", "", "d"], label=["x", "y", "x"])
    columns = find_columns(rows)
    examples, num_empty = make_examples(rows, columns, None)
    assert (num_empty, examples.texts.to_pylist(), examples.targets) == (2, ["a"], None)
    assert examples.pairs is not None
    assert examples.pairs.to_pylist() == ["c"]


def test_labels_are_read_on_the_rows_that_are_kept() -> None:
    rows = rows_of(text=["a", "", "c"], label=["x", "y", ""])
    columns = Columns(text="text", pair=None, labels=("label",), reasons={})
    with pytest.raises(DataError, match=r"row 3: column 'label' has no label"):
        make_examples(rows, columns, detect_labels(rows, columns))


@pytest.mark.parametrize("texts", [["", " "], [None, None]])
def test_no_text_at_all(texts: list[Any]) -> None:
    with pytest.raises(DataError) as caught:
        make_examples(rows_of(text=texts), Columns(text="text", pair=None, labels=(), reasons={}), None)
    assert str(caught.value) == "rows.csv: column 'text' has no text in any of 2 rows"
    assert caught.value.hint == "is --text-column the right one?"


def test_filter() -> None:
    examples = examples_of(text=["a", "b", "c"], other=["x", "y", "z"], label=[0, 1, 1], pair="other")
    taken = examples.filter(np.array([True, False, True]))
    assert taken.texts.to_pylist() == ["a", "c"]
    assert taken.pairs is not None
    assert taken.pairs.to_pylist() == ["x", "z"]
    assert taken.targets is not None
    assert (dense(taken.targets).tolist(), rows_in(taken), taken.place(1)) == ([0, 1], [0, 2], ("rows.csv", 3))


# Splitting

single = st.lists(st.sampled_from("aaaaabbc"), min_size=2, max_size=120).filter(lambda labels: len(set(labels)) > 1)
several = st.lists(st.lists(st.sampled_from("wxyz"), unique=True), min_size=4, max_size=60).filter(any)
amounts = st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=80)
shares, seeds = st.floats(0.01, 0.9), st.integers(0, 2**32)


@given(
    st.one_of(
        st.tuples(single, st.just("single_label")),
        st.tuples(several, st.just("multi_label")),
        st.tuples(amounts, st.just("regression")),
    ),
    shares,
    seeds,
)
def test_parts_are_disjoint_whole_ordered_and_the_same_again(
    case: tuple[list[Any], str], share: float, seed: int
) -> None:
    examples = numbered(*case)
    try:
        train, held_out = split_examples(examples, share, seed)
    except DataError as error:
        assert "too few" in str(error)  # noqa: PT017
        return
    assert sorted(rows_in(train) + rows_in(held_out)) == list(range(len(examples)))
    assert rows_in(train) == sorted(rows_in(train))
    assert rows_in(held_out) == sorted(rows_in(held_out))
    assert [rows_in(part) for part in split_examples(examples, share, seed)] == [rows_in(train), rows_in(held_out)]
    assert train.texts.to_pylist() == [f"text {row}" for row in rows_in(train)]


@given(single, shares, seeds)
def test_classes_are_split_in_the_same_share(labels: list[str], share: float, seed: int) -> None:
    try:
        train, held_out = split_examples(numbered(labels), share, seed)
    except DataError:
        assert max(map(labels.count, labels)) == 1
        return
    assert train.targets is not None
    assert held_out.targets is not None
    for label in set(dense(train.targets).tolist()) | set(dense(held_out.targets).tolist()):
        kept, held = np.count_nonzero(train.targets == label), np.count_nonzero(held_out.targets == label)
        assert kept >= 1
        assert abs(held - min(share * (kept + held), kept + held - 1)) < 1 + 1e-6


@given(several, shares, seeds)
def test_every_label_keeps_an_example_to_train_on(labels: list[list[str]], share: float, seed: int) -> None:
    examples = numbered(labels)
    try:
        train, _ = split_examples(examples, share, seed)
    except DataError:
        return
    assert examples.targets is not None
    assert train.targets is not None
    assert dense(train.targets).any(axis=0).tolist() == dense(examples.targets).any(axis=0).tolist()


@given(several)
def test_combinations_are_numbered_by_their_flags(labels: list[list[str]]) -> None:
    """As numpy sorts rows of flags, those that stand once together at the end: a split is the same as ever."""
    targets = numbered(labels).targets
    assert isinstance(targets, LabelRows)
    rows = [tuple(row) for row in dense(targets).tolist()]
    repeated = sorted({row for row in rows if rows.count(row) > 1})
    assert _combinations(targets).tolist() == [
        repeated.index(row) if row in repeated else len(repeated) for row in rows
    ]  # fmt: skip


def test_sizes_of_a_plain_split() -> None:
    examples = numbered(["a", "b", "c", "d"] * 250)
    train, held_out = split_examples(examples, 0.1, 42)
    assert (len(train), len(held_out)) == (900, 100)
    assert held_out.targets is not None
    assert np.bincount(dense(held_out.targets)).tolist() == [25, 25, 25, 25]
    assert rows_in(held_out) != rows_in(split_examples(examples, 0.1, 43)[1])


def test_combinations_and_amounts_are_stratified() -> None:
    combinations = [["x"], ["y"], ["x", "y"], []] * 50
    held_out = split_examples(numbered(combinations), 0.2, 1)[1]
    assert held_out.targets is not None
    assert dense(held_out.targets).sum(axis=0).tolist() == [20, 20]
    held_out = split_examples(numbered([float(i) + 0.5 for i in range(200)]), 0.1, 1)[1]
    assert held_out.targets is not None
    assert (dense(held_out.targets) // 20).astype(int).tolist() == [i for i in range(10) for _ in range(2)]


def test_two_columns_of_amounts_are_split_plainly() -> None:
    columns = {"joy": [i / 7 for i in range(20)], "fear": [i / 3 for i in range(20)]}
    examples = examples_of(text=[f"text {i}" for i in range(20)], labels="joy,fear", **columns)
    assert [len(part) for part in split_examples(examples, 0.25, 1)] == [15, 5]


def test_rows_without_labels_are_split_plainly() -> None:
    examples = examples_of(text=[f"text {i}" for i in range(10)], labels=None)
    assert [len(part) for part in split_examples(examples, 0.3, 1)] == [7, 3]


def test_no_share_holds_nothing_out() -> None:
    examples = numbered(["a", "b"])
    train, held_out = split_examples(examples, 0, 42)
    assert (train, len(held_out)) == (examples, 0)


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", "c", "d"]])
def test_too_few_rows_to_split(labels: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        split_examples(numbered(labels), 0.5, 42)
    said = f"rows.csv: {len(labels)} rows are too few to hold out 0.5 of them: every class has one row"
    assert str(caught.value) == said
    hint = "is --label-column the right one? otherwise give other rows by --eval-data, or --eval-split 0"
    assert caught.value.hint == hint


def test_equal_texts_stay_together() -> None:
    """No text is trained on and evaluated on, whatever its labels are."""
    texts = [f"text {i % 30}" for i in range(100)]
    examples = examples_of(text=texts, label=["a", "b", "c", "a"] * 25)
    train, held_out = split_examples(examples, 0.2, 42)
    assert not {texts[row] for row in rows_in(train)} & {texts[row] for row in rows_in(held_out)}
    assert (len(train) + len(held_out), 15 < len(held_out) < 25) == (100, True)


def test_a_small_share_of_few_rows_is_one_row() -> None:
    assert len(split_examples(numbered(["a", "a", "b"]), 0.01, 42)[1]) == 1


# Describing


def test_description_of_classes() -> None:
    train = examples_of(text=["a", "bb", "a", "ccc", "a"], label=["x", "y", "y", "x", "x"])
    evaluation = examples_of(text=["a", "d", "a"], label=["y", "x", "y"])
    report = describe(train, evaluation, 7)
    assert report == {
        "rows": 5,
        "eval_rows": 3,
        "empty_rows": 7,
        "unlabelled_rows": 0,
        "labels": {"x": 3, "y": 2},
        "eval_labels": {"x": 1, "y": 2},
        "duplicate_texts": 2,
        "eval_texts_in_train": 2,
        "characters": {"min": 1, "p50": 1, "p90": 3, "p99": 3, "max": 3},
    }
    assert json.loads(json.dumps(report)) == report


def test_description_of_pairs_looks_at_both_texts() -> None:
    train = examples_of(text=["a", "a", "a"], other=["x", "y", "x"], label=[0, 1, 1], pair="other")
    evaluation = examples_of(text=["a", "a"], other=["y", "z"], label=[0, 1], pair="other")
    report = describe(train, evaluation)
    assert (report["duplicate_texts"], report["eval_texts_in_train"], report["empty_rows"]) == (1, 1, 0)
    assert report["characters"]["max"] == 2


def test_description_of_several_labels_and_amounts() -> None:
    assert describe(numbered([["x", "y"], ["x"], []]), None)["labels"] == {"x": 2, "y": 1}
    report = describe(numbered([0.5, 2.5]), None)
    assert report["target"] == {"label": {"min": 0.5, "mean": 1.5, "max": 2.5}}
    assert (report["eval_rows"], report["eval_texts_in_train"]) == (None, None)


def test_description_without_labels_or_evaluation_rows() -> None:
    examples = examples_of(text=["a", "é👍"], labels=None)
    report = describe(examples, examples.filter(np.zeros(2, np.bool_)))
    assert "labels" not in report
    assert (report["eval_rows"], report["eval_texts_in_train"], report["characters"]["max"]) == (0, 0, 2)


def test_names_of_outputs_stand_in_the_description() -> None:
    space = LabelSpace(task="single_label", names=("NEG", "POS", "NEVER"), values={"n": 0, "p": 1, "x": 2})
    rows = rows_of(text=["a", "b"], label=["p", "p"])
    examples, _ = make_examples(rows, find_columns(rows), space)
    assert describe(examples, None)["labels"] == {"NEG": 0, "POS": 2, "NEVER": 0}
