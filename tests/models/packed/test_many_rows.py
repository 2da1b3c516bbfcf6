"""Models whose rows influence one another only where there are many: a batch that is cut is another one to them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import brimful
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from plain import gradient, padded, plain_loss
from tiny import FAMILIES, sequences


class _Centred(torch.nn.Module):
    """Centres logits over a batch of more than `most` rows, and in training only where `in_training`."""

    def __init__(self, most: int, in_training: bool) -> None:
        super().__init__()
        self._most, self._in_training = most, in_training

    def forward(self, logits_NC: torch.Tensor) -> torch.Tensor:
        centred = len(logits_NC) > self._most and (self.training or not self._in_training)
        return logits_NC - logits_NC.mean(0) if centred else logits_NC


def _model(most: int, *, in_training: bool = False) -> Any:
    model = FAMILIES["bert"].model()
    model.classifier = torch.nn.Sequential(model.classifier, _Centred(most, in_training))
    return model


def _checked(model: Any) -> Equivalence:
    return check_equivalence(model, max_length=48, device=torch.device("cpu"), precision="fp32", cache=False)


@pytest.mark.parametrize("most", [6, 30])
def test_a_head_that_centres_many_rows(most: int) -> None:
    found = _checked(_model(most))
    assert (found.packed, found.independent, found.alike_independent) == (False, False, False)
    assert found.reason == "the result of a row depends on the other rows of its batch, or on its padding"


@pytest.mark.parametrize("most", [10, 30])
def test_a_head_that_centres_many_rows_in_training(most: int) -> None:
    found = _checked(_model(most, in_training=True))
    assert found.packed  # for reading it
    assert found.independent
    assert found.mixes_in_training
    assert "in train mode" in found.for_training().reason


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    """Though the tokens of a micro-batch are far fewer than the batch has."""
    ids, classes = sequences([5, 17, 30, 1, 2, 31, 9, 12]), np.array([0, 1, 2, 0, 1, 2, 0, 1])
    model = _model(6)
    plain = copy.deepcopy(model).train()
    settings: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    settings |= {"learning_rate": 1.0, "batch_size": 8, "token_budget": 64, "device": "cpu", "precision": "fp32"}
    step = brimful.Step(model, num_steps=2, **settings)
    loss = plain_loss(step._task, plain(**padded(ids, None, 0)).logits, classes)
    before = torch.cat([p.detach().flatten() for p in plain.parameters()])
    loss.backward()
    rows = [{"input_ids": each, "labels": label} for each, label in zip(ids, classes, strict=True)]
    assert step.run(step.batch(rows)).read().loss == pytest.approx(loss.item(), rel=1e-5)
    after = torch.cat([p.detach().flatten() for p in step.release().parameters()])
    expected = gradient(plain)
    assert float((before - after - expected).norm() / expected.norm()) < 1e-5
