"""The last layer for first tokens only against the whole one, by Triton's interpreter; and the device's own layout."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from brimful.data.batches.packing import cut_window
from brimful.data.tokens.encoder import Tokens
from brimful.engine.profiling import profile
from brimful.kernels.attention.dispatch import triton_attention
from brimful.kernels.attention.varlen import attend
from brimful.kernels.dropout import kept_mask_PRC
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers.cls_attention import (
    attend_first,
    attend_first_backward,
    projected_first_attention,
)
from brimful.kernels.layout import pack_numbers, unpack_numbers
from brimful.levers import compiled_layers
from brimful.models.fusion.last_layer import ShorteningBackend
from brimful.models.fusion.recording import Recorded
from brimful.models.model_stats import layers_of
from brimful.models.packed import packed_forward
from brimful.models.packed.packed_forward import PackedForm, PackedModel
from models.fusion.test_fusion import LONG, ONE_LAYER, SHORT, WIDE, gradient, settings_of
from step.test_step import make_step
from tiny import FAMILIES
from tolerances import MODEL_FP32, difference


@pytest.fixture(autouse=True)
def _our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *_: triton_attention)


def tokens_of(lengths: list[int]) -> Tokens:
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, 20, size=offsets[-1]).astype(np.int32)
    return Tokens(ids=ids, offsets=offsets, types=None, truncated=np.zeros(len(lengths), dtype=bool))


#: Of segments; one is empty.
LENGTHS = [3, 70, 1, 0, 130, 64]


def heads_of(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries (N, H, D), keys and values (T, H, D), and offsets."""
    torch.manual_seed(0)
    sizes = len(LENGTHS), sum(LENGTHS), sum(LENGTHS)
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    return *(torch.randn(size, 2, 16).to(dtype) for size in sizes), offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_of_first_tokens(dtype: torch.dtype, p: float) -> None:
    q, k, v, offsets = heads_of(dtype)
    dropout = (torch.tensor(5), 3, 0.3, p)
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
    out, lse = attend_first(q, k_HTD, v_HTD, offsets, *dropout)
    dq, dkv = attend_first_backward(gradient, q, k_HTD, v_HTD, out, lse, offsets, *dropout)
    allowed = 2e-6 if dtype == torch.float32 else 2e-2
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
    firsts, _ = attend_first(queries[places], k.transpose(0, 1), v.transpose(0, 1), offsets, seed, 7, 0.3, 0.4)
    full = torch.tensor(LENGTHS) > 0
    assert torch.allclose(firsts[full], whole.transpose(0, 1)[places][full], atol=1e-5)


