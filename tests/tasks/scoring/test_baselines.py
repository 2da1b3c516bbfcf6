"""Baselines learn from real texts what a linear model can, within seconds, and say when they saw a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier

from brimful.core.records import LabelSpace
from brimful.data.readers.packaged import bbc_news
from brimful.tasks.scoring import baselines
from brimful.tasks.scoring.baselines import Labelled, constant_baseline, linear_baseline

ARTICLES = bbc_news()[::8]
NAMES = tuple(sorted({row["label"] for row in ARTICLES}))
CLASSES = np.array([NAMES.index(row["label"]) for row in ARTICLES])
TRAINED = np.arange(len(ARTICLES)) % 3 > 0


def space(task: Any, names: tuple[str, ...] = NAMES) -> LabelSpace:
    return LabelSpace(task=task, names=names, values={name: i for i, name in enumerate(names)})


def part(chosen: Any, targets: Any) -> Labelled:
    rows = np.flatnonzero(chosen)
    return Labelled(texts=lambda numbers: [ARTICLES[i]["text"] for i in rows[numbers]], targets_N=targets[rows])


@pytest.mark.slow
def test_one_label() -> None:
    constant = constant_baseline(space("single_label"), CLASSES[TRAINED], CLASSES[~TRAINED])
    dummy = DummyClassifier(strategy="most_frequent").fit(np.zeros((TRAINED.sum(), 1)), CLASSES[TRAINED])
    rows = np.zeros(((~TRAINED).sum(), 1))
    assert constant.metrics["accuracy"] == pytest.approx(dummy.score(rows, CLASSES[~TRAINED]))
    assert constant.answer == NAMES[int(dummy.predict(rows)[0])]
    assert constant.metrics["log_loss"] is None

    linear = linear_baseline(space("single_label"), part(TRAINED, CLASSES), part(~TRAINED, CLASSES), seed=0)
    assert linear is not None
    assert (linear.metrics["accuracy"] or 0) > 0.9
    again = linear_baseline(space("single_label"), part(TRAINED, CLASSES), part(~TRAINED, CLASSES), seed=0)
    assert again is not None
    assert again.metrics == linear.metrics


def test_several_labels() -> None:
    targets = np.eye(len(NAMES), dtype=np.float32)[CLASSES]
    targets[:, 0] = 1  # one that each row has
    constant = constant_baseline(space("multi_label"), targets[TRAINED], targets[~TRAINED])
    assert constant.answer == NAMES[0]
    linear = linear_baseline(space("multi_label"), part(TRAINED, targets), part(~TRAINED, targets), seed=0)
    assert linear is not None
    assert (linear.metrics["f1_micro"] or 0) > (constant.metrics["f1_micro"] or 0) + 0.1
    nothing = constant_baseline(space("multi_label"), targets[:0:-1] * 0, targets[~TRAINED])
    assert (nothing.answer, nothing.metrics["f1_micro"]) == ("no label", 0.0)


def test_numbers() -> None:
    targets = (CLASSES == 2).astype(np.float32) * 100
    only = space("regression", ("score",))
    constant = constant_baseline(only, targets[TRAINED], targets[~TRAINED])
    assert constant.answer == f"{targets[TRAINED].mean():.4g}"
    linear = linear_baseline(only, part(TRAINED, targets), part(~TRAINED, targets), seed=0)
    assert linear is not None
    assert (linear.metrics["r2"] or 0) > 0.3 > (constant.metrics["r2"] or 0)


def test_of_much_data_a_sample_is_seen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_MOST_ROWS", 60)
    monkeypatch.setattr(baselines, "_LONGEST", 500)
    linear = linear_baseline(space("single_label"), part(TRAINED, CLASSES), part(~TRAINED, CLASSES), seed=0)
    assert linear is not None
    assert linear.num_rows == 100
    assert linear.note == f"learned from 100 of {TRAINED.sum()} rows; read the first 500 characters of a text"
    assert linear.most_characters == 500


def test_nothing_to_learn_from_is_no_baseline() -> None:
    zeros = np.zeros(len(ARTICLES), np.int64)
    assert linear_baseline(space("single_label"), part(TRAINED, zeros), part(~TRAINED, zeros), seed=0) is None
    wordless = Labelled(texts=lambda numbers: ["!"] * len(numbers), targets_N=CLASSES)
    assert linear_baseline(space("single_label"), wordless, wordless, seed=0) is None
