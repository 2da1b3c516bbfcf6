"""Losses and metrics: those of torch, of Hugging Face models and of scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn

from brimful.core.errors import OptionError
from brimful.core.records import LabelSpace, TaskName
from brimful.tasks.task import LOWER_IS_BETTER, MultiLabel, Regression, SingleLabel, Task, make_task
from tiny import FAMILIES, sequences
from tolerances import LOSS_FP32, LOSS_FP64, METRIC, difference

NAMES = ("negative", "neutral", "positive", "none=of,these")


def space(task: TaskName = "single_label", num_outputs: int = 3) -> LabelSpace:
    values = {} if task == "regression" else {name: i for i, name in enumerate(NAMES[:num_outputs])}
    return LabelSpace(task=task, names=NAMES[:num_outputs], values=values)


def draw(task: TaskName, num_rows: int, num_outputs: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """Logits in fp64 and targets."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 3, (num_rows, num_outputs)))
    if task == "single_label":
        return logits, random.integers(0, num_outputs, num_rows)
    if task == "multi_label":
        return logits, random.integers(0, 2, (num_rows, num_outputs)).astype(np.float32)
    return logits, random.normal(2, 5, (num_rows, num_outputs)).astype(np.float32)


def mean_loss(task: Task, logits_NC: Tensor, targets_N: np.ndarray) -> Tensor:
    return task.loss_rows_S(logits_NC, torch.from_numpy(targets_N)).sum() / task.denominator(targets_N)


def compare(found_loss: Tensor, expected_loss: Tensor, logits: Tensor) -> None:
    """Loss and its gradient, in fp64."""
    assert difference(found_loss, expected_loss) < LOSS_FP64
    [found], [expected] = torch.autograd.grad(found_loss, logits), torch.autograd.grad(expected_loss, logits)
    assert difference(found, expected) < LOSS_FP64


rows_and_outputs = {"num_rows": st.integers(1, 9), "num_outputs": st.integers(2, 4), "seed": st.integers(0, 999)}
weights = st.none() | st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 40.0]), min_size=4, max_size=4)
smoothings = st.sampled_from([0.0, 0.1, 0.9])


# --- losses against torch's modules ---------------------------------------------------------------------------------


@given(**rows_and_outputs, given_weights=weights, smoothing=smoothings)
def test_single_label_is_cross_entropy(
    num_rows: int, num_outputs: int, seed: int, given_weights: list[float] | None, smoothing: float
) -> None:
    logits, targets = draw("single_label", num_rows, num_outputs, seed)
    weights_C = None if given_weights is None else np.array(given_weights[:num_outputs], dtype=np.float32)
    logits.requires_grad_()
    torch_loss = nn.CrossEntropyLoss(
        weight=None if weights_C is None else torch.from_numpy(weights_C).double(), label_smoothing=smoothing
    )
    task = SingleLabel(space("single_label", num_outputs), weights_C, smoothing)
    compare(mean_loss(task, logits, targets), torch_loss(logits, torch.from_numpy(targets)), logits)


@given(**rows_and_outputs, given_weights=weights, smoothing=smoothings)
def test_multi_label_is_binary_cross_entropy(
    num_rows: int, num_outputs: int, seed: int, given_weights: list[float] | None, smoothing: float
) -> None:
    logits, targets = draw("multi_label", num_rows, num_outputs, seed)
    weights_C = None if given_weights is None else np.array(given_weights[:num_outputs], dtype=np.float32)
    logits.requires_grad_()
    torch_loss = nn.BCEWithLogitsLoss(pos_weight=None if weights_C is None else torch.from_numpy(weights_C).double())
    smooth = torch.from_numpy(targets).double() * (1 - smoothing) + smoothing / 2
    task = MultiLabel(space("multi_label", num_outputs), weights_C, smoothing)
    compare(mean_loss(task, logits, targets), torch_loss(logits, smooth), logits)


@given(num_rows=st.integers(1, 9), num_outputs=st.integers(1, 4), seed=st.integers(0, 999))
def test_regression_is_the_mean_squared_error(num_rows: int, num_outputs: int, seed: int) -> None:
    logits, targets = draw("regression", num_rows, num_outputs, seed)
    logits.requires_grad_()
    task = Regression(space("regression", num_outputs))
    compare(mean_loss(task, logits, targets), nn.MSELoss()(logits, torch.from_numpy(targets).double()), logits)


