"""Scores in a stream: values are scikit-learn's, and intervals cover what they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import spearmanr
from sklearn import metrics as sk

from brimful.core.evaluation import Metric
from brimful.core.records import LabelSpace
from brimful.tasks.answers import sigmoid, softmax
from brimful.tasks.scoring import scorers
from brimful.tasks.scoring.choose import make_scorer
from brimful.tasks.scoring.resampling import MOST_GROUPS, least_sum
from brimful.tasks.scoring.scorers import Scored

NAMES = ("bad", "fair", "good")


def space(task: Any, num_outputs: int = 3) -> LabelSpace:
    names = NAMES[:num_outputs] if num_outputs <= 3 else tuple(map(str, range(num_outputs)))
    return LabelSpace(task=task, names=names, values={name: i for i, name in enumerate(names)})


def drawn(task: str, num_rows: int, seed: int = 0, num_outputs: int = 3) -> tuple[Any, Any]:
    """Logits and targets that go together, somewhat."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(num_rows, num_outputs)).astype(np.float32)
    if task == "single_label":
        targets: Any = draw.integers(0, num_outputs, num_rows)
        logits[np.arange(num_rows), targets] += 1
    elif task == "multi_label":
        targets = (draw.random((num_rows, num_outputs)) < 0.3).astype(np.float32)
        logits += 2 * targets - 1
    else:
        targets = (5 + draw.normal(size=(num_rows, num_outputs))).astype(np.float32)
        logits = (logits + targets).astype(np.float32)
    return logits, targets


def scored(task: Any, logits: npt.NDArray[Any], targets: npt.NDArray[Any], **named: Any) -> Scored:
    """Scores of rows that come in windows, in an order of their own."""
    scorer = make_scorer(space(task, logits.shape[1]), targets, seed=7, **named)
    for rows in np.array_split(np.random.default_rng(1).permutation(len(logits)), 5):
        scorer.add(rows, logits[rows])
    return scorer.result()


def value(metric: Metric) -> float:
    assert metric.value is not None
    return metric.value


def ends(metric: Metric) -> tuple[float, float]:
    assert metric.low is not None
    assert metric.high is not None
    return metric.low, metric.high


