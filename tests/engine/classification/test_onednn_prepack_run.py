"""On a CPU, classifiers of all families answer the same with reordered weights, and the plain model has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful
from brimful.engine.classification import runner
from brimful.levers import weights
from brimful.models import onednn_prepack
from tiny import FAMILIES
from tiny_files import review, save_classifier

TEXTS = [review(bool(i % 2), i) * (1 + i % 3) for i in range(30)]
NEAR: dict[Literal["fp32", "bf16"], float] = {"fp32": 1e-5, "bf16": 2**-6}


@pytest.fixture(autouse=True)
def all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiny models, too."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(onednn_prepack, "_LEAST", 1)


def classifier(model: Path, precision: Literal["fp32", "bf16"] = "fp32") -> brimful.Classifier:
    return brimful.Classifier(model, device="cpu", precision=precision, max_length=60, verify=0)


def was_reordered(ours: brimful.Classifier) -> bool:
    assert ours.recipe is not None
    return "weights" in {lever.name for lever in ours.recipe.levers}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "precision"),
    [*((family, "fp32") for family in FAMILIES), *((family, "bf16") for family in ("bert", "modernbert", "gpt2"))],
)
@pytest.mark.sampled
def test_every_family(
    family: str, precision: Literal["fp32", "bf16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_classifier(tmp_path / "model", ["bad", "good"], family)
    calls = []
    forward = onednn_prepack._ReorderedLinear.forward
    monkeypatch.setattr(
        onednn_prepack._ReorderedLinear, "forward", lambda layer, x: (calls.append(layer), forward(layer, x))[1]
    )
    with classifier(model, precision) as ours:
        ours.logits(TEXTS[:1])
        done = was_reordered(ours)
        calls.clear()
        found = ours.logits(TEXTS)
    assert bool(calls) == done
    assert done or precision == "bf16"
    monkeypatch.setattr(weights, "can_reorder", lambda _: False)
    with classifier(model, precision) as plain:
        np.testing.assert_allclose(found, plain.logits(TEXTS), atol=NEAR[precision])
        assert not was_reordered(plain)


class _ReadsForLongTexts(nn.Module):
    """As a model of its own code may: a Linear layer that is called, but for more tokens than the equivalence
    check's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] <= 48:
            found: Tensor = self.layer(x)
            return found
        return F.linear(x, self.layer.weight, self.layer.bias)


@pytest.mark.slow
def test_the_model_that_others_are_compared_with_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    load = runner.load_model

    def load_reading(*args: Any, **kwargs: Any) -> Any:
        loaded: Any = load(*args, **kwargs)
        inside = loaded.bert.encoder.layer[0].intermediate
        inside.dense = _ReadsForLongTexts(inside.dense)
        return loaded

    monkeypatch.setattr(runner, "load_model", load_reading)
    with classifier(model) as ours:
        with pytest.warns(UserWarning, match="30 of 30 texts have no answer"):
            assert np.isnan(ours.logits(TEXTS)).any()
        assert not ours.verify(TEXTS).passed
