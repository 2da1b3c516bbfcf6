"""Fused pieces of pre-norm layers against the compositions that they stand for: values, and gradients of all inputs.

On the CPU by Triton's interpreter, in fp32 and bf16; `tests/gpu/test_layers_on_gpu.py` runs the same on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.kernels.attention.pattern import Heads
from brimful.kernels.layout import PackedShape, make_segments

pytest.importorskip("triton")

from brimful.kernels.attention import qkv_rope
from brimful.kernels.dropout import kept_mask_PRC
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers import dropout_add_prenorm, glu, postnorm_ops
from brimful.kernels.layers import prenorm_ops as pre
from kernels.layers.test_postnorm_ops import Case, seed_of
from tolerances import difference

EPS = 1e-6
T, H, WIDE = 40, 48, 72  # tokens where segments matter
ROWS = 13  # and where they do not: the interpreter takes its time for each
SHAPE = PackedShape(num_tokens=T, num_slots=3, max_length=24)
PRECISIONS = [torch.float32, torch.bfloat16]


@pytest.fixture(params=PRECISIONS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case("cpu", request.param)


def stream(case: Case) -> Tensor:
    """The stream of residuals, fp32."""
    return case.leaf(1, ROWS, H, dtype=torch.float32)


def rows(case: Case, width: int = H) -> Tensor:
    return case.leaf(1, ROWS, width)


def gain(case: Case, width: int = H) -> Tensor:
    return case.leaf(width, dtype=torch.float32)


def both(y_and_z: tuple[Tensor, Tensor]) -> Tensor:
    """The normalised rows and the stream itself, as they are both read."""
    return torch.cat([each.float() if each.dtype != torch.float64 else each for each in y_and_z], -1)


def plain_norm(x: Tensor, g: Tensor, centred: bool) -> Tensor:
    return F.layer_norm(x, (H,), g, None, EPS) if centred else F.rms_norm(x, (H,), g, EPS)


def check_norm(case: Case, *, centred: bool) -> None:
    case.check(
        lambda x, g: both(pre.norm(x, g, EPS, centred)),
        lambda x, g: both((plain_norm(x, g, centred), x)),
        stream(case),
        gain(case),
    )


def check_add_norm(case: Case, p: float, *, centred: bool, bias: bool = False) -> None:
    seed = seed_of(case)

    def plain(x: Tensor, r: Tensor, g: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        z, y = dropout_add_prenorm.add_norm(F.linear(x, w, b)[0], r[0], g, EPS, p, seed, centred=centred)
        return both((y, z))[None]

    def ours(x: Tensor, r: Tensor, g: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return both(pre.linear_add_norm(x, w, b, r, g, EPS, p, centred))

    w, b = case.linear(WIDE, H)
    case.check(ours, plain, rows(case, WIDE), stream(case), gain(case), *([w, b] if bias else [w]))


def check_add(case: Case, p: float) -> None:
    seed = seed_of(case)
    mask_TH = kept_mask_PRC(seed, 1, ROWS, H, p)[0]

    def plain(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return r + torch.where(mask_TH, F.linear(x, w, b) / (1 - p), 0.0)

    case.check(
        lambda x, w, b, r: pre.linear_add(x, w, b, r, p), plain, rows(case, WIDE), *case.linear(WIDE, H), stream(case)
    )


def check_gated(case: Case, activation: glu.Activation, p: float, *, apart: bool = False) -> None:
    seed = seed_of(case)

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return glu.gated(F.linear(x[0], w, b), activation, p, seed)[None]

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        weights, biases = ([each.clone() for each in t.chunk(2)] if apart else [t] for t in (w, b))
        return pre.linear_gated(x, weights, biases, activation, p)

    case.check(ours, plain, rows(case), *case.linear(H, 2 * WIDE))


def check_attention(
    case: Case, p: float, *, queries: int = 4, keys: int = 4, normed: bool = False, packed: bool = False,
    window: int = 0, causal: bool = False,
) -> None:  # fmt: skip
    """window: a token sees those nearer than this. packed: one weight for all projections, else three."""
    seed, size = seed_of(case), 16
    segments = make_segments([5, 24, 1], SHAPE)
    cu_seqlens_N = segments.cu_seqlens_N.to(case.device)
    column_T = torch.arange(T) - segments.cu_seqlens_N.long()[segments.segment_T]
    distance_TT = column_T[:, None] - column_T
    seen_TT = segments.segment_T[:, None] == segments.segment_T
    if causal:
        seen_TT = seen_TT & (distance_TT >= 0)
    if window:
        seen_TT = seen_TT & (distance_TT.abs() < window)
    kept_HTT = kept_mask_PRC(seed, queries, T, SHAPE.max_length, p).gather(2, column_T.expand(queries, T, T))
    angles_TD = torch.randn(2, T, size, generator=torch.Generator().manual_seed(3))

    def plain(x: Tensor, weight: Tensor, *gains: Tensor) -> Tensor:
        norm = (
            qkv_rope.HeadNorm(query_gain=gains[0], key_gain=gains[1], query_eps=EPS, key_eps=2 * EPS) if gains else None
        )
        found = qkv_rope.separate_heads(F.linear(x[0], weight), *angles_TD.to(x), queries, keys, norm)
        q, k, v = found.transpose(0, 2).unbind(1)
        weights = torch.softmax((q @ k.transpose(1, 2) * 0.25).masked_fill(~seen_TT, float("-inf")), -1)
        return torch.where(kept_HTT, weights / (1 - p), 0.0) @ v

    def ours(x: Tensor, weight: Tensor, *gains: Tensor) -> Tensor:
        weights = [weight] if packed else [t.clone() for t in weight.split([queries * size] + [keys * size] * 2)]
        settings = (SHAPE.max_length, 30, 0.25, causal, window, 0.0, p)
        cos, sin = angles_TD[:, None].to(case.device)
        return pre.rotary_attention(
            x, weights, [None] * len(weights), gains or (None, None), (EPS, 2 * EPS), cos, sin, cu_seqlens_N, queries,
            keys, size, settings,
        )  # fmt: skip

    weight, _ = case.linear(H, (queries + 2 * keys) * size)
    gains = [gain(case, size), gain(case, size)] if normed else []
    case.check(ours, plain, case.leaf(1, T, H), weight, *gains)


def check_heads(case: Case, keys: int, *, normed: bool) -> None:
    """The kernel alone, which the interpreter runs in bf16 too; attention itself it does not."""
    each = Heads(queries=4, keys=keys, size=16)
    angles = torch.randn(2, T, 16, generator=torch.Generator().manual_seed(3))
    x, gains = case.leaf(T, (4 + 2 * keys) * 16), [gain(case, 16), gain(case, 16)]
    norm = qkv_rope.HeadNorm(query_gain=gains[0], key_gain=gains[1], query_eps=EPS, key_eps=2 * EPS) if normed else None
    cos, sin = angles.to(case.device)
    plain = qkv_rope.separate_heads(x.float(), cos, sin, 4, keys, norm)
    direction = torch.randn(plain.shape, generator=torch.Generator().manual_seed(4)).to(case.device, case.half)
    wanted = torch.autograd.grad((plain * direction).sum(), [x, *gains], allow_unused=True)
    with torch.no_grad():
        found = qkv_rope.fused_forward(x.clone(), cos, sin, each, norm)
        dx, partials = qkv_rope.fused_backward(direction.clone(), x if normed else None, cos, sin, each, norm)
    tolerance = 1e-5 if case.half == torch.float32 else 1e-2
    assert difference(found, plain) < tolerance
    assert difference(dx, wanted[0]) < tolerance
    assert (partials is None) == (norm is None)
    if partials is not None and norm is not None:
        for one, other in zip(qkv_rope.gain_gradients(partials, norm), wanted[1:], strict=True):
            assert difference(one, other) < tolerance


def check_chain(case: Case) -> None:
    """A whole layer's stream: forked twice, added to twice, and one more norm behind it, as the next layer has."""

    def plain(x: Tensor, g1: Tensor, w1: Tensor, g2: Tensor, w2: Tensor, w3: Tensor, g3: Tensor) -> Tensor:
        x = x + F.linear(plain_norm(x, g1, True), w1)
        x = x + F.linear(glu.gated(F.linear(plain_norm(x, g2, True), w2)[0], "gelu", 0.0, torch.tensor(0)), w3)
        return both((plain_norm(x, g3, True), x))

    def ours(x: Tensor, g1: Tensor, w1: Tensor, g2: Tensor, w2: Tensor, w3: Tensor, g3: Tensor) -> Tensor:
        y, x = pre.norm(x, g1, EPS, True)
        y, x = pre.linear_add_norm(y, w1, None, x, g2, EPS, 0.0, True)
        x = pre.linear_add(pre.linear_gated(y, [w2], [None], "gelu", 0.0), w3, None, x, 0.0)
        return both(pre.norm(x, g3, EPS, True))

    w1, w2, w3 = (case.linear(*shape)[0] for shape in ((H, H), (H, 2 * WIDE), (WIDE, H)))
    case.check(ours, plain, stream(case), gain(case), w1, gain(case), w2, w3, gain(case))


