"""The last layer for first tokens only against the whole one, by Triton's interpreter; and the device's own layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from brimful.data.packing import cut_window
from brimful.data.tokens import Tokens
from brimful.kernels.attention import triton_attention
from brimful.kernels.first_token import attend_first
from brimful.models import execution
from brimful.models.anatomy import layers_of
from brimful.models.execution import PackedExecution, PackedForm
from brimful.models.fusion import layer_backend
from brimful.models.pooled import LastLayer
from brimful.step.forward import stage, unstage
from models.test_fusion import settings_of
from tiny import FAMILIES


@pytest.fixture(autouse=True)
def _our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(execution, "choose_attention", lambda *_: triton_attention)


def tokens_of(lengths: list[int]) -> Tokens:
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, 20, size=offsets[-1]).astype(np.int32)
    return Tokens(ids=ids, offsets=offsets, types=None, truncated=np.zeros(len(lengths), dtype=bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_first_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [3, 70, 1, 0, 130, 64]
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, 16).to(dtype) for n in (len(lengths), sum(lengths), sum(lengths)))
    found = attend_first(q, k.transpose(0, 1), v.transpose(0, 1), offsets, 0.3)
    for segment, length in enumerate(lengths):
        start = int(offsets[segment])
        keys, values = (x[start : start + length].double() for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[segment].double(), keys) * 0.3, -1)
        expected = torch.einsum("hk,khd->hd", weights, values)
        assert torch.allclose(found[segment].double(), expected, atol=2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("family", ["bert", "distilbert", "electra", "roberta"])
def test_last_layer_for_first_tokens(family: str) -> None:
    torch.manual_seed(0)
    model: Any = FAMILIES[family].model(**settings_of(family)).eval()
    form = PackedForm(pooling="first", first_position=2 if family == "roberta" else 0)
    tokens = tokens_of([5, 17, 3, 9, 9])
    (piece,) = cut_window(tokens.lengths, 64, 24)
    shape = (piece.num_tokens, piece.num_slots, piece.max_length)
    inputs = unstage(torch.from_numpy(stage(piece, tokens, 1)), shape, False, 9)
    packed = PackedExecution(model, form)
    with torch.inference_mode():
        expected = packed(inputs)
        layers: Any = layers_of(model)
        backend = LastLayer(pytest.fail)
        for layer in layers[:-1]:
            layer.compile(dynamic=True, backend=partial(layer_backend, note=pytest.fail))
        layers[-1].compile(dynamic=True, backend=backend)
        packed.last = backend
        found = packed(inputs)
    assert backend.pooled
    assert torch.allclose(found[:5], expected[:5], atol=1e-5)
