"""Targets that keep only the labels that rows have, beside arrays of 0 and 1."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import Columns
from brimful.data.labels.examples import make_examples
from brimful.data.readers.rows import Rows
from brimful.engine.evaluation.truth import Truth, read_truth
from brimful.engine.scoring import truth_column
from brimful.tasks.label_rows import LabelRows, dense, label_counts, row_blocks, taken
from brimful.tasks.scoring.baselines import constant_baseline

Flags = npt.NDArray[np.uint8]
flags = hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 6)), elements=st.integers(0, 1))
C = 1000
SPACE = LabelSpace(
    task="multi_label", names=tuple(f"L{i}" for i in range(C)), values={f"L{i}": i for i in range(C)}
)  # fmt: skip


def rows_of(given: Flags) -> LabelRows:
    return LabelRows.of_blocks([given], given.shape[1])


@given(flags, st.data())
def test_all_is_as_arrays_have_it(expected: Flags, data: st.DataObject) -> None:
    found = rows_of(expected)
    assert (found.shape, len(found), found.dtype) == (expected.shape, len(expected), np.uint8)
    assert dense(found).tolist() == expected.tolist()
    some = np.array(data.draw(st.lists(st.integers(-len(expected), len(expected) - 1))), np.int64)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected))))
    for rows in (some, mask, slice(1, 4), slice(None)):
        assert found[rows].tolist() == expected[rows].tolist()
        assert dense(taken(found, rows)).tolist() == expected[rows].tolist()
    for row in (0, len(expected) - 1, -1, -len(expected)):
        assert found[row].tolist() == expected[row].tolist()
    for wrong in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            found[wrong]
        with pytest.raises(IndexError):
            found.take([0, wrong])
    weights = np.linspace(0.5, 2, len(expected))
    np.testing.assert_allclose(label_counts(found, weights), weights @ expected)
    assert found.counts().tolist() == expected.sum(0).tolist()
    assert [rows.tolist() for rows in found.having()] == [np.flatnonzero(each).tolist() for each in expected.T]
    assert dense(found.with_empty_row()).tolist() == [*expected.tolist(), [0] * expected.shape[1]]
    owners, labels = np.nonzero(expected)
    doubled = LabelRows.of_pairs(np.tile(owners[::-1], 2), np.tile(labels[::-1], 2), found.shape)
    assert doubled.labels_E.tolist() == found.labels_E.tolist()
    assert doubled.offsets_N1.tolist() == found.offsets_N1.tolist()
    outputs = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=found.num_labels, max_size=found.num_labels)))
    renamed = np.zeros((len(expected), 4), np.uint8)
    for label, output in enumerate(outputs):
        if output >= 0:
            renamed[:, output] |= expected[:, label]
    assert dense(found.renamed(outputs, 4)).tolist() == renamed.tolist()


def test_blocks_are_put_behind_one_another() -> None:
    parts = [np.eye(3, dtype=np.uint8), np.zeros((2, 3), np.uint8), np.ones((1, 3), np.uint8)]
    assert dense(LabelRows.of_blocks(parts, 3)).tolist() == np.concatenate(parts).tolist()
    assert LabelRows.of_blocks([], 3).shape == (0, 3)
    assert [len(range(9000)[part]) for part in row_blocks(9000, C)] == [4194, 4194, 612]


# Memory: rows of a thousand labels each


def labelled(num_rows: int, kind: str) -> Rows:
    drawn = np.random.default_rng(0).integers(0, C, (num_rows, 3)).tolist()
    several = [sorted({f"L{i}" for i in each}) for each in drawn]
    column = pa.array(several if kind == "lists" else map("|".join, several))
    kind_of = pa.large_list(pa.large_string()) if kind == "lists" else pa.large_string()
    texts = pa.array(["text"] * num_rows, pa.large_string())
    table = pa.table({"text": pa.chunked_array([texts]), "label": pa.chunked_array([column.cast(kind_of)])})
    return Rows(table=table, name="rows.csv", files=("rows.csv",), starts=(0,))


def peak(run: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def truth_of(rows: Rows) -> Truth:
    there = np.ones(rows.num_rows, np.bool_)
    return read_truth(rows, ("label",), SPACE, EvaluateOptions(model="m", data="d"), there)


def constant(targets: LabelRows) -> None:
    constant_baseline(SPACE, targets, targets)


def written(targets: LabelRows) -> None:
    truth_column(SPACE, taken(targets, np.arange(len(targets))))


def trained_on(rows: Rows) -> None:
    make_examples(rows, Columns(text="text", pair=None, labels=("label",), reasons={}), SPACE)


def grown(run: Callable[[Any], Any], few: Any, many: Any) -> int:
    run(few)  # so that what is loaded once is not measured
    return peak(lambda: run(many)) - peak(lambda: run(few))


@pytest.mark.parametrize("kind", ["texts", "lists"])
@pytest.mark.parametrize("run", [truth_of, trained_on])
@pytest.mark.sampled
def test_a_row_of_a_thousand_labels_takes_what_its_own_take(run: Callable[[Rows], Any], kind: str) -> None:
    """An array of bytes would have a thousand for each row."""
    assert grown(run, labelled(4500, kind), labelled(13500, kind)) < 9000 * 250


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("run", [constant, written])
def test_what_reads_targets_makes_no_array_of_all(run: Callable[[LabelRows], None]) -> None:
    few, many = (truth_of(labelled(count, "lists")).targets_N for count in (4500, 9000))
    assert grown(run, few, many) < 4500 * 250


@pytest.mark.parametrize("kind", ["texts", "lists"])
def test_targets_of_a_thousand_labels(kind: str) -> None:
    rows = labelled(50, kind)
    expected = np.zeros((50, C), np.uint8)
    for number, labels in enumerate(rows.table["label"].to_pylist()):
        expected[number, [int(name[1:]) for name in (labels if kind == "lists" else labels.split("|"))]] = 1
    assert dense(truth_of(rows).targets_N).tolist() == expected.tolist()
