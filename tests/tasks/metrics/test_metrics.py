"""Metrics of rows in parts: those of scikit-learn and scipy on all rows at once."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from brimful.core.records import LabelSpace
from brimful.tasks.evaluation import Evaluation
from brimful.tasks.metrics import confusion
from brimful.tasks.metrics.confusion import Confusion
from brimful.tasks.metrics.errors import NumberErrors
from brimful.tasks.metrics.label_counts import LabelCounts
from brimful.tasks.metrics.ranking_scores import RankingScores, log_odds
from brimful.tasks.task import make_task
from tolerances import METRIC

parts = {"num_rows": st.integers(1, 60), "cut": st.integers(1, 60), "seed": st.integers(0, 999)}


def cuts(num_rows: int, cut: int) -> list[slice]:
    return [slice(start, start + cut) for start in range(0, num_rows, cut)]


@pytest.mark.slow
@given(**parts, num_labels=st.integers(2, 5))
def test_classes_in_parts(num_rows: int, cut: int, seed: int, num_labels: int) -> None:
    random = np.random.default_rng(seed)
    true, found = (random.integers(0, num_labels, num_rows) for _ in range(2))
    counts, table = LabelCounts(num_labels), Confusion(num_labels)
    for rows in cuts(num_rows, cut):
        counts.add_classes(found[rows], true[rows])
        table.add(found[rows], true[rows])
    labels = range(num_labels)
    precision, recall, f1, _ = sklearn_metrics.precision_recall_fscore_support(
        true, found, labels=labels, zero_division=0
    )
    assert counts.precision_C == pytest.approx(precision, rel=METRIC)
    assert counts.recall_C == pytest.approx(recall, rel=METRIC)
    assert counts.f1_C == pytest.approx(f1, rel=METRIC)
    for average in ("macro", "micro", "weighted"):
        expected = sklearn_metrics.f1_score(true, found, labels=labels, average=average, zero_division=0)
        assert counts.f1(average) == pytest.approx(expected, rel=METRIC)
    assert counts.accuracy() == pytest.approx(sklearn_metrics.accuracy_score(true, found), rel=METRIC)
    assert (table.table() == sklearn_metrics.confusion_matrix(true, found, labels=labels)).all()
    if len({*true.tolist(), *found.tolist()}) > 1:
        assert counts.matthews() == pytest.approx(sklearn_metrics.matthews_corrcoef(true, found), rel=METRIC)


def test_pairs_of_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a thousand classes only the pairs that occur are counted."""
    monkeypatch.setattr(confusion, "_MERGED_AT", 100)
    random = np.random.default_rng(0)
    true, found = (random.integers(0, 2000, 1500) % 1990 for _ in range(2))
    found[:700] = true[:700]
    table = Confusion(2000)
    for rows in cuts(1500, 70):
        table.add(found[rows], true[rows])
    rows_of, columns, counts = table.cells()
    assert counts.sum() == 1500
    assert len(counts) < 1500
    expected = sklearn_metrics.confusion_matrix(true, found, labels=range(2000))
    assert (expected[rows_of, columns] == counts).all()
    assert (np.diff(rows_of * 2000 + columns) > 0).all()


