"""On a CPU, classifiers of all families answer the same with reordered weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful
from brimful.engine.classification import runner
from brimful.models import reordered
from tiny import FAMILIES
from tiny_files import review, save_classifier

TEXTS = [review(bool(i % 2), i) * (1 + i % 3) for i in range(30)]


def logits(model: Path) -> tuple[np.ndarray, bool]:
    """And whether weights were reordered."""
    with brimful.Classifier(model, device="cpu", precision="fp32", max_length=60) as classifier:
        found = classifier.logits(TEXTS)
        assert classifier.recipe is not None
        return found, "weights" in {lever.name for lever in classifier.recipe.levers}


@pytest.fixture
def all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiny models, too."""
    if not reordered.can_reorder(torch.float32):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(reordered, "_LEAST", 1)


@pytest.mark.usefixtures("all_weights")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_classifier(tmp_path / "model", ["bad", "good"], family)
    found, done = logits(model)
    assert done
    monkeypatch.setattr(runner, "can_reorder", lambda _: False)
    plain, done = logits(model)
    assert not done
    np.testing.assert_allclose(found, plain, atol=1e-5)


class _Reading(nn.Module):
    """A Linear layer that is not called: its weight is read, as a model of its own code may do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


@pytest.mark.usefixtures("all_weights")
def test_a_model_that_reads_its_weights_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    expected, done = logits(model)
    assert done
    load = runner.load_model

    def load_reading(*args: Any, **kwargs: Any) -> Any:
        loaded: Any = load(*args, **kwargs)
        inside = loaded.bert.encoder.layer[0].intermediate
        inside.dense = _Reading(inside.dense)
        return loaded

    monkeypatch.setattr(runner, "load_model", load_reading)
    found, done = logits(model)
    assert not done
    np.testing.assert_allclose(found, expected, atol=1e-5)