@pytest.mark.parametrize("task_name", ["single_label", "multi_label", "regression"])
@given(num_rows=st.integers(2, 20), cut=st.integers(1, 19), seed=st.integers(0, 99))
def test_a_sum_over_parts_is_the_sum_over_all(task_name: TaskName, num_rows: int, cut: int, seed: int) -> None:
    """The ground of splitting, with empty slots among the parts."""
    logits, targets = draw(task_name, num_rows, 3, seed)
    text = None if task_name == "regression" else "negative=3,positive=0.25"
    task = make_task(space(task_name), targets, text, 0.0 if task_name == "regression" else 0.1)
    whole = task.loss_rows_S(logits, torch.from_numpy(targets))
    empty = torch.from_numpy(task.empty_targets(3))
    assert empty.dtype == torch.from_numpy(targets).dtype
    parts = [
        task.loss_rows_S(torch.cat([part, torch.zeros(3, 3, dtype=torch.float64)]), torch.cat([labels, empty]))[:-3]
        for part, labels in zip(logits.split(cut), torch.from_numpy(targets).split(cut), strict=True)
    ]
    assert whole.shape == (num_rows,)
    assert torch.equal(torch.cat(parts), whole)
    assert task.loss(logits.numpy(), targets) == pytest.approx(
        float(whole.sum()) / task.denominator(targets), rel=LOSS_FP64
    )


# --- losses against what Hugging Face models compute from labels ----------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "distilbert", "llama", "modernbert"])
@pytest.mark.parametrize(
    ("task_name", "problem_type", "num_outputs"),
    [
        ("single_label", "single_label_classification", 3),
        ("multi_label", "multi_label_classification", 3),
        ("regression", "regression", 1),
        ("regression", "regression", 2),
    ],
)
def test_losses_are_those_of_hugging_face(
    family: str, task_name: TaskName, problem_type: str, num_outputs: int
) -> None:
    model = FAMILIES[family].model(num_outputs, problem_type=problem_type).eval()
    ids = torch.as_tensor(np.stack(sequences([9] * 5))).long()
    _, targets = draw(task_name, 5, num_outputs, 0)
    labels = torch.from_numpy(targets)
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels.squeeze(-1))
    task = make_task(space(task_name, num_outputs), targets)
    assert difference(mean_loss(task, out.logits, targets), out.loss) < LOSS_FP32
    assert task.loss(out.logits.detach().numpy(), targets) == pytest.approx(out.loss.item(), rel=LOSS_FP32)


# --- metrics --------------------------------------------------------------------------------------------------------


@given(num_rows=st.integers(1, 40), num_outputs=st.integers(2, 4), seed=st.integers(0, 999))
def test_single_label_metrics(num_rows: int, num_outputs: int, seed: int) -> None:
    logits, targets = draw("single_label", num_rows, num_outputs, seed)
    task = SingleLabel(space("single_label", num_outputs))
    found = task.metrics(logits.numpy(), targets)
    predicted = logits.numpy().argmax(-1)
    classes = sorted({*predicted.tolist(), *targets.tolist()})
    precision, recall, f1, support = (
        np.array(x) for x in zip(*(_scores(predicted == c, targets == c) for c in classes), strict=True)
    )
    assert found["accuracy"] == pytest.approx((predicted == targets).mean(), rel=METRIC)
    assert found["f1_macro"] == pytest.approx(f1.mean(), rel=METRIC)
    assert found["f1_macro"] == sklearn_metrics.f1_score(targets, predicted, average="macro", zero_division=0)
    assert found["f1_weighted"] == pytest.approx((f1 * support).sum() / support.sum(), rel=METRIC)
    if len(classes) > 1:  # scikit-learn warns of one
        assert found["matthews_correlation"] == sklearn_metrics.matthews_corrcoef(targets, predicted)
    assert (precision <= 1).all()
    assert (recall <= 1).all()


def _scores(predicted: np.ndarray, true: np.ndarray) -> tuple[float, float, float, float]:
    hits = float((predicted & true).sum())
    precision, recall = hits / max(predicted.sum(), 1), hits / max(true.sum(), 1)
    return precision, recall, 2 * hits / (predicted.sum() + true.sum()), float(true.sum())


@given(num_rows=st.integers(1, 40), num_outputs=st.integers(2, 4), seed=st.integers(0, 999))
def test_multi_label_metrics(num_rows: int, num_outputs: int, seed: int) -> None:
    logits, targets = draw("multi_label", num_rows, num_outputs, seed)
    task = MultiLabel(space("multi_label", num_outputs))
    found = task.metrics(logits.numpy(), targets)
    predicted = torch.sigmoid(logits).numpy() > 0.5
    for average in ("micro", "macro"):
        expected = sklearn_metrics.f1_score(targets, predicted, average=average, zero_division=0)
        assert found[f"f1_{average}"] == expected
    assert found["accuracy"] == sklearn_metrics.accuracy_score(targets, predicted)
    assert found["label_accuracy"] == pytest.approx(1 - sklearn_metrics.hamming_loss(targets, predicted), rel=METRIC)