@pytest.mark.parametrize("num_outputs", [2, 3, 12])
def test_one_label_is_scored_as_by_scikit_learn(num_outputs: int) -> None:
    logits, targets = drawn("single_label", 300, num_outputs=num_outputs)
    found = scored("single_label", logits, targets, resamples=50)
    answers, scores = logits.argmax(-1), softmax(logits.astype(np.float64))
    one_hot = np.eye(num_outputs)[targets]
    expected = {
        "accuracy": sk.accuracy_score(targets, answers),
        "balanced_accuracy": sk.balanced_accuracy_score(targets, answers),
        "f1_macro": sk.f1_score(targets, answers, average="macro"),
        "f1_weighted": sk.f1_score(targets, answers, average="weighted"),
        "matthews_correlation": sk.matthews_corrcoef(targets, answers),
        "log_loss": sk.log_loss(targets, scores),
        "brier": ((scores - one_hot) ** 2).sum(-1).mean(),
        "auc_macro": sk.roc_auc_score(one_hot, scores, average="macro"),
    }
    if num_outputs >= 10:
        expected["accuracy_top5"] = sk.top_k_accuracy_score(targets, scores, k=5)
    assert {name: value(found.metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-6)
    assert set(found.metrics) == {*expected, "ece"}
    precision, recall, f1, support = sk.precision_recall_fscore_support(targets, answers)
    for i, label in enumerate(found.by_label):
        by_name = {name: value(metric) for name, metric in label.metrics.items() if name != "auc"}
        assert by_name == pytest.approx({"precision": precision[i], "recall": recall[i], "f1": f1[i]})
        assert (label.support, label.given) == (support[i], (answers == i).sum())
    names = space("single_label", num_outputs).names
    table = sk.confusion_matrix(targets, answers)
    assert {(c.truth, c.label): c.count for c in found.confusion} == {
        (names[i], names[j]): table[i, j] for i, j in zip(*table.nonzero(), strict=True)
    }
    assert found.metrics["ece"].low is None
    for name in expected:
        low, high = ends(found.metrics[name])
        assert low < value(found.metrics[name]) < high, name


def test_several_labels_are_scored_as_by_scikit_learn() -> None:
    logits, targets = drawn("multi_label", 400)
    found = scored("multi_label", logits, targets, resamples=50)
    scores, answers = sigmoid(logits.astype(np.float64)), logits > 0
    expected = {
        "f1_micro": sk.f1_score(targets, answers, average="micro"),
        "f1_macro": sk.f1_score(targets, answers, average="macro"),
        "precision_micro": sk.precision_score(targets, answers, average="micro"),
        "recall_micro": sk.recall_score(targets, answers, average="micro"),
        "accuracy": sk.accuracy_score(targets, answers),
        "label_accuracy": 1 - sk.hamming_loss(targets, answers),
        "log_loss": np.mean([sk.log_loss(targets[:, i], scores[:, i]) for i in range(3)]),
        "brier": np.mean([sk.brier_score_loss(targets[:, i], scores[:, i]) for i in range(3)]),
        "auc_macro": sk.roc_auc_score(targets, scores, average="macro"),
    }
    assert {name: value(found.metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-6)
    strict = scored("multi_label", logits, targets, resamples=0, threshold=0.9)
    assert value(strict.metrics["recall_micro"]) == pytest.approx(
        sk.recall_score(targets, scores >= 0.9, average="micro")
    )


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_numbers_are_scored_as_by_scikit_learn(num_outputs: int) -> None:
    logits, targets = drawn("regression", 300, num_outputs=num_outputs)
    found = scored("regression", logits, targets, resamples=50)
    expected = {
        "mse": sk.mean_squared_error(targets, logits),
        "rmse": np.sqrt(sk.mean_squared_error(targets, logits)),
        "mae": sk.mean_absolute_error(targets, logits),
    }
    of_first = {
        "r2": sk.r2_score(targets[:, 0], logits[:, 0]),
        "pearson": np.corrcoef(targets[:, 0], logits[:, 0])[0, 1],
        "spearman": spearmanr(targets[:, 0], logits[:, 0])[0],
    }
    expected |= of_first if num_outputs == 1 else {}
    assert {name: value(metric) for name, metric in found.metrics.items()} == pytest.approx(expected, rel=1e-5)
    if num_outputs > 1:
        first = {name: value(found.by_label[0].metrics[name]) for name in of_first}
        assert first == pytest.approx(of_first, rel=1e-5)
    else:
        assert sum(part.count for part in found.reliability) == 300
        assert found.reliability[0].observed < 4.5 < 5.5 < found.reliability[-1].observed


def test_reliability_is_that_of_the_bins() -> None:
    logits, targets = drawn("single_label", 500)
    found = scored("single_label", logits, targets, resamples=20)
    sure, right = softmax(logits).max(-1), logits.argmax(-1) == targets
    places = np.minimum((sure * 15).astype(int), 14)
    expected = {
        i: ((places == i).sum(), sure[places == i].mean(), right[places == i].mean()) for i in np.unique(places)
    }
    assert [round(part.low * 15) for part in found.reliability] == list(expected)
    for part, (count, predicted, observed) in zip(found.reliability, expected.values(), strict=True):
        assert (part.count, part.predicted, part.observed) == (
            count, pytest.approx(predicted, rel=1e-5), pytest.approx(observed)
        )  # fmt: skip
    error = sum(count * abs(predicted - observed) for count, predicted, observed in expected.values()) / 500
    assert value(found.metrics["ece"]) == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_equal_seeds_give_equal_intervals(task: str) -> None:
    logits, targets = drawn(task, 200)
    assert scored(task, logits, targets, resamples=50) == scored(task, logits, targets, resamples=50)


@pytest.mark.slow
def test_intervals_cover_the_true_value() -> None:
    """Of 150 samples of 200 rows, about 95 % of the intervals hold the value of all 60,000 rows."""
    logits, targets = drawn("single_label", 60_000)
    truth = {name: value(m) for name, m in scored("single_label", logits, targets, resamples=0).metrics.items()}
    held = dict.fromkeys(truth.keys() - {"ece"}, 0)
    for trial in range(150):
        rows = slice(200 * trial, 200 * (trial + 1))
        found = scored("single_label", logits[rows], targets[rows], resamples=200)
        for name in held:
            low, high = ends(found.metrics[name])
            held[name] += low <= truth[name] <= high
    assert {name: count for name, count in held.items() if not 0.88 <= count / 150 <= 1} == {}


def test_groups_of_rows_give_the_intervals_of_rows() -> None:
    num_rows = 3 * MOST_GROUPS
    logits, targets = drawn("single_label", num_rows)
    metric = scored("single_label", logits, targets, resamples=500).metrics["accuracy"]
    share, (low, high) = value(metric), ends(metric)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(share * (1 - share) / num_rows), rel=0.15)


def test_scores_of_a_sample_give_the_intervals_of_auc_and_all_give_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = drawn("single_label", 4000)
    whole = scored("single_label", logits, targets, resamples=0)
    monkeypatch.setattr(scorers, "MOST_KEPT", 3000)
    part = scored("single_label", logits, targets, resamples=0)
    assert (whole.score_rows, part.score_rows) == (None, 1000)
    full, some = whole.metrics["auc_macro"], part.metrics["auc_macro"]
    assert value(some) == pytest.approx(value(full), abs=1e-6)
    assert (some.low, some.high) == (pytest.approx(full.low, abs=3e-3), pytest.approx(full.high, abs=3e-3))


def test_labels_without_a_row_in_the_sample_count_in_the_mean_auc(monkeypatch: pytest.MonkeyPatch) -> None:
    random, targets = np.random.default_rng(0), np.arange(4000) % 400
    logits = random.normal(size=(4000, 400)).astype(np.float32)
    logits[np.arange(4000), targets] += targets / 200  # some are told better than others
    whole = scored("single_label", logits, targets, resamples=0)
    monkeypatch.setattr(scorers, "MOST_KEPT", 400 * 50)
    part = scored("single_label", logits, targets, resamples=0)
    assert part.score_rows == 50
    assert value(part.metrics["auc_macro"]) == pytest.approx(value(whole.metrics["auc_macro"]), abs=1e-4)
    assert part.metrics["auc_macro"].low is part.metrics["auc_macro"].high is None
    without = [each.metrics["auc"] for each in part.by_label if each.metrics["auc"].low is None]
    assert len(without) >= 350
    assert all(metric.value is not None for metric in without)


def test_the_interval_of_auc_is_wide_where_labels_have_one_row_each() -> None:
    """Scores by chance: the area is 0.5. A single row shows no variance, and yet it is all that is known."""
    labels, held = np.arange(100), 0
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=(100, 100)).astype(np.float32)
        found = scored("single_label", logits, labels, resamples=0)
        low, high = ends(found.metrics["auc_macro"])
        held += low <= 0.5 <= high
        of_one = ends(found.by_label[0].metrics["auc"])
        assert of_one[1] - of_one[0] > 0.1
    assert held >= 16


