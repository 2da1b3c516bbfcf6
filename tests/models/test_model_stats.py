"""Operations of a model, against torch's own count of them and against counting by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from brimful.models.model_stats import (
    Attention,
    attention_of,
    matmul_parameters,
    token_matrices,
    token_operations,
    useful_attention,
)
from tiny import FAMILIES

LENGTH = 20
LENGTHS = np.array([LENGTH])


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "modernbert", "llama", "qwen3"])
def test_products_of_tokens_as_torch_counts_them(family: str) -> None:
    """Forward, one sequence: what the base model's own products are, heads and poolers aside."""
    model = FAMILIES[family].model().eval()
    model.set_attn_implementation("sdpa")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model(input_ids=torch.full((1, LENGTH), 7))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in counts.items() if op in ("aten.mm", "aten.addmm"))
    found = token_matrices(model)
    assert found is not None
    pooler = 2 * 16 * 16 if family == "bert" else 0  # sees one token
    assert products == 2 * LENGTH * sum(n * rows * columns for (rows, columns), n in found.items()) + pooler


def test_the_head_and_the_pooler_see_one_token() -> None:
    model = FAMILIES["bert"].model()
    found = token_matrices(model)
    assert found == {(16, 16): 8, (24, 16): 2, (16, 24): 2}
    assert matmul_parameters(model) == 8 * 256 + 4 * 384 + 256 + 3 * 16


@pytest.mark.parametrize(
    ("trained", "exact"),
    [("", True), ("embeddings", True), ("layer.1", False), ("layer.0.attention", False), ("classifier", True)],
)
def test_what_is_frozen_costs_less_as_torch_counts_it(trained: str, exact: bool) -> None:
    """Forward and backward pass, attention in plain products, those of the pooler and of the head left out.

    exact: the first layer that has something trained may count as if all of it were reached.
    """
    model = FAMILIES["bert"].model().eval()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, LENGTH), 7)).logits.sum().backward()
    layers = [counter.get_flop_counts()[f"BertForSequenceClassification.bert.encoder.layer.{i}"] for i in range(2)]
    products = {"aten.mm", "aten.addmm"}
    of_tokens = sum(flops for each in layers for op, flops in each.items() if str(op) in products)
    among = sum(flops for each in layers for op, flops in each.items() if str(op) == "aten.bmm")
    for found, counted in ((token_operations(model), of_tokens / LENGTH), (useful_attention(model, LENGTHS), among)):
        assert found is not None
        assert found == counted if exact else counted <= found < 1.2 * counted


def test_layers_that_are_shared_are_not_counted() -> None:
    assert token_matrices(FAMILIES["albert"].model()) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_pairs_that_see_one_another(window: int | None, causal: bool) -> None:
    near = window or LENGTH
    seen = [
        (query, key)
        for query in range(LENGTH)
        for key in range(LENGTH)
        if abs(query - key) < near and (key <= query or not causal)
    ]
    assert pairs([LENGTH, 1, LENGTH], window, causal) == 2 * len(seen) + 1


def test_attention_counts_layers_heads_and_windows() -> None:
    assert flops("bert", [10, 20]) == 12 * 16 * 2 * (10**2 + 20**2)
    assert flops("llama", [10]) == 12 * 16 * 2 * 55
    sliding = 2 * pairs([LENGTH], 8, False) + 2 * LENGTH**2
    assert flops("modernbert", [LENGTH]) == 12 * 16 * sliding


def flops(family: str, lengths: list[int]) -> float:
    attention = attention_of(FAMILIES[family].model())
    assert attention is not None
    return attention.flops(np.array(lengths))


def pairs(lengths: list[int], window: int | None, causal: bool) -> float:
    return Attention(channels=1, causal=causal, windows=Counter([window])).flops(np.array(lengths)) / 12
