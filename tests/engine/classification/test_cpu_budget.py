"""The tokens that a CPU computes at once, and answers that do not depend on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import brimful
from brimful.levers.weights import cpu_budget
from heads.tiny_heads import tiny_model
from tiny_files import review, save_classifier


def bert(width: int) -> nn.Module:
    """Nothing of it is computed."""
    config = BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1, num_attention_heads=width // 32
    )
    with torch.device("meta"):
        return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("width", "longest", "expected"),
    [(384, 512, 1024), (768, 512, 1024), (32, 512, 4096), (192, 128, 2048), (384, 8192, 8192)],
)
def test_by_the_widest_product_and_the_longest_sequence(width: int, longest: int, expected: int) -> None:
    assert cpu_budget(bert(width), longest) == expected


def test_a_model_without_products() -> None:
    assert cpu_budget(nn.Embedding(30000, 8), 512) == 4096


@pytest.mark.parametrize(("kind", "expected"), [("jamba", 256), ("qwen3_5_text", 256), ("minimax", 4096)])
def test_layers_that_make_a_state_of_each_token_have_few_at_once(kind: str, expected: int) -> None:
    assert cpu_budget(tiny_model(kind), 512) == expected


@pytest.mark.slow
def test_answers_are_the_same_by_any_budget(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    texts = [review(bool(i % 2), i) * (1 + i % 3) for i in range(60)]
    found = []
    for budget in (None, 64, 8192):
        with brimful.Classifier(model, device="cpu", precision="fp32", max_length=60, token_budget=budget) as ours:
            found.append(ours.logits(texts))
            assert ours.recipe is not None
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=1e-5)


def test_a_first_call_with_one_text_does_not_make_batches_small(tmp_path: Path) -> None:
    """As a first file of three rows, or the first lines of a pipe, must not."""
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    with brimful.Classifier(model, device="cpu", max_length=60, token_budget=512) as classifier:
        classifier(["good film"])
        assert classifier.recipe is not None
        (budgets,) = (lever.value for lever in classifier.recipe.levers if lever.name == "token_budget")
    sizes = [int(size) for size in budgets.split(", ")]
    assert min(sizes) <= 60
    assert max(sizes) >= 450