def test_the_interval_of_auc_is_of_the_variance_that_delong_gives() -> None:
    logits, targets = drawn("single_label", 12)
    found = scored("single_label", logits, targets, resamples=0).by_label[0].metrics["auc"]
    scores, is_label = softmax(logits)[:, 0], targets == 0
    above = (scores[is_label][:, None] > scores[~is_label][None]).astype(float)
    error = np.sqrt(above.mean(1).var(ddof=1) / len(above) + above.mean(0).var(ddof=1) / above.shape[1])
    area = above.mean()
    logit, spread = np.log(area / (1 - area)), 1.96 * error / (area * (1 - area))
    assert ends(found) == pytest.approx([1 / (1 + np.exp(-logit + sign * spread)) for sign in (1, -1)], abs=1e-4)


def test_a_perfect_score_has_the_bound_of_its_rows() -> None:
    targets = np.arange(30) % 3
    found = scored("single_label", (10 * np.eye(3)[targets]).astype(np.float32), targets)
    assert found.metrics["accuracy"] == Metric(value=1.0, low=pytest.approx(0.025 ** (1 / 30)), high=1.0)
    assert found.by_label[0].metrics["recall"] == Metric(value=1.0, low=pytest.approx(0.025 ** (1 / 10)), high=1.0)
    assert found.metrics["auc_macro"].low == pytest.approx(0.025 ** (1 / 30))


