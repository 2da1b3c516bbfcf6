"""Findings about answers: each on scores that show it, and none on a model that is good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from brimful.core.evaluation import LINEAR, Baseline, Evaluation
from brimful.core.records import LabelSpace
from brimful.core.units import number_text
from brimful.diagnosis.answers import findings_of_answers
from brimful.diagnosis.rows import RowFacts
from brimful.engine.scoring import evaluation_of
from brimful.tasks.scoring.baselines import constant_baseline
from brimful.tasks.scoring.choose import make_scorer

NAMES = ("bad", "fair", "good")


def record(task: Any, logits: Any, targets: Any, names: tuple[str, ...] = NAMES) -> Evaluation:
    space = LabelSpace(task=task, names=names)
    scorer = make_scorer(space, targets, seed=0, resamples=200)
    scorer.add(np.arange(len(logits)), np.asarray(logits, np.float32))
    return evaluation_of(
        scorer.result(),
        model="m",
        data="d",
        command="c",
        labels=space,
        baselines=(constant_baseline(space, targets, targets),),
    )


DRAW = np.random.default_rng(0)
CLASSES = DRAW.integers(0, 3, 300)
GOOD = 6 * np.eye(3)[CLASSES] + DRAW.normal(size=(300, 3))


def test_a_good_model_has_no_findings() -> None:
    assert record("single_label", GOOD, CLASSES).findings == ()


@pytest.mark.parametrize(("number", "said"), [(1, "only 1 row was evaluated: "), (2, "only 2 rows were evaluated: ")])
def test_few_rows(number: int, said: str) -> None:
    assert record("single_label", GOOD[:number], CLASSES[:number]).findings[-1].startswith(said)


def test_one_label_only() -> None:
    found = record("single_label", np.tile([3.0, 0, 0], (300, 1)), CLASSES).findings
    assert found[0].startswith("every row is predicted to be 'bad'")


def test_no_better_than_the_most_frequent_label() -> None:
    skewed = np.where(np.arange(300) < 240, 0, CLASSES)
    found = record("single_label", DRAW.normal(size=(300, 3)), skewed).findings
    assert found[0].startswith("no better than always answering 'bad': accuracy ")


def test_the_model_stands_before_the_linear_one_it_does_not_beat() -> None:
    model = record("single_label", np.where(np.arange(300)[:, None] < 60, GOOD[:, ::-1], GOOD), CLASSES)
    accuracy = model.metrics["accuracy"]
    assert accuracy.value is not None
    assert accuracy.high is not None
    for other, said in (
        (
            (accuracy.value + accuracy.high) / 2,
            "no better than TF-IDF with a linear model: accuracy {mine} against {its},",
        ),
        (1.0, "TF-IDF with a linear model is better: accuracy {its} against {mine};"),
    ):
        linear = Baseline(name=LINEAR, num_rows=300, metrics={"accuracy": other})
        found = findings_of_answers(replace(model, baselines=(linear,)))
        wanted = said.format(mine=number_text(accuracy.value), its=number_text(other))
        assert any(finding.startswith(wanted) and "try a higher --learning-rate" in finding for finding in found), found
        of_learned = " ".join(findings_of_answers(replace(model, baselines=(linear,)), course="learned"))
        assert wanted in of_learned
        assert "more epochs will hardly help" in of_learned


def test_the_linear_model_that_reads_more_of_the_rows_is_said_to() -> None:
    model = record("single_label", np.where(np.arange(300)[:, None] < 60, GOOD[:, ::-1], GOOD), CLASSES)
    facts = RowFacts(cut_share=0.212, max_length=64, max_positions=512)

    def said(rows: RowFacts | None, read: int | None = None, **given: Any) -> str:
        linear = Baseline(name=LINEAR, num_rows=300, metrics={"accuracy": 1.0}, most_characters=read)
        found = findings_of_answers(replace(model, baselines=(linear,)), rows=rows, **given)
        return next(finding for finding in found if "linear model" in finding)

    cut = "21.2 % of the training rows are cut at 64 tokens, which the linear model reads whole"
    assert said(facts).endswith(f"; {cut}: try a longer --max-length, a higher --learning-rate or more epochs")
    of_learned = said(facts, course="learned")
    assert of_learned.endswith(f"will hardly help, but {cut}: try a longer --max-length")
    assert "words alone" not in of_learned
    assert said(facts, course="diverged").endswith(f"; try a lower --learning-rate, and a longer --max-length: {cut}")
    assert "try a model with more positions" in said(replace(facts, max_positions=64))
    assert "cut at 64 tokens, the linear model at 4,000 characters: try" in said(facts, 4000)
    as_of_whole_rows = said(None)
    for rows, read in ((replace(facts, cut_share=0.01), None), (facts, 200)):
        assert said(rows, read) == as_of_whole_rows


@pytest.mark.parametrize(
    ("number", "of", "said"),
    [
        (2100, 10_000, "2,100 of 10,000 evaluation rows have the text of a training row (21.0 %), so scores are"),
        (
            1,
            40,
            "1 of 40 evaluation rows has the text of a training row (2.5 %), so scores are too high: remove it from",
        ),
        (1, 4000, None),
        (0, 0, None),
    ],
)
def test_evaluation_rows_that_are_trained_on_come_first(number: int, of: int, said: str | None) -> None:
    poor = record("single_label", np.tile([3.0, 0, 0], (300, 1)), CLASSES)
    found = findings_of_answers(poor, rows=RowFacts(num_trained_on=number, num_evaluated=of))
    if said is None:
        assert found == list(poor.findings)
    else:
        assert found[0].startswith(said)
        assert found[1:] == list(poor.findings)


def test_labels_that_are_told_apart_though_accuracy_is_no_higher() -> None:
    rare = (np.arange(600) < 30).astype(np.int64)
    answers = rare | ((np.arange(600) >= 30) & (np.arange(600) < 70)).astype(np.int64)
    found = record("single_label", 3 * np.eye(2)[answers], rare, ("no", "yes")).findings
    assert "though labels are told apart" in found[0]
    assert "balanced accuracy" in found[0]


def test_labels_that_are_missing() -> None:
    never = GOOD.copy()
    never[:, 2] = -9
    assert any("never predicted: 'good'" in said for said in record("single_label", never, CLASSES).findings)
    absent = record("single_label", GOOD[CLASSES < 2], CLASSES[CLASSES < 2])
    assert any("no evaluated row has the label 'good'" in said for said in absent.findings)


def test_no_label_above_the_threshold() -> None:
    targets = (DRAW.random((300, 3)) < 0.1).astype(np.float32)
    found = record("multi_label", np.full((300, 3), -2.0), targets).findings
    share = f"{1 - targets.mean():.4f}"
    assert found[0] == f"no label reached 0.5 in any row: answering nothing scores a label accuracy of {share} too"


def test_numbers_far_from_their_targets() -> None:
    targets = DRAW.normal(193, 50, (300, 1)).astype(np.float32)
    found = record("regression", DRAW.normal(size=(300, 1)), targets, ("length",)).findings
    assert "targets average 19" in found[0]
    assert "rescale the targets" in found[0]
    flat = record("regression", np.full((300, 1), targets.mean()) + DRAW.normal(size=(300, 1)), targets, ("length",))
    assert flat.findings[0].startswith("no better than always answering the mean (19")


def test_confidences_that_are_off() -> None:
    unsure = record("single_label", GOOD / 20, CLASSES).findings
    assert unsure[0].startswith("confidences are too low")


def test_a_threshold_that_is_better() -> None:
    """Labels are told apart well, and all probabilities are below a half; chance alone names no threshold."""
    draw = np.random.default_rng(3)
    targets = (draw.random((300, 3)) < 0.2).astype(np.float32)
    apart = np.where(targets > 0, -1.0, -3.0) + draw.normal(0, 0.2, (300, 3))
    found = record("multi_label", apart, targets).findings
    said = [finding for finding in found if finding.startswith("another threshold is better: F1 of all labels ")]
    assert len(said) == 1
    threshold = float(said[0].partition("--threshold ")[2].split(",")[0])
    given = 1 / (1 + np.exp(-apart)) >= threshold
    f1 = 2 * (given * targets).sum() / (given.sum() + targets.sum())
    assert float(said[0].split("labels ")[1].split()[0]) == pytest.approx(f1, abs=0.02)
    by_chance = record("multi_label", draw.normal(-2, 1, (300, 3)), targets).findings
    assert not any("another threshold" in finding for finding in by_chance)
