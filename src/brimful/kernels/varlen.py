"""Variable-length attention as one Triton kernel forward and one backward; `attention.reference_attention` is its twin.

One program works on one block of one segment of one head. The backward pass visits the same block twice, as keys for
their gradient and as queries for theirs, so nothing is added atomically and equal inputs give equal bits. Windows, soft
caps, causality and dropout are inside; a segment shorter than a block is a single pass.

Dropout hashes (seed, head, query, key): the forward and backward pass draw the same mask without storing it.

Source: Dao 2023, arXiv 2307.08691 (FlashAttention-2).
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.dropout import draw_seed, kept, threshold

_LOG2_E = 1.4426950408889634


@triton.jit
def _scores(q, k, rows, columns, length, scale, softcap, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Scores times log2(e), minus infinity where a query does not see a key; and the soft cap's tanh."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    capped = s
    if CAP:
        capped = 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)))
        s = softcap * capped
    seen = (columns < length)[None, :] & (rows < length)[:, None]
    if CAUSAL:
        seen = seen & (rows[:, None] >= columns[None, :])
    if WINDOW > 0:
        distance = rows[:, None] - columns[None, :]
        seen = seen & (distance < WINDOW) & (distance > -WINDOW)
    return tl.where(seen, s * 1.4426950408889634, float("-inf")), capped


@triton.jit
def _keys_of(first, last, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The range of keys, from a multiple of BLOCK, that queries from `first` up to `last` see."""
    low, high = 0, length
    if WINDOW > 0:
        low = tl.maximum(0, first - WINDOW + 1) // BLOCK * BLOCK
        high = tl.minimum(high, last + WINDOW - 1)
    if CAUSAL:
        high = tl.minimum(high, last)
    return low, high


