"""The fast path against the plain model: differences, near-ties, flips, and rows that only one has an answer for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.classification import AnswerEquivalence
from brimful.core.tolerances import TOLERANCES
from brimful.tasks.answer_equivalence import compare_answers
from brimful.tasks.answers import AnswerForm, answer_form
from brimful.tasks.candidates import Candidates
from brimful.tasks.zero_shot import zero_shot_form


def form_of(problem_type: str | None = None, num_labels: int = 3, **asked: Any) -> AnswerForm:
    names = {i: f"label {i}" for i in range(num_labels)}
    return answer_form(SimpleNamespace(id2label=names, num_labels=num_labels, problem_type=problem_type), **asked)


def logits_of(probabilities: Any) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float32))


def equivalence(form: AnswerForm, fast: np.ndarray, plain: np.ndarray, precision: str = "bf16") -> AnswerEquivalence:
    return compare_answers(form, form.score_blocks(fast), form.score_blocks(plain), precision=precision)


PLAIN = logits_of([[0.8, 0.1, 0.1], [0.41, 0.39, 0.2], [0.2, 0.2, 0.6]])


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("problem_type", [None, "multi_label_classification", "regression"])
def test_equal_logits_agree(precision: str, problem_type: str | None) -> None:
    found = equivalence(form_of(problem_type), PLAIN, PLAIN, precision)
    assert (found.agreement, found.largest_difference, found.num_flips, found.passed) == (1.0, 0.0, 0, True)
    assert (found.num_rows, found.precision, found.tolerance) == (3, precision, TOLERANCES[precision].answers)


def test_a_flip_of_a_near_tie_is_explained() -> None:
    found = equivalence(form_of(), logits_of([[0.81, 0.1, 0.09], [0.39, 0.41, 0.2], [0.2, 0.2, 0.6]]), PLAIN)
    assert found.largest_difference == pytest.approx(0.02, abs=1e-6)
    assert (found.num_near_ties, found.num_flips, found.num_unexplained, found.passed) == (1, 1, 0, True)
    assert found.agreement == pytest.approx(2 / 3)


def test_a_flip_to_a_label_that_was_far_off_is_not_explained() -> None:
    found = equivalence(form_of(), logits_of([[0.8, 0.1, 0.1], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]), PLAIN)
    assert (found.num_near_ties, found.num_flips, found.num_unexplained, found.passed) == (1, 1, 1, False)


def test_a_difference_beyond_the_tolerance_fails_without_a_flip() -> None:
    fast = logits_of([[0.7, 0.2, 0.1], [0.41, 0.39, 0.2], [0.2, 0.2, 0.6]])
    assert not (found := equivalence(form_of(), fast, PLAIN)).passed
    assert (found.num_flips, found.largest_difference) == (0, pytest.approx(0.1, abs=1e-6))


def test_several_labels_turn_at_the_threshold() -> None:
    plain = np.array([[2, -2, 0.05], [2, -2, -2]], dtype=np.float32)
    fast = np.array([[2, -2, -0.05], [2, -2, -2]], dtype=np.float32)
    found = equivalence(form_of("multi_label_classification"), fast, plain)
    assert (found.num_near_ties, found.num_flips, found.num_unexplained, found.passed) == (1, 1, 0, True)
    found = equivalence(form_of("multi_label_classification", threshold=0.87), fast, plain)
    assert (found.num_near_ties, found.num_flips) == (2, 0)


def test_one_label_may_fall_below_the_threshold() -> None:
    fast = logits_of([[0.79, 0.11, 0.1], [0.41, 0.39, 0.2], [0.2, 0.2, 0.6]])
    found = equivalence(form_of(threshold=0.795), fast, PLAIN)
    assert (found.num_near_ties, found.num_flips, found.num_unexplained, found.passed) == (1, 1, 0, True)


def test_one_output_that_is_always_scored_never_flips() -> None:
    plain = np.array([[0.01], [3]], dtype=np.float32)
    found = equivalence(form_of(num_labels=1), -plain, plain)
    assert (found.num_near_ties, found.num_flips, found.passed) == (0, 0, False)


@pytest.mark.parametrize(
    ("off", "passed"),
    [([0.031, 0.0], True), ([0.0, 5e-4], True), ([0.25, 0.0], False), ([0.0, 0.05], False)],
    ids=["one step of fp32", "what is left of terms that large", "several steps", "more than that"],
)
def test_fp32_is_not_held_to_less_than_it_rounds(off: list[float], passed: bool) -> None:
    """Two outputs of one layer, of which one is large and varies little."""
    rows = np.arange(40.0)[:, None]
    plain = np.concatenate([355_000 + 2 * rows, rows / 10], axis=1).astype(np.float32)
    fast = (plain + np.array(off)).astype(np.float32)
    assert equivalence(form_of("regression", 2), fast, plain, "fp32").passed == passed


def test_a_small_output_beside_a_large_one_may_not_be_wrong() -> None:
    draw = np.random.default_rng(0)
    plain = np.stack([draw.uniform(0, 2e7, 60), draw.uniform(0, 1, 60)], axis=1).astype(np.float32)
    fast = plain + np.array([0.0, 1.0], dtype=np.float32) * draw.uniform(-0.05, 0.05, (60, 1)).astype(np.float32)
    assert not equivalence(form_of("regression", 2), fast, plain, "fp32").passed


def test_numbers_are_compared_in_units_of_their_size() -> None:
    plain = np.array([[1000, 0], [-1000, 0]], dtype=np.float32)
    found = equivalence(form_of("regression", 2), plain + np.array([1, 0.01], dtype=np.float32), plain)
    assert found.largest_difference == pytest.approx(0.01)
    assert (found.num_flips, found.agreement, found.passed) == (0, 1.0, True)
    assert not equivalence(form_of("regression", 2), plain * 1.1, plain).passed


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification", "regression"])
@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_an_answer_that_only_one_has_is_an_unexplained_flip(problem_type: str | None, lost: float) -> None:
    damaged = PLAIN.copy()
    damaged[1, 0] = lost
    for fast, plain in ((damaged, PLAIN), (PLAIN, damaged)):
        found = equivalence(form_of(problem_type), fast, plain)
        assert (found.num_rows, found.num_flips, found.num_unexplained) == (3, 1, 1)
        assert (found.largest_difference, found.passed) == (1.0, False)
    found = equivalence(form_of(problem_type), damaged, damaged)
    assert (found.num_rows, found.passed) == (2, True)


def test_no_rows_at_all() -> None:
    found = equivalence(form_of(), PLAIN[:0], PLAIN[:0])
    assert (found.num_rows, found.agreement, found.passed) == (0, 1.0, True)


def test_zero_shot_rows_with_labels_of_their_own() -> None:
    config = SimpleNamespace(label2id={"contradiction": 0, "entailment": 1}, num_labels=2)
    candidates = Candidates.from_column(pa.array(["a,b", "a", None, "a,b,c", "c,b"]))
    plain = np.zeros((8, 2), dtype=np.float32)
    plain[:, 1] = [2, 0, 1, 0, 3, 0, 0.01, 0]
    fast = plain.copy()
    fast[6:, 1] = [0, 0.01]
    form = zero_shot_form(config)
    blocks = [form.score_blocks(logits, candidates) for logits in (fast, plain)]
    found = compare_answers(form, *blocks, precision="bf16")
    assert (found.num_rows, found.num_flips, found.num_unexplained, found.passed) == (4, 1, 0, True)
    fast[4] = np.nan
    found = compare_answers(form, form.score_blocks(fast, candidates), blocks[1], precision="bf16")
    assert (found.num_rows, found.num_flips, found.num_unexplained, found.passed) == (4, 2, 1, False)


@given(
    rows=st.lists(st.tuples(*[st.floats(-8, 8, width=32)] * 3), min_size=1, max_size=8),
    noise=st.floats(0, 0.5),
    problem_type=st.sampled_from([None, "multi_label_classification"]),
    threshold=st.none() | st.floats(0.05, 0.95),
)
def test_a_flip_needs_a_margin_that_the_differences_can_cross(
    rows: list[tuple[float, ...]], noise: float, problem_type: str | None, threshold: float | None
) -> None:
    plain = np.array(rows, dtype=np.float32)
    fast = plain + np.float32(noise) * np.random.default_rng(0).normal(size=plain.shape).astype(np.float32)
    found = equivalence(form_of(problem_type, threshold=threshold), fast, plain)
    assert found.num_unexplained <= found.num_flips <= found.num_rows
    if found.largest_difference <= found.tolerance / 2:  # two labels, each half a tolerance towards the other
        assert found.num_unexplained == 0
        assert found.passed