@given(**parts)
def test_numbers_in_parts(num_rows: int, cut: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    targets = random.normal(1e4, 2, (num_rows, 1)).astype(np.float32)
    found = (targets + random.normal(0, 1, (num_rows, 1))).astype(np.float32)
    errors = NumberErrors(1)
    for rows in cuts(num_rows, cut):
        errors.add(found[rows], targets[rows])
    exact, truth = found.astype(np.float64)[:, 0], targets.astype(np.float64)[:, 0]
    assert errors.mean_square == pytest.approx(((exact - truth) ** 2).mean(), rel=METRIC)
    assert errors.mean_absolute == pytest.approx(np.abs(exact - truth).mean(), rel=METRIC)
    assert errors.varied == (num_rows > 1 and np.ptp(exact) > 0 and np.ptp(truth) > 0)
    if errors.varied:
        assert errors.r2_C()[0] == pytest.approx(sklearn_metrics.r2_score(truth, exact), rel=1e-9, abs=1e-9)
        assert errors.pearson_C()[0] == pytest.approx(scipy.stats.pearsonr(exact, truth)[0], rel=1e-9, abs=1e-9)
        assert errors.spearman_C()[0] == pytest.approx(scipy.stats.spearmanr(exact, truth)[0], rel=1e-9, abs=1e-9)


def test_rank_correlation_of_a_sample() -> None:
    """More rows than are kept: those of a random sample of all, not of the first."""
    random = np.random.default_rng(0)
    targets = np.sort(random.normal(0, 1, 40_000))[:, None]
    found = targets + random.normal(0, 0.5, targets.shape)
    found[:20_000] *= -1
    errors = NumberErrors(1, most_kept=4000)
    for rows in cuts(len(targets), 1000):
        errors.add(found[rows], targets[rows])
    assert errors.num_ranked == 4000
    expected = scipy.stats.spearmanr(found[:, 0], targets[:, 0])[0]
    assert errors.spearman_C()[0] == pytest.approx(expected, abs=4 / np.sqrt(4000))
    assert errors.pearson_C()[0] == pytest.approx(scipy.stats.pearsonr(found[:, 0], targets[:, 0])[0], rel=1e-9)


@given(**parts)
def test_areas_of_few_rows_are_exact(num_rows: int, cut: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    true, scores = random.integers(0, 2, (num_rows, 3)) > 0, random.integers(-3, 4, (num_rows, 3)).astype(np.float32)
    ranking = RankingScores(3)
    for rows in cuts(num_rows, cut):
        ranking.add(scores[rows], true[rows])
    areas, errors = ranking.areas()
    assert not errors.any()
    for label in range(3):
        if len({*true[:, label].tolist()}) == 2:
            expected = sklearn_metrics.roc_auc_score(true[:, label], scores[:, label])
            assert areas[label] == pytest.approx(expected, rel=METRIC)
        else:
            assert np.isnan(areas[label])


@pytest.mark.parametrize("width", [4.0, 1e-3])
def test_areas_of_many_rows_are_within_the_error_stated(width: float) -> None:
    """By histogram, whose bins fit the scores, be they nearly equal."""
    random = np.random.default_rng(1)
    true = random.random((20_000, 2)) < (0.5, 0.02)
    scores = (7 + width * (random.normal(0, 1, true.shape) + true)).astype(np.float32)
    ranking = RankingScores(2, most_kept=4000)
    for rows in cuts(len(true), 900):
        ranking.add(scores[rows], true[rows])
    areas, errors = ranking.areas()
    assert not ranking.exact
    for label in range(2):
        expected = sklearn_metrics.roc_auc_score(true[:, label], scores[:, label])
        assert abs(areas[label] - expected) <= errors[label] < 1e-3


def test_log_odds_order_rows_as_probabilities_do_and_keep_digits() -> None:
    logits = np.array([[40.0, 0.0, 1.0], [41.0, 0.0, 1.0], [0.0, 0.5, 0.2]])
    found = log_odds(logits)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert found[2] == pytest.approx(np.log(probabilities[2] / (1 - probabilities[2])))
    assert found[1, 0] - found[0, 0] == pytest.approx(1.0)  # both probabilities are 1 in fp64


@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_an_evaluation_in_parts_is_that_of_the_whole(task: str) -> None:
    random = np.random.default_rng(2)
    outputs = 1 if task == "regression" else 3
    space = LabelSpace(task=task, names=("a", "b", "c")[:outputs])  # type: ignore[arg-type]
    logits = random.normal(0, 1, (50, outputs)).astype(np.float32)
    targets = {
        "single_label": random.integers(0, 3, 50),
        "multi_label": random.integers(0, 2, (50, 3)).astype(np.float32),
        "regression": random.normal(0, 1, (50, 1)).astype(np.float32),
    }[task]
    made = make_task(space, targets, "balanced" if task == "single_label" else None)
    evaluation = Evaluation(made)
    for rows in cuts(50, 7):
        evaluation.add(logits[rows], targets[rows])
    expected = {"loss": made.loss(logits, targets), **made.metrics(logits, targets)}
    assert evaluation.result() == pytest.approx(expected, rel=1e-9)
    assert set(expected) == {"loss", *evaluation.accumulator.names}


@pytest.mark.parametrize("task", ["single_label", "multi_label"])
def test_an_evaluation_keeps_no_logits(task: str) -> None:
    """Twenty times as many rows take no more memory, with 1,000 labels."""
    names = tuple(f"l{i}" for i in range(1000))
    space = LabelSpace(task=task, names=names, values={n: i for i, n in enumerate(names)})  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    logits = random.normal(0, 1, (500, 1000)).astype(np.float32)
    targets = random.integers(0, 1000, 500) if task == "single_label" else (logits > 1).astype(np.float32)

    def peak(times: int) -> int:
        evaluation = Evaluation(make_task(space, targets))
        tracemalloc.start()
        for _ in range(times):
            evaluation.add(logits, targets)
        assert evaluation.result()["loss"] > 0
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(1)
    assert peak(20) < 1.1 * peak(1) + 1e5