@given(num_rows=st.integers(1, 40), num_outputs=st.integers(1, 3), seed=st.integers(0, 999))
def test_regression_metrics(num_rows: int, num_outputs: int, seed: int) -> None:
    logits, targets = draw("regression", num_rows, num_outputs, seed)
    task = Regression(space("regression", num_outputs))
    found = task.metrics(logits.numpy(), targets)
    assert found["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(targets, logits), rel=METRIC)
    assert found["rmse"] == pytest.approx(math.sqrt(found["mse"]), rel=METRIC)
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(targets, logits), rel=METRIC)
    assert ("r2" in found) == (num_outputs == 1 and num_rows > 1)
    if "r2" in found:
        assert found["r2"] == sklearn_metrics.r2_score(targets, logits)
        expected = np.corrcoef(logits[:, 0].numpy(), targets[:, 0])[0, 1]
        assert found["pearson"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
        ranks = [np.argsort(np.argsort(x)) for x in (logits[:, 0].numpy(), targets[:, 0])]
        assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-9, abs=1e-9)
    assert "rmse" in LOWER_IS_BETTER


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("task_name", ["single_label", "multi_label", "regression"])
def test_a_model_gone_wrong_still_has_metrics(task_name: TaskName, value: float) -> None:
    """An evaluation must be able to say so, rather than fall."""
    outputs = 1 if task_name == "regression" else 3
    logits, targets = draw(task_name, 6, outputs, 0)
    logits[2] = value
    found = make_task(space(task_name, outputs), targets).metrics(logits.float().numpy(), targets)
    assert found


def test_metrics_of_one_class_alone() -> None:
    found = SingleLabel(space()).metrics(np.array([[2.0, 1, 0], [3, 0, 0]]), np.array([0, 0]))
    assert found == {"accuracy": 1.0, "f1_macro": 1.0, "f1_weighted": 1.0, "matthews_correlation": 0.0}


def test_regression_on_constant_predictions() -> None:
    assert "r2" not in Regression(space("regression", 1)).metrics(np.ones((3, 1)), np.array([[1.0], [2], [3]]))


# --- class weights --------------------------------------------------------------------------------------------------


def class_weights(text: str, task_name: TaskName = "single_label", targets: np.ndarray | None = None) -> np.ndarray:
    made = make_task(space(task_name, 4), np.zeros(1, dtype=np.int64) if targets is None else targets, text)
    assert isinstance(made, SingleLabel | MultiLabel)
    assert made.class_weights_C is not None
    return made.class_weights_C


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("negative=3", [3, 1, 1, 1]),
        (" negative = 3 , positive=.5", [3, 1, 0.5, 1]),
        ("neutral=1e2,neutral=2", [1, 2, 1, 1]),
    ],
)
def test_weights_by_label(text: str, expected: list[float]) -> None:
    assert class_weights(text).tolist() == expected
    assert class_weights(text, "multi_label").tolist() == expected


def test_weights_by_the_datas_names() -> None:
    labels = LabelSpace(task="single_label", names=("NEG", "POS"), values={"0": 1, "1": 0})
    for text in ("0=3", "POS=3"):
        task = make_task(labels, np.zeros(1, dtype=np.int64), text)
        assert isinstance(task, SingleLabel)
        assert task.class_weights_C is not None
        assert task.class_weights_C.tolist() == [1, 3]


@pytest.mark.parametrize("text", ["", "negative", "negative=", "=3", "negative=x", "other=3", "negative=3,", "a\nb=2"])
def test_weights_that_cannot_be_read(text: str) -> None:
    with pytest.raises(OptionError, match=r"--class-weights: .* is not a label of the data with a number") as caught:
        class_weights(text)
    assert caught.value.hint is not None
    assert "negative, neutral" in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["0", "-1", "inf", "nan"])
def test_weights_that_are_no_weights(number: str) -> None:
    with pytest.raises(OptionError, match=r"the weight of 'negative' is .*: it must be above 0"):
        class_weights(f"negative={number}")


def test_balanced_weights() -> None:
    targets = np.array([0, 0, 0, 0, 0, 1, 2, 2])
    expected = sklearn_balanced(targets)
    assert class_weights("balanced", targets=targets) == pytest.approx([*expected, 1.0])
    labels = np.array([[1, 0, 0, 1], [1, 1, 0, 1], [0, 0, 0, 1], [1, 0, 0, 1]], dtype=np.float32)
    assert class_weights("balanced", "multi_label", labels).tolist() == pytest.approx([1 / 3, 3, 1, 1 / 4])


def sklearn_balanced(targets: np.ndarray) -> list[float]:
    from sklearn.utils.class_weight import compute_class_weight

    weights_C: list[float] = compute_class_weight("balanced", classes=np.unique(targets), y=targets).tolist()
    return weights_C


@pytest.mark.parametrize(
    ("text", "smoothing", "flag"),
    [
        ("balanced", 0.0, "--class-weights"),
        (None, 0.1, "--label-smoothing-factor"),
        ("", 0.0, "--class-weights"),
    ],
)
def test_regression_has_neither_weights_nor_smoothing(text: str | None, smoothing: float, flag: str) -> None:
    with pytest.raises(OptionError, match=f"{flag} is for labels, and the task is regression"):
        make_task(space("regression", 1), np.zeros((1, 1)), text, smoothing)
