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
