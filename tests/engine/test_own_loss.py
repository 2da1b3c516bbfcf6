"""Losses of models with code of their own."""

from __future__ import annotations

from typing import Any

import pytest

from brimful.core.records import LabelSpace, TaskName
from brimful.engine.own_loss import own_loss_doubt
from tiny import FAMILIES

PROBLEMS = {"single_label": "single_label_classification", "multi_label": "multi_label_classification"}


@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_another_loss_of_the_model_is_said(task: TaskName) -> None:
    model = FAMILIES["bert"].model(3).train()
    model.config.problem_type = PROBLEMS.get(task, "regression")
    space = LabelSpace(task=task, names=("a", "b", "c"))
    assert own_loss_doubt(model, space) is None
    assert model.training
    forward = model.forward

    def focal(**given: Any) -> Any:
        found = forward(**given)
        found.loss = found.loss * (1 - (-found.loss).exp()) ** 2
        return found

    model.forward = focal
    assert "which is what is trained" in (own_loss_doubt(model, space) or "")