def first_attention(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], num_heads: int, scale: float, stays: Tensor, p: float
) -> Tensor:
    """The plain reference, (H, N, D). stays: (H, T, C), what dropout leaves of the weights of each query."""
    q, k, v = (
        F.linear(x[0], w, b).view(x.shape[1], num_heads, -1) for w, b in zip(weights, biases, strict=True)
    )  # fmt: skip
    found, start = [], 0
    for length in LENGTHS:
        scores = torch.einsum("hd,khd->hk", q[min(start, len(q) - 1)], k[start : start + length]) * scale
        kept = torch.softmax(scores, -1) * stays[:, min(start, len(q) - 1), :length] / (1 - p)
        found.append(torch.einsum("hk,khd->hd", kept, v[start : start + length]))
        start += length
    return torch.stack(found, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_projected_attention_of_first_tokens(p: float, bias: bool) -> None:
    """With the gradients of all that it reads; the second site of dropout in its pass."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    x = torch.randn(1, sum(LENGTHS), 32, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(32, 32) * 0.2) for _ in range(3)]
    biases = [torch.nn.Parameter(torch.randn(32) * 0.1) if bias else None for _ in range(3)]
    context = ForwardContext()
    with context.active():
        if p:
            context.dropout_site(x, x.shape[1], p)
        found = projected_first_attention(x, weights, biases, offsets, 2, 0.25, p)
        seed, _ = context.dropout_site(x, x.shape[1], 0.5)
    stays = kept_mask_PRC(seed, 2, sum(LENGTHS), max(LENGTHS), p, site=1)
    expected = first_attention(x, weights, biases, 2, 0.25, stays, p)
    assert torch.allclose(found, expected, atol=2e-6)
    gradient, leaves = torch.randn_like(found), [x, *weights, *(each for each in biases if each is not None)]
    gradient[:, LENGTHS.index(0)] = 0.0  # no logit is made of an empty segment
    for one, other in zip(*(torch.autograd.grad(out, leaves, gradient) for out in (found, expected)), strict=True):
        assert torch.allclose(one, other, atol=2e-5)


def compile_layers(model: Any) -> ShorteningBackend:
    layers: Any = layers_of(model)
    backend = ShorteningBackend(layers[-1], pytest.fail)
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    return backend


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("family", ["bert", "distilbert", "electra", "roberta"])
def test_last_layer_for_first_tokens(family: str) -> None:
    torch.manual_seed(0)
    model: Any = FAMILIES[family].model(**settings_of(family, num_layers=2)).eval()
    form = PackedForm(pooling="first", first_position=2 if family == "roberta" else 0)
    tokens = tokens_of([5, 17, 3, 9, 9])
    (piece,) = cut_window(tokens.lengths, 64, 24, typical_length=9)
    ids = np.concatenate([tokens.sequence(row) for row in piece.rows])
    inputs = unpack_numbers(pack_numbers(ids, tokens.lengths[piece.rows], piece.shape, padding_id=1), piece.shape)
    packed = PackedModel(model, form)
    with torch.inference_mode():
        expected = packed(inputs).logits
        backend = packed.last = compile_layers(model)
        found = packed(inputs).logits
    assert backend.pooled
    assert torch.allclose(found[:5], expected[:5], atol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_training_with_a_last_layer_for_first_tokens(family: str) -> None:
    """Losses and gradients are the whole layer's, and so are logits between steps."""
    model: Any = FAMILIES[family].model(**settings_of(family, num_layers=2))
    plain, short = make_step(copy.deepcopy(model), family=family), make_step(model, family=family)
    packed: Any = short.execution
    backend = packed.last = compile_layers(model)
    for batch in [LONG, SHORT] if family == "bert" else [SHORT]:
        (expected, wanted), (loss, found) = gradient(plain, batch), gradient(short, batch)
        assert backend.pooled
        assert loss == pytest.approx(expected, rel=1e-5)
        assert difference(found, wanted) < MODEL_FP32
    for step in (plain, short):
        step.execution.model.eval()
    inputs = SHORT.micro_batches[0].inputs
    for stance in ("default", "force_eager"):  # evaluation while training is eager
        with torch.no_grad(), torch.compiler.set_stance(stance):
            assert torch.allclose(packed(inputs).logits[:3], plain.execution(inputs).logits[:3], atol=1e-5)
        assert backend.pooled == (stance == "default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_dropout_of_a_last_layer_for_first_tokens_is_that_of_its_seed() -> None:
    model: Any = FAMILIES["bert"].model(dropout=0.3, **ONE_LAYER)
    short, other = make_step(model), make_step(model, seed=1)
    short.execution.last = other.execution.last = compile_layers(model)  # type: ignore[attr-defined]
    (loss, found), (again, same), (another, _) = gradient(short, SHORT), gradient(short, SHORT), gradient(other, SHORT)
    assert short.execution.last.pooled  # type: ignore[attr-defined]
    assert loss == again != another
    assert torch.allclose(found, same, atol=1e-7)  # the embeddings' is added atomically


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("case", "short"), [("first", True), ("mean", False), ("other attention", False), ("shared", False)]
)
def test_which_models_are_compiled_so(case: str, short: bool) -> None:
    model: Any = FAMILIES["bert"].model(**settings_of("bert", num_layers=2))
    layers: Any = layers_of(model)
    if case == "shared":
        layers[0].output.dense.weight = layers[-1].output.dense.weight
    packed = PackedModel(model, PackedForm(pooling="mean" if case == "mean" else "first", first_position=0))
    whole = PackedModel(copy.deepcopy(model), packed.form)
    compiled_layers.compile_layers(packed, fused=case != "other attention", note=pytest.fail, forward_only=True)
    inputs = SHORT.micro_batches[0].inputs
    with torch.inference_mode():
        assert torch.allclose(packed(inputs).logits[:3], whole(inputs).logits[:3], atol=1e-5)
    assert packed.left_out.attention == short


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_is_freed() -> None:
    """Dynamo keeps what layers were compiled to, and so what that holds."""
    model: Any = FAMILIES["bert"].model(**ONE_LAYER)
    step = make_step(model)
    step.execution.last = compile_layers(model)  # type: ignore[attr-defined]
    gradient(step, SHORT)
    kept = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, step
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_the_work_of_a_step_with_a_short_layer() -> None:
    """Keys and values of all tokens; queries, what follows attention and the layer above it of one token a sample."""
    model: Any = FAMILIES["bert"].model(num_hidden_layers=4, **WIDE)
    step = make_step(model)
    built: Any = SimpleNamespace(model=model, step=step)
    whole = profile._work(built, [5, 17, 2], [32], steps=1, optimizer_bytes=0)
    backend = step.execution.last = compile_layers(model)  # type: ignore[attr-defined]
    backend.pooled, backend.shared = True, 2 * 32 * 32
    short = profile._work(built, [5, 17, 2], [32], steps=1, optimizer_bytes=0)
    assert whole.product_flops is not None
    assert whole.attention_flops is not None
    assert short.product_flops == whole.product_flops - 6 * (2 * 32 * 32 + 2 * 32 * 48) * (32 - 3)
    assert short.attention_flops == pytest.approx(whole.attention_flops * 3 / 4)
    assert short.useful_flops == whole.useful_flops


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_code_without_dropout_is_the_model_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is probed in the code that was compiled with dropout; nothing is recorded again."""
    recorded, record = list[Any](), Recorded._record
    monkeypatch.setattr(Recorded, "_record", lambda self, *given: recorded.append(self) or record(self, *given))
    model = FAMILIES["bert"].model(dropout=0.3, hidden_size=32, num_attention_heads=2).train()
    plain = copy.deepcopy(model)
    step = make_step(model)
    compiled_layers.compile_layers(step.execution, fused=True, note=pytest.fail)
    batch = SHORT
    step.probe(batch)
    assert len(recorded) == 2  # layers and embeddings, each once
    found = step.probe(batch)
    assert len(recorded) == 2
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = make_step(plain).probe(batch)
    assert difference(found.losses_N, expected.losses_N) < MODEL_FP32
    pairs = zip(found.gradients, expected.gradients, strict=True)
    whole = [torch.cat([gradient.flatten() for gradient in each]) for each in zip(*pairs, strict=True)]
    assert difference(*whole) < MODEL_FP32
    assert step.execution.left_out.attention
