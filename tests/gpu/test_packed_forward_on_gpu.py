"""A model that computes packed behind its own forward, on a GPU: its loss and gradient, in fp32 and under autocast."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_compiled_layers(family: str, precision: str) -> None:
    """Loss and gradient of layers as they are, in batches of other shapes too; masks that repeat with the seed."""
    model = FAMILIES[family].model(**SIZES).cuda().train()
    each = {asked: brimful.packed(copy.deepcopy(model), compiled=asked) for asked in (False, True)}
    generator = np.random.default_rng(0)
    for num_rows in (16, 5, 1):
        ids = sequences(generator.integers(3, 60, size=num_rows).tolist())
        batch = padded(ids, None, model.config.pad_token_id) | {"labels": torch.arange(num_rows) % 3}
        batch = {name: value.cuda() for name, value in batch.items()}
        found = {}
        for asked, ours in each.items():
            ours.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = ours(**batch).loss
            loss.backward()
            found[asked] = (loss.detach(), gradient(ours).cpu())
        assert difference(found[True][0], found[False][0]) < TOLERANCES[precision].logits
        assert difference(found[True][1], found[False][1]) < TOLERANCES[precision].gradient
    behind = vars(each[True])["_brimful_packed"]
    assert (behind.num_packed, behind.reasons, behind.layers.compiled) == (3, [], True)


def test_equal_seeds_give_equal_losses() -> None:
    model, losses = FAMILIES["bert"].model(dropout=0.2, **SIZES).cuda().train(), []
    ids = sequences(np.random.default_rng(0).integers(3, 60, size=16).tolist())
    batch = padded(ids, None, model.config.pad_token_id) | {"labels": torch.arange(16) % 3}
    batch = {name: value.cuda() for name, value in batch.items()}
    for _ in range(2):
        ours = brimful.packed(copy.deepcopy(model), compiled=True)
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            losses.append([ours(**batch).loss.item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
