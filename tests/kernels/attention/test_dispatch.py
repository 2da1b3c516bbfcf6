"""Attention on packed rows: the fast way against the plain reference, and the plain reference against the formula."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from brimful.kernels.attention.dispatch import (
    Attention,
    choose_attention,
    grouped_attention,
    reference_attention,
)
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import PackedShape, Segments, make_segments, with_groups
from tolerances import ATTENTION, difference

Qkv = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Sequences in a row of a shape, with the heads and the pattern of attention."""

    lengths: tuple[int, ...]
    tail: int
    spare_slots: int
    longest: int
    key_heads: int
    repeats: int
    head_dim: int
    pattern: Pattern
    seed: int

    @property
    def segments(self) -> Segments:
        total = sum(self.lengths) + self.tail
        slots = len(self.lengths) + self.spare_slots
        return with_groups(
            make_segments(self.lengths, PackedShape(num_tokens=total, num_slots=slots, max_length=self.longest))
        )

    def qkv(self, dtype: torch.dtype) -> Qkv:
        random = torch.Generator().manual_seed(self.seed)
        total = sum(self.lengths) + self.tail
        heads = (self.key_heads * self.repeats, self.key_heads, self.key_heads)
        q, k, v = (torch.randn(h, total, self.head_dim, generator=random, dtype=torch.float64) for h in heads)
        return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


patterns = st.builds(
    Pattern,
    scale=st.sampled_from([0.25, 0.5, 1.0]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 24),
    softcap=st.none() | st.sampled_from([0.5, 2.0, 30.0]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=8)))
    longest = max(lengths) + draw(st.integers(0, 4))
    return Case(
        lengths=lengths,
        tail=draw(st.sampled_from([0, 1, 5, longest, 2 * longest + 3])),
        spare_slots=draw(st.integers(0, 3)),
        longest=longest,
        key_heads=draw(st.integers(1, 2)),
        repeats=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([4, 8])),
        pattern=draw(patterns),
        seed=draw(st.integers(0, 99)),
    )