@pytest.mark.parametrize("centred", [True, False])
def test_norm(case: Case, centred: bool) -> None:
    check_norm(case, centred=centred)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_linear_add_norm(case: Case, p: float, centred: bool) -> None:
    check_add_norm(case, p, centred=centred, bias=p == 0)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_linear_add(case: Case, p: float) -> None:
    check_add(case, p)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_linear_gated(case: Case, activation: glu.Activation, p: float) -> None:
    check_gated(case, activation, p, apart=p == 0)


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [4, 2, 1])
@pytest.mark.parametrize("normed", [False, True])
def test_heads(case: Case, keys: int, normed: bool) -> None:
    check_heads(case, keys, normed=normed)


ATTENTION: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    "a window and dropout": {"p": 0.3, "packed": True, "window": 9},
    "a window longer than segments": {"window": 100},
    "grouped": {"keys": 1, "causal": True, "p": 0.3},
    "normed and grouped": {"normed": True, "keys": 2, "causal": True},
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ATTENTION)
def test_rotary_attention(kind: str) -> None:
    check_attention(Case(), **{"p": 0.0} | ATTENTION[kind])


def test_rotary_attention_in_half_precision() -> None:
    check_attention(Case(half=torch.float16), 0.0, normed=True, keys=2, window=9)


