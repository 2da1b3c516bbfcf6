"""Rows that a model is surest of and wrong about: found window by window, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax

from brimful.core.records import LabelSpace
from brimful.tasks.scoring.mistakes import MistakeFinder

NAMES = ("a", "b", "c")


def find(task: Any, logits: np.ndarray, targets: np.ndarray, names: tuple[str, ...] = NAMES, most: int = 5) -> Any:
    finder = MistakeFinder(LabelSpace(task=task, names=names), targets, most=most)
    for rows in np.array_split(np.random.default_rng(1).permutation(len(logits)), 4):
        finder.add(rows, logits[rows])
    return finder.result()


def test_single_labels_by_how_sure_the_wrong_answer_is() -> None:
    random = np.random.default_rng(0)
    targets = random.integers(0, 3, 200)
    logits = random.normal(0, 2, (200, 3)).astype(np.float32)
    logits[7] = np.nan
    scores = softmax(logits.astype(np.float64), axis=1)
    wrong = np.where(scores.argmax(axis=1) != targets, np.nan_to_num(scores.max(axis=1)), 0)
    found = find("single_label", logits, targets)
    assert [each.index for each in found] == np.argsort(-wrong, kind="stable")[:5].tolist()
    sure = [np.nanmean(scores[targets == label, label]) for label in range(3)]
    for each in found:
        given = int(scores[each.index].argmax())
        assert (each.truth, each.label) == (NAMES[targets[each.index]], NAMES[given])
        assert each.score == pytest.approx(scores[each.index, given])
        assert each.truth_score == pytest.approx(scores[each.index, targets[each.index]])
        assert each.mislabelled == (each.score >= sure[given])


def test_a_wrong_label_among_easy_rows_is_told_from_a_hard_row() -> None:
    targets = np.array([0] * 20 + [1] * 20)
    logits = np.zeros((40, 2), np.float32)
    logits[np.arange(40), targets] = 3.0
    logits[3] = [0.0, 4.0]  # surer than of any row of b: its label is likelier wrong
    logits[25] = [0.3, 0.0]  # hardly sure: its answer is likelier wrong
    first, second = find("single_label", logits, targets, NAMES[:2])
    assert (first.index, first.mislabelled) == (3, True)
    assert (second.index, second.mislabelled) == (25, False)


def test_several_labels_by_the_worst_one() -> None:
    targets = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0]], np.float32)
    logits = np.array([[3, -3, 4], [-3, -2, 3], [3, 3, -3]], np.float32)
    first, second = find("multi_label", logits, targets)
    assert (first.index, first.truth, first.label, first.mislabelled) == (0, "not c", "c", True)
    assert first.score == pytest.approx(expit(4))
    assert (second.index, second.truth, second.label) == (1, "b", "not b")
    assert second.truth_score == pytest.approx(expit(-2))


def test_numbers_by_their_error() -> None:
    found = find("regression", np.array([[1.0], [5.0]], np.float32), np.array([[1.5], [1.0]], np.float32), ("stars",))
    assert [(each.index, each.truth, each.label, each.score) for each in found] == [
        (1, "1", "5", None),
        (0, "1.5", "1", None),
    ]
    two = find("regression", np.zeros((1, 2), np.float32), np.array([[1.0, -3.0]], np.float32), ("x", "y"))
    assert (two[0].truth, two[0].label) == ("y -3", "y 0")


def test_nothing_is_found_where_all_is_right() -> None:
    assert find("single_label", np.eye(3, dtype=np.float32) * 5, np.arange(3)) == ()
