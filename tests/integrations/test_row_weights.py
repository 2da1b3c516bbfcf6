"""Weights of a loop's rows: a row of weight 2 is two rows, one of weight 0 is none, across accumulated batches."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch

import brimful
from plain import padded
from tiny import FAMILIES, sequences
from tolerances import difference

SETTINGS: dict[str, Any] = {"batch_size": 8, "max_length": 40, "device": "cpu", "precision": "fp32"}
LABELS: dict[str, torch.Tensor] = {
    "single_label_classification": torch.tensor([0, 1, 2, 1]),
    "multi_label_classification": torch.eye(3)[[0, 1, 2, 1]],
}


def batch_of(number: int, problem: str) -> dict[str, torch.Tensor]:
    ids = sequences(np.random.default_rng(number).integers(1, 30, size=4).tolist(), seed=number)
    return padded(ids, None, 0) | {"labels": LABELS[problem]}


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "key.bias" not in n])


def plain_loss(model: Any, batches: list[tuple[dict[str, torch.Tensor], list[float]]], problem: str) -> torch.Tensor:
    """The sum of weighted losses of rows over the sum of weights, by padded batches."""
    total, denominator = torch.zeros(()), 0.0
    for batch, each in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if problem.startswith("single"):
            rows = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        else:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="none")
            rows = loss.mean(1)
        total = total + (rows * torch.tensor(each)).sum()
        denominator += sum(each)
    return total / denominator


@pytest.mark.parametrize("problem", LABELS)
def test_the_loss_is_over_the_sum_of_weights(problem: str) -> None:
    """Of two batches of one update, the second without weights, which then are ones."""
    plain = FAMILIES["bert"].model().train()
    plain.config.problem_type = problem
    model = copy.deepcopy(plain)
    each: list[list[float]] = [[0.5, 2.0, 0.0, 3.0], [1.0] * 4]
    batches = [batch_of(number, problem) for number in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = brimful.Step(model, optimizer, accumulation=2, max_grad_norm=0.0, **SETTINGS)
    assert not step(batches[0] | {"weights": torch.tensor(each[0])}).updated
    outcome = step(batches[1])
    loss = plain_loss(plain, list(zip(batches, each, strict=True)), problem)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
    assert difference(weights(step.release()), weights(plain)) < 1e-5
    assert step.first_batch is not None
    assert step.first_batch.passed


def test_a_row_of_weight_two_is_two_rows() -> None:
    rows = [{"input_ids": [5 + i, 6, 7][: 1 + i], "labels": i} for i in range(3)]
    losses, learned = [], []
    for given in ([*rows, rows[1]], [rows[0], rows[1] | {"weight": 2.0}, rows[2], rows[2] | {"weight": 0}]):
        model = FAMILIES["bert"].model().train()
        step = brimful.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=0.0, **SETTINGS)
        losses.append(step(given).loss)
        learned.append(weights(step.release()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert difference(learned[1], learned[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), "weights are negative or not finite"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "weights are negative or not finite"),
        (torch.zeros(4), "weights are zero for all rows"),
        (torch.ones(3), "weights have the shape (3,), and there are 4 rows"),
    ],
    ids=["negative", "nan", "zero", "too few"],
)
def test_weights_that_cannot_be(given: torch.Tensor, message: str) -> None:
    model = FAMILIES["bert"].model()
    step = brimful.Step(model, torch.optim.SGD(model.parameters()), **SETTINGS)
    with pytest.raises(brimful.OptionError, match=re.escape(message)) as refused:
        step(batch_of(0, "single_label_classification") | {"weights": given})
    assert refused.value.hint
