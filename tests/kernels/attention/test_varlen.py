"""Our Triton kernel against plain attention, on the CPU by Triton's interpreter: forward, backward, dropout mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from brimful.kernels.layout import PackedShape, make_segments

pytest.importorskip("triton")
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.attention.varlen import supports, varlen_attention_HTD
from brimful.kernels.dropout import kept_mask_PRC

LENGTHS = [5, 70, 1, 33]
SHAPE = PackedShape(num_tokens=160, num_slots=6, max_length=80)
SEED = torch.tensor(123456789123456)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, softcap: float | None, p: float) -> Tensor:
    """Attention by its definition, in fp64, with the mask that the kernel is to draw."""
    segments = make_segments(LENGTHS, SHAPE)
    place_T = torch.arange(q.shape[1])
    distance_TT = place_T[:, None] - place_T
    seen = segments.segment_T[:, None] == segments.segment_T
    if causal:
        seen &= distance_TT >= 0
    if window is not None:
        seen &= distance_TT.abs() < window
    scores = q @ k.transpose(1, 2) * 0.25
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    if p:
        kept_HTL = kept_mask_PRC(SEED, len(q), q.shape[1], SHAPE.max_length, p)
        column_T = place_T - segments.cu_seqlens_N.long()[segments.segment_T]
        weights = torch.where(kept_HTL.gather(2, column_T.expand_as(weights)), weights / (1 - p), 0.0)
    return weights @ v


@pytest.mark.sampled
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_to_plain_attention(causal: bool, window: int | None, softcap: float | None, dropout: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(160, 2, 16, generator=generator).transpose(0, 1) for _ in range(4))
    ours = [x.clone().requires_grad_(True) for x in (q, k, v)]
    twins = [x.double().requires_grad_(True) for x in (q, k, v)]
    pattern = Pattern(scale=0.25, causal=causal, window=window, softcap=softcap, dropout=dropout)
    out = varlen_attention_HTD(*ours, make_segments(LENGTHS, SHAPE), pattern, SEED)
    expected = plain(*twins, causal, window, softcap, dropout)
    out.backward(g)
    expected.backward(g.double())
    found = torch.cat([x.double().flatten() for x in (out, *[x.grad for x in ours])])
    wanted = torch.cat([x.flatten() for x in (expected, *[x.grad for x in twins])])
    assert float(((found - wanted).norm() / wanted.norm()).detach()) < 1e-6


def test_the_mask_keeps_the_share_it_should() -> None:
    segments = make_segments(LENGTHS, SHAPE)
    kept = [kept_mask_PRC(torch.tensor(seed), 12, len(segments.segment_T), 80, 0.1) for seed in (1, 2, 2**40)]
    for mask in kept:
        assert float(mask.float().mean()) == pytest.approx(0.9, abs=0.003)
        assert float(mask.float().mean((1, 2)).std()) < 0.01  # heads
        assert float((mask[:, 1:] == mask[:, :-1]).float().mean()) == pytest.approx(0.82, abs=0.01)  # rows
        assert float((mask[:, :, 1:] == mask[:, :, :-1]).float().mean()) == pytest.approx(0.82, abs=0.01)  # keys
    assert not torch.equal(kept[0], kept[1])
    assert float((kept[1] == kept[2]).float().mean()) == pytest.approx(0.82, abs=0.01)


def test_what_it_takes() -> None:
    assert supports(torch.bfloat16, 64)
    assert not supports(torch.float64, 64)
    assert not supports(torch.float32, 96)


@pytest.mark.sampled
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 21)])
def test_long_segments_in_half_precision(
    causal: bool, window: int | None, dropout: float, softcap: float | None
) -> None:
    """The tiles of long segments: whole blocks and the last one in loops of their own, row sums read, not made."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(160, 2, 16, generator=generator).half().transpose(0, 1) for _ in range(4))
    ours = [x.clone().requires_grad_(True) for x in (q, k, v)]
    twins = [x.double().requires_grad_(True) for x in (q, k, v)]
    pattern = Pattern(scale=0.25, causal=causal, window=window, softcap=softcap, dropout=dropout)
    out = varlen_attention_HTD(*ours, make_segments(LENGTHS, replace(SHAPE, typical_length=200)), pattern, SEED)
    expected = plain(*twins, causal, window, softcap, dropout)
    out.backward(g)
    expected.backward(g.double())
    for found, wanted in zip((out, *[x.grad for x in ours]), (expected, *[x.grad for x in twins]), strict=True):
        assert float(((found.double() - wanted).norm() / wanted.norm()).detach()) < 5e-4
