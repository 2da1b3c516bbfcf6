"""Numbers of a regression that are far from zero, answered in bf16: as near to fp32 as numbers around zero."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import brimful
from brimful.models.fp32_outputs import answer_as_before, answer_in_fp32
from runs import events
from tiny_files import review, save_classifier

TEXTS = [review(bool(number % 2), number) for number in range(64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers are around 2003."""
    folder = save_classifier(tmp_path_factory.mktemp("years") / "model", ["year"], problem_type="regression")
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        loaded.classifier.bias.add_(2003)
    loaded.save_pretrained(folder)
    return folder


def answers(model: Path, **options: Any) -> np.ndarray:
    with brimful.Classifier(model, device="cpu", **options) as classify:
        return np.array([each["score"] for each in classify(TEXTS)])


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_bf16_answers_what_fp32_does(model: Path, packing: str) -> None:
    plain, halved = answers(model, precision="fp32"), answers(model, precision="bf16", packing=packing)
    assert 2000 < plain.min() < plain.max() < 2006
    assert np.abs(halved - plain).max() < 0.2 * plain.std()


def test_a_step_of_bf16_does_not_pass_for_rounding(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the last layer in bf16, the comparison with the plain model would say so."""
    monkeypatch.setattr("brimful.levers.precision.answer_in_fp32", lambda model: None)
    with brimful.Classifier(model, device="cpu", precision="bf16", verify=32) as classify:
        with pytest.warns(UserWarning, match="differs from the plain fp32 model"):
            classify(TEXTS)
        assert classify.equivalence is not None
        assert classify.equivalence.precision == "fp32"  # the slower path


def test_other_heads_are_left_alone(tmp_path: Path) -> None:
    classes: Any = AutoModelForSequenceClassification.from_pretrained(save_classifier(tmp_path / "m", ["a", "b"]))
    answer_in_fp32(classes)
    assert not any("forward" in vars(module) for module in classes.modules())


def test_a_copy_answers_with_its_own_weights(model: Path) -> None:
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(model).eval()
    answer_in_fp32(loaded)
    other = copy.deepcopy(loaded)
    with torch.no_grad():
        other.classifier.bias.sub_(2003)
        ids = torch.tensor([[5, 6, 7]])
        assert abs(float(other(ids).logits)) < 3 < 2000 < float(loaded(ids).logits)
    assert list(other.state_dict()) == list(loaded.state_dict())
    answer_as_before(loaded)
    assert "forward" not in vars(loaded.classifier)


def test_a_model_with_such_numbers_is_trained_further_in_bf16(model: Path, tmp_path: Path) -> None:
    """Its head is kept, bias and all: the first loss is that of fp32, and not of numbers in steps of 8."""
    rows = {"text": TEXTS, "label": [2003.0 + number % 5 for number in range(64)]}
    losses = []
    for precision in ("fp32", "bf16"):
        output = tmp_path / precision
        brimful.train(
            rows, model=model, output=output, task="regression", precision=precision, device="cpu", max_steps=1,
            batch_size=32, baselines=False, logging_steps=1,
        )  # fmt: skip
        losses.append(next(event["loss"] for event in events(output, "step")))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
