"""Labels of evaluated rows and outputs of a model: one that is not the model's moves none of the others."""

from __future__ import annotations

import pytest

from brimful.models.hub.label_matching import match_labels

STARS = ("1", "2", "3", "4", "5")


@pytest.mark.parametrize(
    ("labels", "names", "outputs", "unknown"),
    [
        (("0", "1", "4"), STARS, {"1": 0, "4": 3}, ("0",)),
        (("01", "2"), ("01", "1", "None"), {"01": 0}, ("2",)),
        (("-1", "1"), ("0", "1"), {"1": 1}, ("-1",)),
        (("A-", "A", "B"), ("A", "B", "C"), {"A": 0, "B": 1}, ("A-",)),
        (("Good", "good", "bad"), ("good", "bad"), {"good": 0, "bad": 1}, ("Good",)),
        (("GO", "bad"), ("Go", "go", "bad"), {"bad": 2}, ("GO",)),
    ],
)
def test_labels_that_the_model_does_not_have(
    labels: tuple[str, ...], names: tuple[str, ...], outputs: dict[str, int], unknown: tuple[str, ...]
) -> None:
    found = match_labels(labels, names, None)
    assert (found.outputs, found.unknown, found.guessed) == (outputs, unknown, False)


def test_ways_to_match() -> None:
    assert match_labels(["very_Good", "not bad"], ["not-bad", "very good"], None).outputs == {
        "very_Good": 1,
        "not bad": 0,
    }
    numbers = match_labels(["0", "LABEL_1"], ["bad", "good"], None)
    assert (numbers.outputs, numbers.guessed) == ({"0": 0, "LABEL_1": 1}, True)
    in_order = match_labels(["1", "-1", "0"], ["LABEL_0", "LABEL_1", "LABEL_2"], None)
    assert (in_order.outputs, in_order.guessed) == ({"-1": 0, "0": 1, "1": 2}, True)
    assert match_labels(["no", "good"], ["bad", "good"], "no=bad").outputs == {"no": 0, "good": 1}


def test_a_label_as_it_stands_goes_before_one_of_another_case() -> None:
    assert match_labels(["go", "BAD"], ["Go", "go", "bad"], None).outputs == {"go": 1, "BAD": 2}


def test_a_label_map_leaves_nothing_to_guess() -> None:
    found = match_labels(["0", "1"], ["pos", "neg"], "0.0=neg,1.0=pos")
    assert (found.outputs, found.unknown, found.guessed) == ({}, ("0", "1"), False)
    assert match_labels(["yes", "1"], ["pos", "neg"], "yes=pos").unknown == ("1",)
    assert match_labels(["b", "a"], ["LABEL_0", "LABEL_1"], "A=LABEL_1,B=LABEL_0").unknown == ("b", "a")