def test_a_stream_of_residuals(case: Case) -> None:
    check_chain(case)


def test_a_gradient_carries_its_cast_copy_to_the_product_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not cast a second time."""
    seen: list[bool] = []
    cast = ForwardContext.cast

    def watched(self: ForwardContext, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not torch.is_grad_enabled():  # a backward pass
            seen.append(x in self._casts)
        return cast(self, x, dtype)

    monkeypatch.setattr(ForwardContext, "cast", watched)
    case = Case(half=torch.bfloat16)
    check_chain(case)
    assert seen == [True]


def test_a_stream_in_half_precision() -> None:
    """Without autocast everything is in the model's dtype."""
    x, w, g = (torch.randn(*shape).bfloat16() for shape in ((1, 6, H), (H, H), (H,)))
    y, z = pre.linear_add_norm(x, w, None, x, g, EPS, 0.0, False)
    assert y.dtype == z.dtype == torch.bfloat16


def test_a_residual_must_fit() -> None:
    x, w, r = torch.randn(1, 6, WIDE), torch.randn(H, WIDE), torch.randn(1, 1, H)
    with pytest.raises(ValueError, match="residual"):
        pre.linear_add(x, w, None, r, 0.0)
    with pytest.raises(ValueError, match="residual"):
        pre.linear_add_norm(x, w, None, r, torch.ones(H), EPS, 0.0, True)


def test_projections_of_different_heights_side_by_side() -> None:
    whole = torch.randn(14, 8)
    packed = postnorm_ops.side_by_side(list(whole.split([8, 3, 3])), torch.float32)
    assert packed.data_ptr() == whole.data_ptr()
    assert torch.equal(packed, whole)
    crossed = [whole[:8], whole[11:], whole[8:11]]
    assert torch.equal(postnorm_ops.side_by_side(crossed, torch.float32), torch.cat(crossed))
