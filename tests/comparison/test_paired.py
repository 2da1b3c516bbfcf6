"""Differences on the same rows, beside scikit-learn, scipy and a bootstrap written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import f1_score
from sklearn.preprocessing import MultiLabelBinarizer

from brimful.comparison.answers import Answers, Common, in_common
from brimful.comparison.paired import compare_answers, mcnemar
from brimful.core.comparison import Paired

NAMES = np.array(["a", "b", "c", "d"])


def common(truths: Any, first: Any, other: Any) -> Common:
    return Common(truths=tuple(truths), first=tuple(first), other=tuple(other), differing=0)


def singles(number: int, seed: int = 0, wrong: float = 0.3) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    truth = NAMES[draw.integers(0, 4, number)]
    first = np.where(draw.random(number) < wrong, NAMES[draw.integers(0, 3, number)], truth)
    other = np.where(draw.random(number) < wrong / 2, NAMES[draw.integers(0, 4, number)], truth)
    return truth, first, other


def compared(rows: Common, task: Any, seed: int = 0) -> Paired:
    found = compare_answers(rows, task, first=0, other=1, seed=seed)
    assert found is not None
    return found


def test_differences_are_those_of_scikit_learn() -> None:
    truth, first, other = singles(300)
    found = compared(common(truth.tolist(), first.tolist(), other.tolist()), "single_label")
    by_name = {each.name: each.difference for each in found.metrics}
    assert found.num_rows == 300
    assert by_name["accuracy"] == pytest.approx(np.mean(other == truth) - np.mean(first == truth))
    macro = [f1_score(truth, given, average="macro") for given in (first, other)]
    assert by_name["f1_macro"] == pytest.approx(macro[1] - macro[0])


def test_several_labels_are_compared_as_sets_and_one_by_one() -> None:
    draw = np.random.default_rng(1)
    rows = [[tuple(NAMES[draw.random(4) < 0.5].tolist()) for _ in range(200)] for _ in range(3)]
    truth, first, other = rows
    found = compared(common(*rows), "multi_label")
    by_name = {each.name: each.difference for each in found.metrics}
    binary = MultiLabelBinarizer(classes=NAMES.tolist())
    flags = [binary.fit_transform(each) for each in rows]
    micro, macro = (
        [f1_score(flags[0], given, average=average) for given in flags[1:]] for average in ("micro", "macro")
    )
    assert by_name["f1_micro"] == pytest.approx(micro[1] - micro[0])
    assert by_name["f1_macro"] == pytest.approx(macro[1] - macro[0])
    exact = [np.mean([given == want for given, want in zip(each, truth, strict=True)]) for each in (first, other)]
    assert by_name["accuracy"] == pytest.approx(exact[1] - exact[0])


def test_rows_are_drawn_for_both_models_together() -> None:
    """As a bootstrap of whole rows written out: drawn apart, the interval would be four times as wide."""
    truth, first, _ = singles(400, wrong=0.5)
    other = first.copy()
    other[:12] = truth[:12]  # all else is equal, mistakes too
    found = compared(common(truth.tolist(), first.tolist(), other.tolist()), "single_label")
    (accuracy,) = [each for each in found.metrics if each.name == "accuracy"]
    right = (other == truth).astype(float) - (first == truth)
    draws = np.random.default_rng(9).integers(0, 400, (4000, 400))
    low, high = np.quantile(right[draws].mean(1), (0.025, 0.975))
    assert (accuracy.low, accuracy.high) == (pytest.approx(low, abs=0.004), pytest.approx(high, abs=0.004))
    assert accuracy.low is not None
    assert accuracy.high is not None
    assert accuracy.high - accuracy.low < 0.04


def test_the_same_answers_differ_in_nothing_and_repeat_by_seed() -> None:
    truth, first, other = singles(50)
    same = compared(common(truth, first, first), "single_label")
    assert [(m.difference, m.low, m.high, m.is_clear) for m in same.metrics] == [(0.0, 0.0, 0.0, False)] * 2
    assert (same.only_first, same.only_other, same.p_value) == (0, 0, 1.0)
    rows = common(truth, first, other)
    assert compared(rows, "single_label", seed=3) == compared(rows, "single_label", seed=3)
    assert compared(rows, "single_label", seed=3).metrics != compared(rows, "single_label", seed=4).metrics


@pytest.mark.parametrize(("first", "other"), [(0, 0), (1, 0), (7, 0), (5, 9), (10, 10), (400, 460), (0, 3000)])
def test_mcnemar_is_the_exact_binomial_test(first: int, other: int) -> None:
    expected = binomtest(first, first + other).pvalue if first + other else 1.0
    assert mcnemar(first, other) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_discordant_rows_are_counted_for_the_right_model() -> None:
    found = compared(common("aabb", "aaba", "abbb"), "single_label")
    assert (found.only_first, found.only_other) == (1, 1)
    found = compared(common("aabb", "aabb", "abbb"), "single_label")
    assert (found.only_first, found.only_other) == (1, 0)
    assert found.metrics[0].difference == pytest.approx(-0.25)


def test_numbers_are_compared_by_their_errors() -> None:
    draw = np.random.default_rng(2)
    truth = draw.normal(size=200)
    first, other = truth + draw.normal(size=200), truth + 0.1 * draw.normal(size=200)
    gaps: list[float | None] = other.tolist()
    gaps[0] = None  # a row without an answer counts for neither
    found = compared(common(truth.tolist(), first.tolist(), gaps), "regression")
    assert (found.num_rows, found.p_value) == (199, None)
    rmse, mae = found.metrics
    errors = [each[1:] - truth[1:] for each in (first, other)]
    assert rmse.difference == pytest.approx(np.sqrt(np.mean(errors[1] ** 2)) - np.sqrt(np.mean(errors[0] ** 2)))
    assert mae.difference == pytest.approx(np.abs(errors[1]).mean() - np.abs(errors[0]).mean())
    assert rmse.is_clear
    several = [tuple(row) for row in np.stack([truth, truth], axis=1).tolist()]
    assert compared(common(several, several, several), "regression").metrics[0].difference == 0.0


def test_an_answer_that_is_missing_is_wrong() -> None:
    found = compared(common("ab", ("a", None), "ab"), "single_label")
    assert (found.only_first, found.only_other) == (0, 1)


def test_rows_are_matched_by_file_and_number_and_their_truth() -> None:
    def answers(*rows: tuple[str, int, str, str]) -> Answers:
        files, numbers, truths, given = zip(*rows, strict=True)
        return Answers(keys=tuple(zip(files, numbers, strict=True)), truths=truths, answers=given)

    first = answers(("x", 1, "a", "a"), ("x", 2, "b", "a"), ("y", 1, "a", "b"), ("y", 2, "c", "c"))
    other = answers(("y", 1, "a", "c"), ("x", 2, "b", "b"), ("x", 3, "a", "a"), ("y", 2, "d", "d"))
    found = in_common(first, other)
    assert (found.truths, found.first, found.other) == (("b", "a"), ("a", "b"), ("b", "c"))
    assert found.differing == 1
