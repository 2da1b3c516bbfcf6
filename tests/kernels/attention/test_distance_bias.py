"""Attention with a bias by distance: the twin against the formula, padded groups and our kernel against the twin.

The kernel runs on the CPU by Triton's interpreter, in fp32 and fp16: the interpreter has no products in bf16.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from brimful.kernels.attention.dispatch import (
    Attention,
    choose_attention,
    grouped_attention,
    reference_attention,
)
from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.kernels.layout import PackedShape, Segments, make_segments, with_groups
from tolerances import ATTENTION, difference

pytest.importorskip("triton")
from brimful.kernels.attention.distance_bias import attend, relative_attention_HTD
from brimful.kernels.dropout import kept_mask_PRC

HEADS, HEAD_DIM, POSITIONS = 2, 16, 9
SCALE, SEED = 0.25, torch.tensor(123456789123456)
TABLES = ["keys", "queries", "bias", "keys queries bias"]


def row(lengths: list[int], tail: int = 0) -> Segments:
    """Sequences in a row with two empty slots; one more token may be in a sequence than there is in the longest."""
    shape = PackedShape(num_tokens=sum(lengths) + tail, num_slots=len(lengths) + 2, max_length=max(lengths) + 1)
    return with_groups(make_segments(lengths, shape))


def tensors(segments: Segments, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, positions' keys and queries, and a bias, in fp64."""
    random = torch.Generator().manual_seed(seed)
    tokens = (len(segments.segment_T), HEADS, HEAD_DIM)
    made = [torch.randn(tokens, generator=random, dtype=torch.float64).transpose(0, 1) for _ in range(3)]
    made += [torch.randn(HEADS, POSITIONS, HEAD_DIM, generator=random, dtype=torch.float64) * SCALE for _ in range(2)]
    return [*made, torch.randn(HEADS, POSITIONS, generator=random, dtype=torch.float64)]


def buckets(segments: Segments) -> Tensor:
    """Near distances have a row each, far ones share the first and the last."""
    reach = segments.max_length
    return torch.arange(-reach, reach).clamp(-(POSITIONS // 2), POSITIONS // 2) + POSITIONS // 2


def bias_of(given: list[Tensor], segments: Segments, tables: str) -> RelativeBias:
    keys, queries, bias = (x if name in tables else None for name, x in zip(TABLES, given[3:], strict=False))
    return RelativeBias(bucket_W=buckets(segments), keys_HRD=keys, queries_HRD=queries, bias_HR=bias)


def by_formula(given: list[Tensor], segments: Segments, tables: str, dropout: float = 0.0) -> Tensor:
    """Each segment on its own, its scores as the docstring of `RelativeBias` has them."""
    q, k, v, keys, queries, bias = given
    outputs = []
    for start, end in itertools.pairwise(segments.cu_seqlens_N.tolist()):
        place_L = torch.arange(end - start)
        bucket_LL = buckets(segments)[place_L - place_L[:, None] + segments.max_length]
        scores = q[:, start:end] @ k[:, start:end].transpose(1, 2) * SCALE
        if "keys" in tables:
            scores = scores + torch.einsum("hid,hijd->hij", q[:, start:end], keys[:, bucket_LL])
        if "queries" in tables:
            scores = scores + torch.einsum("hjd,hijd->hij", k[:, start:end], queries[:, bucket_LL])
        if "bias" in tables:
            scores = scores + bias[:, bucket_LL]
        weights = torch.softmax(scores, -1)
        if dropout:
            kept = kept_mask_PRC(SEED, HEADS, len(segments.segment_T), end - start, dropout)[:, start:end]
            weights = torch.where(kept, weights / (1 - dropout), 0.0)
        outputs.append(weights @ v[:, start:end])
    return torch.cat(outputs, 1)


def with_gradients(out: Tensor, given: list[Tensor]) -> Tensor:
    """Output and all gradients for a fixed direction."""
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad((out * direction).sum(), given, allow_unused=True)
    return torch.cat([x.detach().double().flatten() for x in (out, *gradients) if x is not None])


def run(attend: Attention, segments: Segments, tables: str, dtype: torch.dtype) -> Tensor:
    given = [x.to(dtype).requires_grad_() for x in tensors(segments)]
    pattern = Pattern(scale=SCALE, relative=bias_of(given, segments, tables))
    return with_gradients(attend(*given[:3], segments, pattern), given)


def expected(segments: Segments, tables: str, dropout: float = 0.0) -> Tensor:
    given = [x.requires_grad_() for x in tensors(segments)]
    return with_gradients(by_formula(given, segments, tables, dropout), given)


@pytest.mark.sampled
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("attend", [reference_attention, grouped_attention])
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), tail=st.sampled_from([0, 1, 30]))
@settings(max_examples=12)
def test_plain_attention_is_the_formula(attend: Attention, tables: str, lengths: list[int], tail: int) -> None:
    segments = row(lengths, tail)
    for dtype, tolerance in ATTENTION.items():
        assert difference(run(attend, segments, tables, dtype), expected(segments, tables)) < tolerance


