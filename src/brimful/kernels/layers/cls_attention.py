"""Attention of the first token of each segment only: all that a classifier with a first-token head reads.

In the last layer such a model needs keys and values of all tokens, and everything else of one token a sequence: what
the others would be, no logit and so no gradient depends on.

One program works on one head of one segment, forward and backward. Dropout draws the mask that `varlen_kernels` draws
for the same query, and draws it again in the backward pass.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from brimful.kernels.attention.varlen_kernels import head_rows
from brimful.kernels.dropout import kept_at, kept_factor, row_keys, threshold
from brimful.kernels.forward_context import current
from brimful.kernels.layers.postnorm_ops import (
    Gradients,
    _are_learned,
    _are_leaves,
    _input_gradient,
    _multiply,
    _weight_gradients,
    gradient_dtype,
    halved,
    side_by_side,
)
from brimful.kernels.rng import row_seeds

_LOG2_E = 1.4426950408889634
#: Keys that a program takes at a time.
_BLOCK = 64


@triton.jit
def _mask_row(SEED, site, head, start, length):
    """Key of the dropout mask's row of the segment's first query, (1,)."""
    rows = start + tl.zeros([1], tl.int32)
    return row_keys(SEED, site, head, rows, rows < start + length)


@triton.jit(do_not_specialize=["site"])
def first_token_attention_forward(
    Q, K, V, OUT, LSE, CU_SEQLENS, SEED, site, q_n, q_h, k_t, k_h, v_t, v_h, o_n, o_h, power, drop_below, more,
    DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(CU_SEQLENS + segment)
    length = tl.load(CU_SEQLENS + segment + 1) - start
    channels = tl.arange(0, D)
    q = tl.load(Q + segment.to(tl.int64) * q_n + head * q_h + channels).to(tl.float32) * power
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    out = tl.zeros([D], tl.float32)
    mask_row = tl.zeros([1], tl.uint32)
    if DROPOUT:
        mask_row = _mask_row(SEED, site, head, start, length)
    for place in range(0, length, BLOCK):
        rows = place + tl.arange(0, BLOCK)
        k = head_rows(K, start, rows, length, head, k_t, k_h, D).to(tl.float32)
        v = head_rows(V, start, rows, length, head, v_t, v_h, D).to(tl.float32)
        s = tl.where(rows < length, tl.sum(k * q[None, :], 1), float("-inf"))
        now = tl.maximum(largest, tl.max(s, 0))
        p = tl.exp2(s - now)
        shrink = tl.exp2(largest - now)
        total = total * shrink + tl.sum(p, 0)
        if DROPOUT:
            p = tl.where(kept_at(mask_row, rows, drop_below), p, 0.0)
        out = out * shrink + tl.sum(p[:, None] * v, 0)
        largest = now
    total = tl.where(length > 0, total, 1.0)
    tl.store(OUT + segment.to(tl.int64) * o_n + head * o_h + channels, (out * (more / total)).to(OUT.dtype.element_ty))
    tl.store(LSE + segment * tl.num_programs(1) + head, largest + tl.log2(total))


@triton.jit(do_not_specialize=["site"])
def first_token_attention_backward(
    Q, K, V, OUT, DO, DQ, DK, DV, LSE, CU_SEQLENS, SEED, site, q_n, q_h, k_t, k_h, v_t, v_h, o_n, o_h, do_n, do_h, dq_n,
    dq_h, dk_t, dk_h, dv_t, dv_h, scale, power, drop_below, more,
    DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(CU_SEQLENS + segment)
    length = tl.load(CU_SEQLENS + segment + 1) - start
    channels, row = tl.arange(0, D), segment.to(tl.int64)
    q = tl.load(Q + row * q_n + head * q_h + channels).to(tl.float32)
    do = tl.load(DO + row * do_n + head * do_h + channels).to(tl.float32)
    delta = tl.sum(do * tl.load(OUT + row * o_n + head * o_h + channels).to(tl.float32), 0)
    lse = tl.load(LSE + segment * tl.num_programs(1) + head)
    dq = tl.zeros([D], tl.float32)
    mask_row = tl.zeros([1], tl.uint32)
    if DROPOUT:
        mask_row = _mask_row(SEED, site, head, start, length)
    for place in range(0, length, BLOCK):
        rows = place + tl.arange(0, BLOCK)
        k = head_rows(K, start, rows, length, head, k_t, k_h, D).to(tl.float32)
        v = head_rows(V, start, rows, length, head, v_t, v_h, D).to(tl.float32)
        p = tl.exp2(tl.sum(k * q[None, :], 1) * power - lse)
        dp = tl.sum(v * do[None, :], 1)
        dropped = p
        if DROPOUT:
            stays = kept_at(mask_row, rows, drop_below)
            dropped, dp = tl.where(stays, p * more, 0.0), tl.where(stays, dp * more, 0.0)
        ds = tl.where(rows < length, p * (dp - delta) * scale, 0.0)
        dq += tl.sum(ds[:, None] * k, 0)
        inside, tokens = (rows < length)[:, None], (start + rows).to(tl.int64)[:, None]
        dk_places = DK + tokens * dk_t + head * dk_h + channels[None, :]
        dv_places = DV + tokens * dv_t + head * dv_h + channels[None, :]
        tl.store(dk_places, (ds[:, None] * q[None, :]).to(DK.dtype.element_ty), mask=inside)
        tl.store(dv_places, (dropped[:, None] * do[None, :]).to(DV.dtype.element_ty), mask=inside)
    tl.store(DQ + row * dq_n + head * dq_h + channels, dq.to(DQ.dtype.element_ty))


def attend_first(
    q_NHD: Tensor, k_HTD: Tensor, v_HTD: Tensor, cu_seqlens_N: Tensor, seed: Tensor, site: int, scale: float, p: float
) -> tuple[Tensor, Tensor]:
    """(N, H, D): the first token's query of each of N segments against all keys of its own segment, 0 if that is
    empty. And the logs to the base 2 of the weights' sums, (N, H) fp32.

    cu_seqlens_N: (N + 1,) int32. Heads of a power of two channels. seed: as of `row_seeds` for T rows.
    """
    seed = row_seeds(seed, k_HTD.shape[1], p)
    num_segments, num_heads, head_dim = q_NHD.shape
    out_NHD = torch.empty_like(q_NHD)
    lse_NH = q_NHD.new_empty(num_segments, num_heads, dtype=torch.float32)
    first_token_attention_forward[(num_segments, num_heads)](
        q_NHD, k_HTD, v_HTD, out_NHD, lse_NH, cu_seqlens_N, seed, site, *q_NHD.stride()[:2], *_strides(k_HTD, v_HTD),
        *out_NHD.stride()[:2], scale * _LOG2_E, threshold(p), kept_factor(p), DROPOUT=p > 0, D=head_dim, BLOCK=_BLOCK,
        num_warps=2,
    )  # fmt: skip
    return out_NHD, lse_NH


def attend_first_backward(
    gradient_NHD: Tensor, q_NHD: Tensor, k_HTD: Tensor, v_HTD: Tensor, out_NHD: Tensor, lse_NH: Tensor,
    cu_seqlens_N: Tensor, seed: Tensor, site: int, scale: float, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, (N, H, D), and of keys and values, (T, 2, H, D). Every token must be in a segment."""
    seed = row_seeds(seed, k_HTD.shape[1], p)
    num_segments, num_heads, head_dim = q_NHD.shape
    dq_NHD = torch.empty_like(q_NHD)
    dkv_T2HD = k_HTD.new_empty(k_HTD.shape[1], 2, num_heads, head_dim)
    dk_HTD, dv_HTD = dkv_T2HD.transpose(0, 2).unbind(1)
    gradient_NHD = gradient_NHD if gradient_NHD.stride(2) == 1 else gradient_NHD.contiguous()
    first_token_attention_backward[(num_segments, num_heads)](
        q_NHD, k_HTD, v_HTD, out_NHD, gradient_NHD, dq_NHD, dk_HTD, dv_HTD, lse_NH, cu_seqlens_N, seed, site,
        *q_NHD.stride()[:2], *_strides(k_HTD, v_HTD), *out_NHD.stride()[:2], *gradient_NHD.stride()[:2],
        *dq_NHD.stride()[:2], *_strides(dk_HTD, dv_HTD), scale, scale * _LOG2_E, threshold(p),
        kept_factor(p), DROPOUT=p > 0, D=head_dim, BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip
    return dq_NHD, dkv_T2HD


def _strides(*found: Tensor) -> list[int]:
    """Of (H, T, D): from token to token, and from head to head."""
    return [x.stride(axis) for x in found for axis in (1, 0)]


def first_rows(x: Tensor, cu_seqlens_N: Tensor) -> Tensor:
    """(1, N, H): the first row of each segment of (1, T, H); of an empty one at the end, any."""
    rows: Tensor = x.index_select(x.ndim - 2, _places(x, cu_seqlens_N))
    return rows


def _places(x: Tensor, cu_seqlens_N: Tensor) -> Tensor:
    return cu_seqlens_N[:-1].clamp(max=x.shape[-2] - 1)


class _ProjectedFirstAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offsets: Tensor, num_heads: int, scale: float, p: float, *parameters: Tensor | None
    ) -> Tensor:
        weights, biases = parameters[:3], parameters[3:]
        assert weights[0] is not None
        ctx.context = current()
        x_TK = x.flatten(0, -2)
        chosen_N = _places(x_TK, offsets)
        first_NK = x_TK.index_select(0, chosen_N)
        w_NK, b_N = side_by_side(weights[1:], x.dtype), None
        w_HK, q_bias = weights[0].to(x.dtype), biases[0]
        if q_bias is not None:
            b_N = side_by_side(biases[1:], x.dtype)
        kv_TN, saved, ctx.in_fp8 = _multiply(ctx, x_TK, w_NK, weights[1], b_N)
        q_NH = first_NK @ w_HK.t()
        if q_bias is not None:
            q_NH = q_NH + q_bias.to(x.dtype)
        seed, ctx.site = ctx.context.dropout_site(x, len(x_TK), p)
        ctx.context.rows.choose(chosen_N)  # what follows in the layer works on these
        ctx.num_heads, ctx.scale, ctx.p, ctx.shape = num_heads, scale, p, x.shape
        out_NHD, lse_NH = attend_first(*_heads(q_NH, kv_TN, num_heads), offsets, seed, ctx.site, scale, p)
        ctx.save_for_backward(x_TK, first_NK, w_HK, q_NH, kv_TN, out_NHD, lse_NH, offsets, seed, *saved)
        ctx.dtypes = gradient_dtype(weights), gradient_dtype(biases)
        ctx.leaf, ctx.learned = _are_leaves(*parameters), _are_learned(*parameters)
        return out_NHD.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, first_NK, w_HK, q_NH, kv_TN, out_NHD, lse_NH, offsets, seed, *weight = ctx.saved_tensors
        dq_NHD, dkv_T2HD = attend_first_backward(
            gradient.transpose(0, 1), *_heads(q_NH, kv_TN, ctx.num_heads), out_NHD, lse_NH, offsets, seed,
            ctx.site, ctx.scale, ctx.p,
        )  # fmt: skip
        dq_NH, dkv_TN = dq_NHD.flatten(1), dkv_T2HD.flatten(1)

        def parameters() -> Gradients:
            of_query, query_bias = _weight_gradients(dq_NH, first_NK, *ctx.dtypes, in_fp8=False)
            others, biases = _weight_gradients(dkv_TN, x_TK, *ctx.dtypes, in_fp8=ctx.in_fp8)
            return of_query, *others.chunk(2), query_bias, *((None, None) if biases is None else biases.chunk(2))

        found: Gradients = (None,) * 6
        if ctx.learned:
            found = ctx.context.beside(parameters, dq_NH, first_NK, dkv_TN, x_TK, leaf=ctx.leaf)
        dx_TK = _input_gradient(dkv_TN, *weight)
        dx_TK.index_add_(0, _places(dx_TK, offsets), dq_NH @ w_HK)  # what empty segments add is 0
        return dx_TK.view(ctx.shape), None, None, None, None, *found


def _heads(q_NH: Tensor, kv_TN: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (N, H, D), keys and values (H, T, D) of what was projected."""
    keys, values = kv_TN.view(len(kv_TN), 2, num_heads, -1).transpose(0, 2).unbind(1)
    return q_NH.view(len(q_NH), num_heads, -1), keys, values


def projected_first_attention(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], offsets: Tensor, num_heads: int,
    scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """`postnorm_ops.projected_attention` for the first token of each segment, (H, N, D)."""
    out: Tensor = _ProjectedFirstAttention.apply(  # type: ignore[no-untyped-call]
        halved(x), offsets, num_heads, scale, current().probability(dropout), *weights, *biases
    )
    return out