def by_formula(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """Attention of each segment and head on its own, as papers write it."""
    offsets = segments.cu_seqlens_N.tolist()
    repeats = q_HTD.shape[0] // k_KTD.shape[0]
    heads = []
    for head in range(q_HTD.shape[0]):
        parts = []
        for start, end in itertools.pairwise(offsets):
            q, k, v = q_HTD[head, start:end], k_KTD[head // repeats, start:end], v_KTD[head // repeats, start:end]
            scores = q @ k.T * pattern.scale
            if pattern.softcap is not None:
                scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
            for i in range(end - start):
                for j in range(end - start):
                    ahead = pattern.causal and j > i
                    far = pattern.window is not None and abs(i - j) >= pattern.window
                    if ahead or far:
                        scores[i, j] = -math.inf
            parts.append(torch.softmax(scores, -1) @ v)
        heads.append(torch.cat(parts))
    return torch.stack(heads)


def with_gradient(attend: Attention, qkv: Qkv, case: Case) -> tuple[Tensor, Tensor]:
    """Output and the gradient of all inputs together, for a fixed direction."""
    out_HTD = attend(*qkv, case.segments, case.pattern)
    direction = torch.randn(out_HTD.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out_HTD * direction.to(out_HTD.dtype)).sum(), qkv)
    return out_HTD, torch.cat([g.flatten() for g in gradients])


@given(case=cases())
@settings(max_examples=25)
def test_the_plain_reference_is_the_formula(case: Case) -> None:
    qkv = case.qkv(torch.float64)
    found = reference_attention(*qkv, case.segments, case.pattern)
    assert difference(found, by_formula(*(x.detach() for x in qkv), case.segments, case.pattern)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(case=cases())
@settings(max_examples=100)
@example(
    case=Case((1, 1, 1), 0, 0, 1, 1, 1, 4, Pattern(scale=0.5, causal=True, window=1), 0)
)  # tokens that see themselves alone
def test_grouped_is_the_plain_reference(dtype: torch.dtype, case: Case) -> None:
    found, found_gradient = with_gradient(grouped_attention, case.qkv(dtype), case)
    expected, expected_gradient = with_gradient(reference_attention, case.qkv(dtype), case)
    assert found.dtype == dtype
    assert difference(found, expected) < ATTENTION[dtype]
    assert difference(found_gradient, expected_gradient) < ATTENTION[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("value", [3.0, math.nan, math.inf])
@given(case=cases(), data=st.data())
@settings(max_examples=40)
def test_nothing_leaks_between_sequences(value: float, case: Case, data: st.DataObject) -> None:
    """A sequence's content, even if not a number, leaves every bit of the others' outputs and gradients alone."""
    touched = data.draw(st.integers(0, len(case.lengths) - 1))
    start = sum(case.lengths[:touched])
    inside_T = torch.zeros(sum(case.lengths) + case.tail, dtype=torch.bool)
    inside_T[start : start + case.lengths[touched]] = True
    outcomes = []
    for spoiled in (False, True):
        qkv = case.qkv(torch.float32)
        with torch.no_grad():
            for x in qkv if spoiled else ():
                x[:, inside_T] = value
        out_HTD = grouped_attention(*qkv, case.segments, case.pattern)
        gradients = torch.autograd.grad(out_HTD.sum(), qkv)
        outcomes.append([t[:, ~inside_T] for t in (out_HTD, *gradients)])
    assert all(torch.equal(before, after) for before, after in zip(*outcomes, strict=True))


@given(case=cases())
@settings(max_examples=25)
def test_a_tail_has_no_part_in_any_gradient(case: Case) -> None:
    qkv = case.qkv(torch.float64)
    used = sum(case.lengths)
    out_HTD = grouped_attention(*qkv, case.segments, case.pattern)
    gradients = torch.autograd.grad(out_HTD[:, :used].square().sum(), qkv)
    assert all(not g[:, used:].any() for g in gradients)


def test_groups_are_asked_for() -> None:
    segments = make_segments([3], PackedShape(num_tokens=4, num_slots=1, max_length=4))
    q = torch.zeros(1, 4, 4)
    with pytest.raises(ValueError, match="with_groups"):
        grouped_attention(q, q, q, segments, Pattern(scale=1.0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_keeps_the_mean(softcap: float | None, causal: bool) -> None:
    segments = with_groups(make_segments([40, 24], PackedShape(num_tokens=64, num_slots=2, max_length=64)))
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 8, generator=random), torch.randn(2, 64, 8, generator=random)
    v = torch.ones(2, 64, 8)
    torch.manual_seed(0)
    pattern = Pattern(scale=0.3, softcap=softcap, dropout=0.25, causal=causal)
    runs = [grouped_attention(q, k, v, segments, pattern) for _ in range(60)]
    assert not torch.equal(runs[0], runs[1])
    assert abs(float(torch.stack(runs).mean()) - 1) < 0.02


@pytest.mark.parametrize(
    ("device", "dtype", "pattern", "head_dim", "name"),
    [
        ("cpu", torch.float32, Pattern(scale=1.0), 64, "grouped_attention"),
        ("cpu", torch.bfloat16, Pattern(scale=1.0), 64, "grouped_attention"),
        ("cuda", torch.bfloat16, Pattern(scale=1.0, window=8), 64, "flash_attention"),
        ("cuda", torch.float16, Pattern(scale=1.0, causal=True), 64, "flash_attention"),
        ("cuda", torch.float16, Pattern(scale=1.0, softcap=5.0), 64, "triton_attention"),
        ("cuda", torch.float16, Pattern(scale=1.0, softcap=5.0), 96, "grouped_attention"),
        ("cuda", torch.float32, Pattern(scale=1.0), 64, "efficient_attention"),
        ("cuda", torch.float32, Pattern(scale=1.0, window=8), 64, "triton_attention"),
        ("cuda", torch.float64, Pattern(scale=1.0), 64, "grouped_attention"),
    ],
)
def test_the_kernel_chosen(device: str, dtype: torch.dtype, pattern: Pattern, head_dim: int, name: str) -> None:
    assert choose_attention(torch.device(device), dtype, pattern, head_dim).__name__ == name


@pytest.mark.parametrize(("length", "name"), [(30, "triton_attention"), (700, "flash_attention")])
def test_short_sequences_have_a_kernel_of_their_own(length: int, name: str) -> None:
    chosen = choose_attention(torch.device("cuda"), torch.bfloat16, Pattern(scale=1.0), 64, length)
    assert chosen.__name__ == name