def test_far_distances_do_not_round_the_gradient_of_their_row() -> None:
    """Most of 300 distances read one row of the table, whose gradient is not summed in bf16."""
    segments = row([300])
    found = run(grouped_attention, segments, "bias", torch.bfloat16)[-HEADS * POSITIONS :]
    assert difference(found, expected(segments, "bias")[-HEADS * POSITIONS :]) < 2e-2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tables", "dropout", "dtype", "tolerance"),
    [
        ("keys", 0.0, torch.float32, 1e-6),
        ("queries", 0.3, torch.float32, 1e-6),
        ("bias", 0.3, torch.float32, 1e-6),
        ("keys queries bias", 0.0, torch.float32, 1e-6),
        ("keys queries bias", 0.3, torch.float16, 2e-3),
    ],
)
def test_the_kernel_is_the_formula(tables: str, dropout: float, dtype: torch.dtype, tolerance: float) -> None:
    """Segments of several blocks, of one token, and empty ones; dropout with the mask of `kept_mask_PRC`."""
    segments = row([5, 70, 1, 33], tail=20)
    given = [x.to(dtype).requires_grad_() for x in tensors(segments)]
    out = kernel(given, segments, tables, dropout)
    assert out.dtype == dtype
    assert difference(with_gradients(out, given), expected(segments, tables, dropout)) < tolerance


def kernel(given: list[Tensor], segments: Segments, tables: str, dropout: float = 0.0) -> Tensor:
    pattern = Pattern(scale=SCALE, dropout=dropout, relative=bias_of(given, segments, tables))
    return relative_attention_HTD(*given[:3], segments, pattern, SEED)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_what_one_sequence_holds_reaches_no_other() -> None:
    segments = row([6, 9, 4])
    spoiled_T = segments.segment_T == 1
    outcomes = []
    for spoil in (False, True):
        given = [x.float() for x in tensors(segments)]
        if spoil:
            for x in given[:3]:
                x[:, spoiled_T] = float("nan")
        given = [x.requires_grad_() for x in given]
        out = kernel(given, segments, "keys queries")
        gradients = torch.autograd.grad(out[:, ~spoiled_T].sum(), given[:3])
        outcomes.append([x[:, ~spoiled_T] for x in (out, *gradients)])
    assert all(torch.equal(before, after) for before, after in zip(*outcomes, strict=True))


def test_the_compiler_is_told_of_the_shapes() -> None:
    segments = row([3, 2])
    q, k, v, keys, queries, bias = (x.float().requires_grad_() for x in tensors(segments))
    arguments = (q, k, v, keys, queries, bias, buckets(segments), segments.cu_seqlens_N, SEED, 4, SCALE, 0.0)
    torch.library.opcheck(
        attend, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_what_it_refuses() -> None:
    segments = row([3])
    given = tensors(segments)
    with pytest.raises(ValueError, match="no table"):
        kernel(given, segments, "")
    with pytest.raises(ValueError, match="8 distances do not reach over segments of 5 tokens"):
        relative_attention_HTD(
            *given[:3], replace(segments, max_length=5), Pattern(scale=SCALE, relative=bias_of(given, segments, "keys"))
        )


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "changes", "name"),
    [
        ("cpu", torch.float32, 64, {}, "grouped_attention"),
        ("cuda", torch.bfloat16, 64, {}, "relative_attention"),
        ("cuda", torch.float32, 32, {}, "relative_attention"),
        ("cuda", torch.float16, 96, {}, "grouped_attention"),
        ("cuda", torch.float16, 64, {"causal": True}, "grouped_attention"),
        ("cuda", torch.float64, 64, {}, "grouped_attention"),
    ],
)
def test_the_kernel_chosen(device: str, dtype: torch.dtype, head_dim: int, changes: dict[str, bool], name: str) -> None:
    pattern = Pattern(scale=1.0, relative=RelativeBias(bucket_W=torch.empty(0)), **changes)
    assert choose_attention(torch.device(device), dtype, pattern, head_dim, 30).__name__ == name