@triton.jit
def _queries_of(first, last, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The range of queries, from a multiple of BLOCK, that see keys from `first` up to `last`."""
    low, high = 0, length
    if WINDOW > 0:
        low = tl.maximum(0, first - WINDOW + 1) // BLOCK * BLOCK
        high = tl.minimum(high, last + WINDOW - 1)
    if CAUSAL:
        low = tl.maximum(low, first // BLOCK * BLOCK)
    return low, high


@triton.jit
def _block(X, start, rows, length, head, stride_t, stride_h, D: tl.constexpr):
    """Rows of one head, (BLOCK, D), 0 beyond the segment."""
    places = (start + rows).to(tl.int64)[:, None] * stride_t + head * stride_h + tl.arange(0, D)[None, :]
    return tl.load(X + places, mask=(rows < length)[:, None], other=0.0)


@triton.jit(do_not_specialize=["site"])
def varlen_attention_forward(Q, K, V, OUT, LSE, OFFSETS, SEED, site, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, scale, softcap,
             threshold, keep, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr,
             D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    block, segment, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(OFFSETS + segment)
    length = tl.load(OFFSETS + segment + 1) - start
    first = block * BLOCK
    if first >= length:
        return
    rows = first + tl.arange(0, BLOCK)
    q = _block(Q, start, rows, length, head, q_t, q_h, D)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, D], tl.float32)
    low, high = _keys_of(first, first + BLOCK, length, CAUSAL, WINDOW, BLOCK)
    for place in range(low, high, BLOCK):
        columns = place + tl.arange(0, BLOCK)
        k = _block(K, start, columns, length, head, k_t, k_h, D)
        v = _block(V, start, columns, length, head, v_t, v_h, D)
        s, _ = _scores(q, k, rows, columns, length, scale, softcap, CAUSAL, WINDOW, CAP, PRECISION)
        now = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(SEED, site, head, start + rows, columns, threshold), p / keep, 0.0)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        largest = now
    inside = rows < length
    total = tl.where(inside, total, 1.0)
    out = out / total[:, None]
    places = (start + rows).to(tl.int64)[:, None] * o_t + head * o_h + tl.arange(0, D)[None, :]
    tl.store(OUT + places, out.to(OUT.dtype.element_ty), mask=inside[:, None])
    tl.store(LSE + head.to(tl.int64) * T + start + rows, largest + tl.log2(total), mask=inside)


@triton.jit
def _weights(s, lse, capped, dp, delta, stays, keep, scale, DROPOUT: tl.constexpr, CAP: tl.constexpr):
    """Of one block: attention weights as they met the values, and the gradient of q times k."""
    p = tl.exp2(s - lse[:, None])
    dropped = p
    if DROPOUT:
        dropped = tl.where(stays, p / keep, 0.0)
        dp = tl.where(stays, dp / keep, 0.0)
    ds = p * (dp - delta[:, None]) * scale
    if CAP:
        ds = ds * (1.0 - capped * capped)
    return dropped, ds


@triton.jit(do_not_specialize=["site"])
def varlen_attention_backward(Q, K, V, OUT, DO, DQ, DK, DV, LSE, OFFSETS, SEED, site, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t, do_h,
              g_t, g_h, scale, softcap, threshold, keep, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
              CAP: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    block, segment, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(OFFSETS + segment)
    length = tl.load(OFFSETS + segment + 1) - start
    first = block * BLOCK
    if first >= length:
        return
    own = first + tl.arange(0, BLOCK)
    inside = (own < length)[:, None]
    gradients = (start + own).to(tl.int64)[:, None] * g_t + head * g_h + tl.arange(0, D)[None, :]
    lses = LSE + head.to(tl.int64) * T + start

    # The block as keys: their gradient and their values', from every query that sees them.
    k = _block(K, start, own, length, head, k_t, k_h, D)
    v = _block(V, start, own, length, head, v_t, v_h, D)
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, D], tl.float32)
    low, high = _queries_of(first, first + BLOCK, length, CAUSAL, WINDOW, BLOCK)
    for place in range(low, high, BLOCK):
        rows = place + tl.arange(0, BLOCK)
        q = _block(Q, start, rows, length, head, q_t, q_h, D)
        o = _block(OUT, start, rows, length, head, o_t, o_h, D)
        do = _block(DO, start, rows, length, head, do_t, do_h, D)
        lse = tl.load(lses + rows, mask=rows < length, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        s, capped = _scores(q, k, rows, own, length, scale, softcap, CAUSAL, WINDOW, CAP, PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        stays = s > 0
        if DROPOUT:
            stays = kept(SEED, site, head, start + rows, own, threshold)
        p, ds = _weights(s, lse, capped, dp, delta, stays, keep, scale, DROPOUT, CAP)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    tl.store(DK + gradients, dk.to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + gradients, dv.to(DV.dtype.element_ty), mask=inside)

    # The block as queries: their gradient, from every key that they see.
    q = _block(Q, start, own, length, head, q_t, q_h, D)
    o = _block(OUT, start, own, length, head, o_t, o_h, D)
    do = _block(DO, start, own, length, head, do_t, do_h, D)
    lse = tl.load(lses + own, mask=own < length, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    dq = tl.zeros([BLOCK, D], tl.float32)
    low, high = _keys_of(first, first + BLOCK, length, CAUSAL, WINDOW, BLOCK)
    for place in range(low, high, BLOCK):
        columns = place + tl.arange(0, BLOCK)
        k = _block(K, start, columns, length, head, k_t, k_h, D)
        v = _block(V, start, columns, length, head, v_t, v_h, D)
        s, capped = _scores(q, k, own, columns, length, scale, softcap, CAUSAL, WINDOW, CAP, PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        stays = s > 0
        if DROPOUT:
            stays = kept(SEED, site, head, start + own, columns, threshold)
        _, ds = _weights(s, lse, capped, dp, delta, stays, keep, scale, DROPOUT, CAP)
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    tl.store(DQ + gradients, dq.to(DQ.dtype.element_ty), mask=inside)


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes such queries: bf16, fp16 and fp32, heads of 16, 32, 64 or 128."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in (16, 32, 64, 128)


def _launch(q: Tensor, offsets: Tensor, max_length: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid, and the constants of both kernels that follow from the shapes."""
    heads, _, head_dim = q.shape
    block = 64 if q.dtype != torch.float32 and head_dim <= 64 else 32
    grid = (triton.cdiv(max_length, block), offsets.shape[0] - 1, heads)
    precision = "ieee" if q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"
    return grid, {"D": head_dim, "BLOCK": block, "PRECISION": precision, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op("brimful::varlen_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    seed: Tensor,
    max_length: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    dropout: float,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    heads, tokens, head_dim = q.shape
    out = q.new_empty(tokens, heads, head_dim).transpose(0, 1)
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    grid, constants = _launch(q, offsets, max_length)
    strides = [x.stride(axis) for x in (q, k, v, out) for axis in (1, 0)]
    varlen_attention_forward[grid](
        q, k, v, out, lse, offsets, seed, site, tokens, *strides, scale, softcap, threshold(dropout), 1.0 - dropout,
        CAUSAL=causal, WINDOW=window, CAP=softcap > 0, DROPOUT=dropout > 0, **constants,
    )  # fmt: skip
    return out, lse


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, seed: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    heads, tokens, head_dim = q.shape
    out = q.new_empty(tokens, heads, head_dim).transpose(0, 1)
    return out, q.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("brimful::varlen_attention_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    seed: Tensor,
    max_length: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    dropout: float,
    site: int = 0,
) -> Tensor:
    """Gradients of queries, keys and values, (T, 3, H, D)."""
    heads, tokens, head_dim = q.shape
    packed = q.new_empty(tokens, 3, heads, head_dim)
    found = [packed[:, part].transpose(0, 1) for part in range(3)]
    gradient = gradient if gradient.stride(2) == 1 else gradient.contiguous()
    grid, constants = _launch(q, offsets, max_length)
    strides = [x.stride(axis) for x in (q, k, v, out, gradient, found[0]) for axis in (1, 0)]
    varlen_attention_backward[grid](
        q, k, v, out, gradient, *found, lse, offsets, seed, site, tokens, *strides, scale, softcap, threshold(dropout),
        1.0 - dropout, CAUSAL=causal, WINDOW=window, CAP=softcap > 0, DROPOUT=dropout > 0, **constants,
    )  # fmt: skip
    return packed


@attend_backward.register_fake
def _(gradient: Tensor, q: Tensor, *_: Any) -> Tensor:
    heads, tokens, head_dim = q.shape
    return q.new_empty(tokens, 3, heads, head_dim)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, seed, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, offsets, seed)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    packed = attend_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return *(part.transpose(0, 1) for part in packed.unbind(1)), *[None] * (2 + len(ctx.settings))


attend.register_autograd(_gradients, setup_context=_setup)


def varlen_attention_HTD(
    q_HTD: Tensor,
    k_HTD: Tensor,
    v_HTD: Tensor,
    offsets_N: Tensor,
    *,
    max_length: int,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Attention within segments, (H, T, D); every token must be in one of them.

    offsets_N: (N + 1,) int32, device. window: a token sees those nearer than this. seed: () int64 on the device, drawn
    from torch's generator if it is None and there is dropout.
    """
    if seed is None:
        seed = draw_seed(q_HTD.device, dropout)
    q_HTD, k_HTD, v_HTD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_HTD, k_HTD, v_HTD))
    out: Tensor = attend(
        q_HTD, k_HTD, v_HTD, offsets_N, seed, max_length, scale, causal, window or 0, softcap or 0.0, dropout
    )[0]
    return out
