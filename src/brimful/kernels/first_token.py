"""Attention of the first token of each segment only: all that a classifier with a first-token head reads.

In the last layer such a model needs keys and values of all tokens, and everything else of one token a sequence.
Forward only: for evaluation and classification.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.blocks import halved, side_by_side

_LOG2_E = 1.4426950408889634
#: Keys that a program takes at a time.
_BLOCK = 64


@triton.jit
def first_token_attention(
    Q, K, V, OUT, OFFSETS, q_n, q_h, k_t, k_h, v_t, v_h, o_n, o_h, scale, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One query a program: (N, H, D) against the keys of its segment. An empty segment gives zeros."""
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(OFFSETS + segment)
    length = tl.load(OFFSETS + segment + 1) - start
    channels = tl.arange(0, D)
    q = tl.load(Q + segment.to(tl.int64) * q_n + head * q_h + channels).to(tl.float32) * scale
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    out = tl.zeros([D], tl.float32)
    for place in range(0, length, BLOCK):
        rows = place + tl.arange(0, BLOCK)
        inside = (rows < length)[:, None]
        tokens = (start + rows).to(tl.int64)[:, None]
        k = tl.load(K + tokens * k_t + head * k_h + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.load(V + tokens * v_t + head * v_h + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        s = tl.where(rows < length, tl.sum(k * q[None, :], 1), float("-inf"))
        now = tl.maximum(largest, tl.max(s, 0))
        p = tl.exp2(s - now)
        shrink = tl.exp2(largest - now)
        total = total * shrink + tl.sum(p, 0)
        out = out * shrink + tl.sum(p[:, None] * v, 0)
        largest = now
    out = out / tl.where(length > 0, total, 1.0)
    tl.store(OUT + segment.to(tl.int64) * o_n + head * o_h + channels, out.to(OUT.dtype.element_ty))


def attend_first(q_NHD: Tensor, k_HTD: Tensor, v_HTD: Tensor, offsets_N: Tensor, scale: float) -> Tensor:
    """(N, H, D): the first token's query of each of N segments against all keys of its own segment.

    offsets_N: (N + 1,) int32. Heads of a power of two channels.
    """
    num_segments, num_heads, head_dim = q_NHD.shape
    out_NHD = torch.empty_like(q_NHD)
    first_token_attention[(num_segments, num_heads)](
        q_NHD, k_HTD, v_HTD, out_NHD, offsets_N, *q_NHD.stride()[:2], k_HTD.stride(1), k_HTD.stride(0),
        v_HTD.stride(1), v_HTD.stride(0), *out_NHD.stride()[:2], scale * _LOG2_E, D=head_dim, BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip
    return out_NHD


def first_rows(x: Tensor, offsets_N: Tensor) -> Tensor:
    """(1, N, H): the first row of each segment of (1, T, H); of an empty one at the end, any."""
    index_N = offsets_N[:-1].clamp(max=x.shape[-2] - 1)
    rows: Tensor = x.index_select(x.ndim - 2, index_N)
    return rows


def projected_first_attention(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], offsets_N: Tensor, num_heads: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """`blocks.projected_attention` for the first token of each segment, (H, N, D)."""
    x_TK = halved(x).flatten(0, -2)
    first_NK = first_rows(x_TK, offsets_N)
    w_NK, b_N = side_by_side(weights[1:], x_TK.dtype), None
    if biases[0] is not None:
        b_N = side_by_side(biases[1:], x_TK.dtype)
    kv_TN = x_TK @ w_NK.t() if b_N is None else torch.addmm(b_N, x_TK, w_NK.t())
    q_NK = first_NK @ weights[0].to(x_TK.dtype).t()
    if biases[0] is not None:
        q_NK = q_NK + biases[0].to(x_TK.dtype)
    k, v = kv_TN.view(len(x_TK), 2, num_heads, -1).transpose(0, 2).unbind(1)
    return attend_first(q_NK.view(len(first_NK), num_heads, -1), k, v, offsets_N, scale).transpose(0, 1)
