"""An evaluation as text and as a page: every figure is there, and hostile names cannot break either."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from brimful.core.evaluation import Evaluation
from brimful.core.records import LabelSpace, from_json, to_json
from brimful.engine.scoring import evaluation_of
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.evaluation_text import evaluation_text, label_rows, metric_rows
from brimful.tasks.scoring.baselines import constant_baseline
from brimful.tasks.scoring.choose import make_scorer

HOSTILE = "<script>\x1b[31m"


def record(task: Any, names: tuple[str, ...] = ("bad", HOSTILE, "good"), num_rows: int = 90) -> Evaluation:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(num_rows, len(names))).astype(np.float32)
    targets: Any = draw.integers(0, len(names), num_rows)
    if task == "multi_label":
        targets = np.eye(len(names), dtype=np.float32)[targets]
    elif task == "regression":
        targets = logits + draw.normal(size=logits.shape).astype(np.float32)
    space = LabelSpace(task=task, names=names)
    scorer = make_scorer(space, targets, seed=0, resamples=50)
    scorer.add(np.arange(num_rows), logits)
    return evaluation_of(
        scorer.result(),
        model="run/model",
        data="rows.csv",
        command="brimful evaluate run/model rows.csv",
        labels=space,
        baselines=(constant_baseline(space, targets, targets),),
        left_out={"without a label": 3},
        options={"seed": 0},
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_text_and_page_show_the_record(task: str) -> None:
    names = ("stars",) if task == "regression" else ("bad", HOSTILE, "good")
    made = record(task, names)
    assert from_json(Evaluation, to_json(made)) == made
    text, page = evaluation_text(made), evaluation_page(made)
    for metric in made.metrics.values():
        assert metric.value is None or f"{metric.value:.4f}" in text
        assert metric.value is None or f"{metric.value:.4f}" in page
    assert "90 rows" in text
    assert "3 rows without a label" in page
    assert "\x1b" not in text + page
    tags = Tags()
    tags.feed(page)
    assert tags.tags.count("script") == 1  # the record
    assert {"http-equiv", "svg"} & set(page.replace("=", " ").replace("<", " ").split())
    assert evaluation_page(made) == page


def test_many_labels_list_mistakes_instead_of_a_matrix() -> None:
    many = tuple(f"label {i}" for i in range(40))
    page = evaluation_page(record("single_label", many))
    assert "The most frequent mistakes" in page
    assert "Confusion matrix" not in page
    assert "Confusion matrix" in evaluation_page(record("single_label"))
    text = evaluation_text(record("single_label", many))
    assert "and 20 more labels" in text


def test_labels_that_begin_alike_are_told_apart() -> None:
    ends = ("parcel has not arrived", "refund is late", "password is lost")
    names = tuple(f"customer support, a question of a customer: {end}" for end in ends)
    made = record("single_label", names)
    by_label = evaluation_text(made).partition("By label")[2].partition("Most confused")[0]
    assert all(by_label.count(end[-14:]) == 1 for end in ends)
    shown = [cells[0] for cells in label_rows(made)[1]]
    assert len(set(shown)) == 3
    assert max(map(len, shown)) <= 40


def test_a_page_says_how_many_labels_its_table_leaves_out() -> None:
    names = tuple(f"label {number}" for number in range(1003))
    assert "The 1,000 most frequent of 1,003 labels" in evaluation_page(record("single_label", names))


@pytest.mark.parametrize(("scale", "shown"), [(1e-6, "e-0"), (1e5, ",")])
def test_errors_of_small_and_large_targets_are_figures(scale: float, shown: str) -> None:
    made = record("regression", ("price",))
    metrics = {
        name: replace(each, **{k: v * scale for k in ("value", "low", "high") if (v := getattr(each, k)) is not None})
        for name, each in made.metrics.items()
    }
    made = replace(made, metrics=metrics, baselines=())
    for cells in metric_rows(made)[:3]:
        assert all(shown in number for number in (cells[1], *cells[2].split(" to "))), cells
    assert metric_rows(made)[1][1] in evaluation_page(made)
