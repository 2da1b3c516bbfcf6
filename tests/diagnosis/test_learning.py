"""Findings about a training from its losses alone."""

from __future__ import annotations

import numpy as np
import pytest

from brimful.core.records import LabelSpace
from brimful.diagnosis.learning import chance_loss, course_of, findings_of_learning, has_learned


def curve(values: list[float]) -> list[tuple[int, float]]:
    return [(10 * (i + 1), value) for i, value in enumerate(values)]


FALLING = [5.0 - 0.08 * i for i in range(30)]
LEVEL = [5 * 0.7**i + 0.2 for i in range(30)]


@pytest.mark.parametrize(
    ("training", "evaluation", "said"),
    [
        (FALLING, [], "the loss was still falling"),
        (FALLING, [4.9, 3.9, 3.0], "the loss was still falling"),
        (FALLING, [3.0, 2.99, 2.99], None),  # on other rows it stopped
        (LEVEL, [0.5, 0.3, 0.29], None),
        (LEVEL, [0.5, 0.4, 0.7], "overfitted: the evaluation loss was 0.4 after step 20 and 0.7 after step 30"),
        (FALLING[:4], [], None),  # too few to say
        (
            [1.63, 1.6, 1.57],
            [1.59, 1.571, 1.563],
            "the evaluation loss was still falling when training ended",
        ),
        ([], [0.9, 0.7], "the evaluation loss was still falling when training ended (0.9, then 0.7)"),
        ([1.6], [0.5, 0.46], None),  # learned already
        ([1.6, 1.0], [1.2, 0.7, 0.69], None),  # level at the end
        ([1.6], [1.59, 1.589, 1.588], None),  # it never fell
        ([1.6], [1.59, 1.5, 1.51], None),
        ([], [], None),
    ],
)
def test_findings_of_losses(training: list[float], evaluation: list[float], said: str | None) -> None:
    found = findings_of_learning(curve(training), curve(evaluation), picks_best=False)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_a_run_that_keeps_its_best_model_is_not_overfitted() -> None:
    assert findings_of_learning(curve(LEVEL), curve([0.5, 0.4, 0.7]), picks_best=True) == []


def test_noise_is_not_a_fall() -> None:
    noisy = (0.69 + np.random.default_rng(0).normal(0, 0.02, 60)).tolist()
    assert findings_of_learning(curve(noisy), [], picks_best=False) == []


@pytest.mark.parametrize(
    ("training", "rate", "course"),
    [
        ([600.0, 58.0, 324.0, 90.0, 58.0, 60.0], None, "diverged"),
        ([1.3, 1.2, 1.1, 1.15, 1.12, 1.11], 0.05, "diverged"),  # no better than chance
        ([1.3, 1.2, 1.1, 1.15, 1.12, 1.11], 5e-5, "open"),  # it may be too low
        ([1.3, 1.2, 1.1, 0.6, 0.3, 0.2], 0.05, "open"),
        ([1.9], None, "open"),  # a first step
        ([1.09], 0.05, "open"),
        ([1.2, 1.1, 1.1, 1.0, 1.0, 1.0, 0.9, 0.9, 9.0], None, "open"),  # one of rows that are far off
        ([4.0], None, "diverged"),
        ([], 0.05, "open"),
        (LEVEL, 5e-5, "learned"),
    ],
)
def test_what_a_training_came_to(training: list[float], rate: float | None, course: str) -> None:
    """Of three labels."""
    chance = chance_loss(LabelSpace(task="single_label", names=("a", "b", "c")), scaled=False, weighted=True)
    assert course_of(curve(training), chance, rate) == course
    found = findings_of_learning(curve(training), [], picks_best=False, chance=chance, rate=rate)
    assert any("try a lower --learning-rate" in said for said in found) == (course == "diverged")


def test_numbers_without_a_scale_have_no_loss_of_chance() -> None:
    price, several = LabelSpace(task="regression", names=("price",)), LabelSpace(task="multi_label", names=("a", "b"))
    assert chance_loss(price, scaled=False, weighted=False) is None
    assert chance_loss(price, scaled=True, weighted=False) == 1.0
    assert chance_loss(several, scaled=False, weighted=True) is None
    assert chance_loss(several, scaled=False, weighted=False) == pytest.approx(0.693, abs=1e-3)
    assert course_of(curve([1e9] * 9), None, 1.0) == "open"


def test_training_rows_that_are_learned() -> None:
    assert has_learned(curve(LEVEL))
    assert not has_learned(curve(FALLING))
    assert not has_learned(curve(LEVEL[:4]))
    assert not has_learned([])
