"""A model that computes packed behind its own forward, on a GPU: its loss and gradient, in fp32 and under autocast."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import brimful
from brimful.core.tolerances import TOLERANCES
from plain import gradient, padded
from tiny import FAMILIES, sequences
from tolerances import difference

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "initializer_range": 0.02}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_loss_and_gradient(family: str, precision: str) -> None:
    sizes = SIZES | ({"head_dim": 64, "num_key_value_heads": 1} if family == "qwen3" else {})
    model = FAMILIES[family].model(**sizes).cuda().train()
    ours = brimful.packed(copy.deepcopy(model))
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=16).tolist())
    batch = padded(ids, None, model.config.pad_token_id) | {"labels": torch.arange(16) % 3}
    batch = {name: value.cuda() for name, value in batch.items()}
    losses, gradients = [], []
    for each in (model, ours):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            losses.append(each(**batch).loss)
        losses[-1].backward()
        gradients.append(gradient(each).cpu())
    behind = vars(ours)["_brimful_packed"]
    assert (behind.num_packed, behind.reasons) == (1, [])
    assert difference(losses[1], losses[0]) < TOLERANCES[precision].logits
    assert difference(gradients[1], gradients[0]) < TOLERANCES[precision].gradient


def captured(model: Any) -> int:
    return vars(model)["_brimful_packed"].num_captured


def learn(model: Any, batches: list[dict[str, Tensor]], precision: str) -> list[float]:
    """Losses of a plain loop, which answers between two steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch).loss
            with torch.no_grad():
                model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_captured_calls_learn_the_same(family: str, precision: str) -> None:
    """By the same dropout masks, in shapes that come again in turn."""
    sizes = SIZES | ({"head_dim": 64, "num_key_value_heads": 1} if family == "qwen3" else {})
    sizes |= {"dropout": 0.1} if family == "bert" else {}
    model = FAMILIES[family].model(**sizes).cuda().train()
    batches = []
    for seed in range(8):
        ids = sequences(np.random.default_rng(seed % 4).integers(3, 60, size=16).tolist(), seed=seed)
        batch = padded(ids, None, model.config.pad_token_id) | {"labels": torch.arange(16) % 3}
        batches.append({name: value.cuda() for name, value in batch.items()})
    ours, launched = (brimful.packed(copy.deepcopy(model), graphs=graphs) for graphs in (True, False))
    losses, expected = learn(ours, batches, precision), learn(launched, batches, precision)
    assert captured(ours) >= 8
    assert difference(torch.tensor(losses), torch.tensor(expected)) < TOLERANCES[precision].step


def test_a_second_backward_pass_of_a_captured_call() -> None:
    ours = brimful.packed(FAMILIES["bert"].model(**SIZES).cuda().train(), graphs=True)
    batch = {name: value.cuda() for name, value in padded(sequences([7, 20, 3]), None, 0).items()}
    ours(**batch)
    loss = ours(**batch).logits.sum()
    loss.backward(retain_graph=True)
    assert captured(ours) == 1
    with pytest.raises(RuntimeError, match="has had its backward pass"):
        loss.backward()


def test_answers_within_one_autocast_after_another() -> None:
    """Casts of weights go with an autocast; what graphs read must not."""
    model = FAMILIES["bert"].model(**SIZES).cuda().eval()
    ours, launched = (brimful.packed(copy.deepcopy(model), graphs=graphs) for graphs in (True, False))
    batch = {name: value.cuda() for name, value in padded(sequences([7, 20, 3]), None, 0).items()}
    batch["labels"] = torch.tensor([0, 1, 2], device="cuda")
    for region in range(3):
        found = []
        for each in (ours, launched):
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                each.classifier.weight.add_(0.1 * region)
                found.append([each(**batch).logits for _ in range(3)][-1])
        garbage = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
        assert difference(found[0].cpu(), found[1].cpu()) < TOLERANCES["bf16"].step
        del garbage
    assert captured(ours) == 8
