"""The last layer for first tokens only against the whole one, by Triton's interpreter; and the device's own layout."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from brimful.data.packing import cut_window
from brimful.data.tokens import Tokens
from brimful.kernels.attention import triton_attention
from brimful.kernels.dropout import kept_mask_PRC
from brimful.kernels.first_token import Dropout, attend_first, attend_first_backward
from brimful.kernels.varlen import attend
from brimful.models import execution
from brimful.models.anatomy import layers_of
from brimful.models.execution import PackedExecution, PackedForm
from brimful.models.pooled import ShorteningBackend
from brimful.step.forward import stage, unstage
from models.test_fusion import LONG, ONE_LAYER, SHORT, gradient, settings_of
from step.test_step import make_step
from tiny import FAMILIES
from tolerances import MODEL_FP32, difference


@pytest.fixture(autouse=True)
def _our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(execution, "choose_attention", lambda *_: triton_attention)


def tokens_of(lengths: list[int]) -> Tokens:
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, 20, size=offsets[-1]).astype(np.int32)
    return Tokens(ids=ids, offsets=offsets, types=None, truncated=np.zeros(len(lengths), dtype=bool))


#: Of segments; one is empty.
LENGTHS = [3, 70, 1, 0, 130, 64]


def heads_of(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries (N, H, D), keys and values (T, H, D), and offsets."""
    torch.manual_seed(0)
    sizes = len(LENGTHS), sum(LENGTHS), sum(LENGTHS)
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    return *(torch.randn(size, 2, 16).to(dtype) for size in sizes), offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_of_first_tokens(dtype: torch.dtype, p: float) -> None:
    q, k, v, offsets = heads_of(dtype)
    drawn = Dropout(p, torch.tensor(5), 3) if p else None
    stays_HTC = kept_mask_PRC(torch.tensor(5), 2, sum(LENGTHS), max(LENGTHS), p, site=3)
    wide = [each.double().requires_grad_() for each in (q, k, v)]
    gradient = torch.randn_like(q)
    expected = []
    for segment, length in enumerate(LENGTHS):
        start = int(offsets[segment])
        keys, values = (x[start : start + length] for x in wide[1:])
        weights = torch.softmax(torch.einsum("hd,khd->hk", wide[0][segment], keys) * 0.3, -1)
        if p and length:
            weights = weights * stays_HTC[:, start, :length] / (1 - p)
        expected.append(torch.einsum("hk,khd->hd", weights, values))
    torch.stack(expected).backward(gradient.double())
    k_HTD, v_HTD = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = attend_first(q, k_HTD, v_HTD, offsets, 0.3, drawn)
    dq, dkv = attend_first_backward(gradient, q, k_HTD, v_HTD, out, lse, offsets, 0.3, drawn)
    allowed = 2e-6 if dtype == torch.float32 else 3e-2
    assert torch.allclose(out.double(), torch.stack(expected), atol=allowed)
    for found, x in zip((dq, *dkv.unbind(1)), wide, strict=True):
        assert x.grad is not None
        assert torch.allclose(found.double(), x.grad, atol=allowed)


def test_first_tokens_lose_the_weights_that_they_lose_among_all() -> None:
    _, k, v, offsets = heads_of(torch.float32)
    queries, seed = torch.randn_like(k), torch.tensor(11)
    whole, _, _ = attend(
        *(x.transpose(0, 1) for x in (queries, k, v)), offsets, seed, 130, 40, 0.3, False, 0, 0.0, 0.4, 7
    )
    places = offsets[:-1].long()
    firsts, _ = attend_first(queries[places], k.transpose(0, 1), v.transpose(0, 1), offsets, 0.3, Dropout(0.4, seed, 7))
    full = torch.tensor(LENGTHS) > 0
    assert torch.allclose(firsts[full], whole.transpose(0, 1)[places][full], atol=1e-5)


def compile_layers(model: Any) -> ShorteningBackend:
    layers: Any = layers_of(model)
    backend = ShorteningBackend(layers[-1], pytest.fail)
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    return backend


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
        backend = packed.last = compile_layers(model)
        found = packed(inputs)
    assert backend.pooled
    assert torch.allclose(found[:5], expected[:5], atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_training_with_a_last_layer_for_first_tokens(family: str) -> None:
    """Losses and gradients are the whole layer's, and so are logits between steps."""
    model: Any = FAMILIES[family].model(**settings_of(family))
    plain, short = make_step(copy.deepcopy(model), family=family), make_step(model, family=family)
    packed: Any = short.execution
    backend = packed.last = compile_layers(model)
    for batch in (LONG, SHORT):
        (expected, wanted), (loss, found) = gradient(plain, batch), gradient(short, batch)
        assert backend.pooled
        assert loss == pytest.approx(expected, rel=1e-5)
        assert difference(found, wanted) < MODEL_FP32
    for step in (plain, short):
        step.execution.model.eval()
    inputs = SHORT.micro_batches[0].inputs
    for stance in ("default", "force_eager"):  # evaluation while training is eager
        with torch.no_grad(), torch.compiler.set_stance(stance):
            assert torch.allclose(packed(inputs)[:3], plain.execution(inputs)[:3], atol=1e-5)
        assert backend.pooled == (stance == "default")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_dropout_of_a_last_layer_for_first_tokens_is_that_of_its_seed() -> None:
    model: Any = FAMILIES["bert"].model(dropout=0.3, **ONE_LAYER)
    short, other = make_step(model), make_step(model, seed=1)
    short.execution.last = other.execution.last = compile_layers(model)  # type: ignore[attr-defined]
    (loss, found), (again, same), (another, _) = gradient(short, SHORT), gradient(short, SHORT), gradient(other, SHORT)
    assert loss == again != another
    assert torch.allclose(found, same, atol=1e-7)  # the embeddings' is added atomically
