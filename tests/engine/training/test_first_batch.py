"""The step that will run, held to the plain model on the first batch; and models whose training is another matter."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import brimful
from brimful.tasks.task import make_task
from plain import gradient, padded, plain_loss
from tiny import FAMILIES, sequences

IDS = sequences([5, 9, 30, 12, 7])
CLASSES = np.array([0, 1, 2, 1, 0])
ROWS = [{"input_ids": ids, "labels": label} for ids, label in zip(IDS, CLASSES, strict=True)]


def make_step(model: Any, **options: Any) -> brimful.Step:
    given = {
        "batch_size": 8,
        "optim": "sgd",
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    return brimful.Step(model, num_steps=4, device="cpu", precision="fp32", **given | options)


def test_a_model_that_mixes_rows_in_training_is_padded_and_whole() -> None:
    """A BatchNorm head: its loss and gradient are those of the whole batch, not of parts and not of empty slots."""
    model = FAMILIES["bert"].model()
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), model.classifier)
    plain = copy.deepcopy(model).train()
    step = make_step(model, token_budget=32)
    assert not step.packed
    (packing,) = (lever for lever in step.recipe.levers if lever.name == "packing")
    assert "BatchNorm" in packing.reason
    loss = plain_loss(make_task(step._task.space, CLASSES, None, 0.0), plain(**padded(IDS, None, 0)).logits, CLASSES)
    before = torch.cat([p.detach().flatten() for p in plain.parameters()])
    loss.backward()
    assert step.run(step.batch(ROWS)).read().loss == pytest.approx(loss.item(), rel=1e-5)
    after = torch.cat([p.detach().flatten() for p in step.release().parameters()])
    expected = gradient(plain)
    assert float((before - after - expected).norm() / expected.norm()) < 1e-5