def test_recalls_of_none_and_all_leave_an_interval() -> None:
    """Every row is given one label: each resample has the same recalls, and their mean has exact bounds."""
    targets = np.repeat([0, 1, 2], (20, 8, 2))
    found = scored("single_label", np.tile(np.float32([3, 0, 0]), (30, 1)), targets)
    low, high = ends(found.metrics["balanced_accuracy"])
    assert value(found.metrics["balanced_accuracy"]) == pytest.approx(1 / 3)
    assert low == pytest.approx(0.025 ** (1 / 20) / 3)
    assert high == pytest.approx(1 - least_sum(np.array([8.0, 2.0])) / 3)
    assert found.metrics["matthews_correlation"].low is None
    perfect = scored("single_label", (10 * np.eye(3)[targets]).astype(np.float32), targets).metrics
    assert ends(perfect["balanced_accuracy"]) == pytest.approx((least_sum(np.array([20.0, 8.0, 2.0])) / 3, 1.0))
    assert ends(perfect["balanced_accuracy"])[0] < ends(perfect["accuracy"])[0]  # two rows say little of their label


@pytest.mark.parametrize("rows", [(10, 10), (10, 2), (50, 1), (3, 0)])
def test_the_least_sum_of_shares_is_that_of_a_search(rows: tuple[int, int]) -> None:
    first = np.linspace(1e-4, 1, 20_001)
    with np.errstate(divide="ignore"):
        second = np.minimum(1, (0.025 / first ** rows[0]) ** (1 / rows[1])) if rows[1] else np.zeros(len(first))
    likely = first ** rows[0] * (second ** rows[1]) >= 0.025 - 1e-12
    assert least_sum(np.array(rows, float)) == pytest.approx((first + second)[likely].min(), abs=1e-3)


def test_several_labels_that_no_resample_tells_apart() -> None:
    """One label is always right and another never given: the F1 of both is known of these rows only."""
    targets = np.tile(np.float32([1, 1]), (40, 1))
    found = scored("multi_label", np.tile(np.float32([3, -3]), (40, 1)), targets).metrics
    assert found["f1_macro"] == Metric(value=0.5)
    assert found["recall_micro"] == Metric(value=0.5)
    bound = 0.025 ** (1 / 40)
    assert ends(found["label_accuracy"]) == pytest.approx((0.5 * bound, 1 - 0.5 * bound))
    assert ends(found["accuracy"]) == pytest.approx((0.0, 1 - bound))
    of_thirds = scored("multi_label", np.tile(np.float32([3, 3, -3]), (40, 1)), np.ones((40, 3), np.float32)).metrics
    assert ends(of_thirds["label_accuracy"]) == pytest.approx((2 / 3 * bound, 1 - bound / 3))


def test_answers_that_are_all_one_number_have_no_correlation() -> None:
    """Of large ones rounding leaves a spread, and a correlation of 0."""
    targets = (4.6e5 + 2.7e5 * np.random.default_rng(0).normal(size=(47, 1))).astype(np.float32)
    found = scored("regression", np.full((47, 1), targets.mean(), np.float32), targets, resamples=20)
    assert found.metrics["pearson"].value is None
    assert found.metrics["r2"].value == pytest.approx(0, abs=1e-6)


def test_a_row_without_an_answer_counts_nowhere() -> None:
    logits, targets = drawn("single_label", 100)
    whole = scored("single_label", logits[:90], targets[:90], resamples=0)
    logits[90:] = np.nan
    found = scored("single_label", logits, targets, resamples=0)
    assert (found.num_rows, found.num_unanswered) == (90, 10)
    assert {n: m.value for n, m in found.metrics.items()} == pytest.approx(
        {n: m.value for n, m in whole.metrics.items()}
    )


def test_a_label_that_no_row_has_is_unknown_and_not_zero() -> None:
    logits, targets = drawn("single_label", 60)
    found = scored("single_label", logits, np.minimum(targets, 1), resamples=30)
    absent = found.by_label[2]
    assert (absent.support, absent.metrics["recall"].value, absent.metrics["auc"].value) == (0, None, None)
    none = scored("single_label", np.full((5, 3), np.nan, np.float32), np.zeros(5, np.int64), resamples=30)
    assert none.num_rows == 0
    assert none.metrics["accuracy"] == Metric(value=None)


def test_only_shares_have_a_bound_where_no_resample_differs() -> None:
    """One label in truth and answers: Matthews' correlation is 0 by definition, and nothing bounds it."""
    from brimful.core.evaluation import Metric
    from brimful.tasks.scoring.scorers import bounded

    flat = Metric(value=0.0, low=0.0, high=0.0)
    assert bounded(flat, 10, is_share=False) == Metric(value=0.0)
    assert 0 < (bounded(flat, 10).high or 0) < 0.5
