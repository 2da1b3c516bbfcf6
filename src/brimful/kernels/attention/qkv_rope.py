"""From one product to the heads of attention in one kernel forward and one backward.

Queries and keys are normalised head by head where the model does so (RMSNorm), and turned by rotary embeddings; keys
and values that several queries share are repeated. Without norm and repetition all happens in place: a rotation's
gradient is the rotation back, and needs no input. `separate_heads` is the reference. Arithmetic within is fp32.

Source: Su et al. 2021, arXiv 2104.09864 (rotary embeddings); the halves of a head are rotated, not neighbours.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.attention.pattern import Heads
from brimful.kernels.split_reduction import add_partial_sums
from brimful.kernels.tiles import num_tiles

#: Heads of tokens in one program's tile; most programs that sum gradients of gains.
_ITEMS, _MOST_PROGRAMS = 32, 528


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMSNorm of each query and key over its D numbers: gains (D,) and what is added to the mean squares."""

    query_gain: Tensor
    key_gain: Tensor
    query_eps: float
    key_eps: float


def separate_heads(
    x_TN: Tensor, cos_TD: Tensor, sin_TD: Tensor, num_queries: int, num_keys: int, norm: HeadNorm | None = None
) -> Tensor:
    """The reference: queries, keys and values (T, 3, H, D) of a product with H, K and K heads side by side."""
    x_TXD = x_TN.unflatten(1, (num_queries + 2 * num_keys, -1))
    q, k, v = x_TXD.split([num_queries, num_keys, num_keys], 1)
    if norm is not None:
        q = q * torch.rsqrt(q.square().mean(2, keepdim=True) + norm.query_eps) * norm.query_gain
        k = k * torch.rsqrt(k.square().mean(2, keepdim=True) + norm.key_eps) * norm.key_gain
    q, k = (_rotated(each, cos_TD[:, None], sin_TD[:, None]) for each in (q, k))
    k, v = (each.repeat_interleave(num_queries // num_keys, 1) for each in (k, v))
    return torch.stack([q, k, v], 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@triton.jit
def _angles(COS, SIN, tokens, inside, D: tl.constexpr):
    """Cosines and sines of both halves of heads, (ITEMS, D / 2)."""
    places = tokens[:, None] * D + tl.arange(0, D // 2)[None, :]
    c1 = tl.load(COS + places, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(COS + places + D // 2, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(SIN + places, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(SIN + places + D // 2, mask=inside, other=0.0).to(tl.float32)
    return c1, c2, s1, s2


@triton.jit
def _gains(QUERY_GAIN, KEY_GAIN, is_query, D: tl.constexpr):
    """Gains of both halves of heads, (ITEMS, D / 2)."""
    columns = tl.arange(0, D // 2)
    first = tl.where(is_query, tl.load(QUERY_GAIN + columns)[None, :], tl.load(KEY_GAIN + columns)[None, :])
    columns += D // 2
    second = tl.where(is_query, tl.load(QUERY_GAIN + columns)[None, :], tl.load(KEY_GAIN + columns)[None, :])
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rstd(a, b, is_query, query_eps, key_eps, D: tl.constexpr):
    """1 over the root of heads' mean squares, (ITEMS, 1)."""
    eps = tl.where(is_query, query_eps, key_eps)
    return 1.0 / tl.sqrt(((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D)[:, None] + eps)


@triton.jit
def heads_forward(X, OUT, COS, SIN, QUERY_GAIN, KEY_GAIN, num_items, heads, queries, keys, x_t, out_t, query_eps,
                  key_eps, GROUP: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr,
                  ITEMS: tl.constexpr):  # fmt: skip
    """An item is a head of OUT of a token. GROUP: queries that share a key. heads: of a token that are written."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    tokens, head = (item // heads).to(tl.int64), item % heads
    inside = (item < num_items)[:, None]
    part = head // queries
    source = tl.where(part == 0, head, queries + (part - 1) * keys + (head - part * queries) // GROUP)
    places = (tokens * x_t + source * D)[:, None] + tl.arange(0, D // 2)[None, :]
    a = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(X + places + D // 2, mask=inside, other=0.0).to(tl.float32)
    turned = inside & (part < 2)[:, None]
    c1, c2, s1, s2 = _angles(COS, SIN, tokens, turned, D)
    u, w = a, b
    if NORM:
        is_query = (part == 0)[:, None]
        rstd = _rstd(a, b, is_query, query_eps, key_eps, D)
        g1, g2 = _gains(QUERY_GAIN, KEY_GAIN, is_query, D)
        u, w = a * rstd * g1, b * rstd * g2
    places = (tokens * out_t + head * D)[:, None] + tl.arange(0, D // 2)[None, :]
    tl.store(OUT + places, tl.where(turned, u * c1 - w * s1, a).to(OUT.dtype.element_ty), mask=inside)
    tl.store(OUT + places + D // 2, tl.where(turned, w * c2 + u * s2, b).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(DOUT, tokens, head, part, inside, queries, keys, dout_t, GROUP: tl.constexpr, D: tl.constexpr):
    """Gradients of both halves of heads, those of all repetitions added up."""
    first = tl.where(part == 0, head, part * queries + (head - queries - (part - 1) * keys) * GROUP)
    places = (tokens * dout_t + first * D)[:, None] + tl.arange(0, D // 2)[None, :]
    da = tl.load(DOUT + places, mask=inside, other=0.0).to(tl.float32)
    db = tl.load(DOUT + places + D // 2, mask=inside, other=0.0).to(tl.float32)
    for member in tl.static_range(1, GROUP):
        again = inside & (part > 0)[:, None]
        da += tl.load(DOUT + places + member * D, mask=again, other=0.0).to(tl.float32)
        db += tl.load(DOUT + places + member * D + D // 2, mask=again, other=0.0).to(tl.float32)
    return da, db


@triton.jit
def heads_backward(DOUT, X, DX, COS, SIN, QUERY_GAIN, KEY_GAIN, PARTIALS, num_items, heads, queries, keys, x_t, dout_t,
                   dx_t, query_eps, key_eps, GROUP: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr,
                   ITEMS: tl.constexpr):  # fmt: skip
    """An item is a head of X of a token. PARTIALS: (programs, 2, D) partial gradients of the gains."""
    dq1 = tl.zeros([ITEMS, D // 2], tl.float32)  # added up across items once, at the end
    dq2 = tl.zeros([ITEMS, D // 2], tl.float32)
    dk1 = tl.zeros([ITEMS, D // 2], tl.float32)
    dk2 = tl.zeros([ITEMS, D // 2], tl.float32)
    columns = tl.arange(0, D // 2)
    for start in range(tl.program_id(0) * ITEMS, num_items, tl.num_programs(0) * ITEMS):
        item = start + tl.arange(0, ITEMS)
        tokens, head = (item // heads).to(tl.int64), item % heads
        inside = (item < num_items)[:, None]
        part = (head >= queries).to(tl.int32) + (head >= queries + keys).to(tl.int32)
        da, db = _gradient(DOUT, tokens, head, part, inside, queries, keys, dout_t, GROUP, D)
        turned = inside & (part < 2)[:, None]
        c1, c2, s1, s2 = _angles(COS, SIN, tokens, turned, D)
        du, dw = da * c1 + db * s2, db * c2 - da * s1
        if NORM:
            is_query = (part == 0)[:, None]
            places = (tokens * x_t + head * D)[:, None] + columns[None, :]
            a = tl.load(X + places, mask=turned, other=0.0).to(tl.float32)
            b = tl.load(X + places + D // 2, mask=turned, other=0.0).to(tl.float32)
            rstd = _rstd(a, b, is_query, query_eps, key_eps, D)
            a, b = a * rstd, b * rstd
            dq1 += tl.where(is_query, du * a, 0.0)
            dq2 += tl.where(is_query, dw * b, 0.0)
            dk1 += tl.where(is_query, 0.0, du * a)
            dk2 += tl.where(is_query, 0.0, dw * b)
            g1, g2 = _gains(QUERY_GAIN, KEY_GAIN, is_query, D)
            du, dw = du * g1, dw * g2
            along = ((tl.sum(du * a, 1) + tl.sum(dw * b, 1)) / D)[:, None]
            du, dw = rstd * (du - a * along), rstd * (dw - b * along)
        places = (tokens * dx_t + head * D)[:, None] + columns[None, :]
        tl.store(DX + places, tl.where(turned, du, da).to(DX.dtype.element_ty), mask=inside)
        tl.store(DX + places + D // 2, tl.where(turned, dw, db).to(DX.dtype.element_ty), mask=inside)
    if NORM:
        partial = PARTIALS + tl.program_id(0) * 2 * D + columns
        tl.store(partial, tl.sum(dq1, 0))
        tl.store(partial + D // 2, tl.sum(dq2, 0))
        tl.store(partial + D, tl.sum(dk1, 0))
        tl.store(partial + D + D // 2, tl.sum(dk2, 0))


def _in_place(heads: Heads, norm: HeadNorm | None) -> bool:
    """True if what comes in is not needed any more, and has the shape of what goes out."""
    return norm is None and heads.group == 1


def fused_forward(x: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norm: HeadNorm | None) -> Tensor:
    """(T, 3, H, D) queries, keys and values of x, (T, N), which they overwrite where it is not needed any more."""
    tokens = x.shape[0]
    in_place = _in_place(heads, norm)
    out = x if in_place else x.new_empty(tokens, 3 * heads.queries * heads.size)
    written = (2 if in_place else 3) * heads.queries
    gains, constants = _constants(x, heads, norm)
    heads_forward[(num_tiles(tokens * written, _ITEMS),)](
        x, out, cos, sin, *gains[:2], tokens * written, written, heads.queries, heads.keys, x.stride(0), out.stride(0),
        *gains[2:], **constants,
    )  # fmt: skip
    return out.view(tokens, 3, heads.queries, heads.size)


def fused_backward(
    dout: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, heads: Heads, norm: HeadNorm | None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, (T, N), which overwrites that of the output where it can; partials (S, 2 D) of the gains'.

    dout: (T, 3, H, D), contiguous. x: as it came in, where there is a norm.
    """
    tokens, read = dout.shape[0], heads.queries + 2 * heads.keys
    in_place = _in_place(heads, norm)
    dx = dout.flatten(1) if in_place else dout.new_empty(tokens, read * heads.size)
    if in_place:
        read = 2 * heads.queries
    programs = num_tiles(tokens * read, _ITEMS)
    partials = None
    if norm is not None:
        programs = min(programs, _MOST_PROGRAMS)
        partials = dout.new_empty(programs, 2 * heads.size, dtype=torch.float32)
    x = dx if x is None else x
    gains, constants = _constants(x, heads, norm)
    heads_backward[(programs,)](
        dout, x, dx, cos, sin, *gains[:2], x if partials is None else partials, tokens * read, read, heads.queries,
        heads.keys, x.stride(0), dout.stride(0), dx.stride(0), *gains[2:], **constants,
    )  # fmt: skip
    return dx, partials


def gain_gradients(partials: Tensor, norm: HeadNorm) -> tuple[Tensor, Tensor]:
    """Gradients of the gains of queries and keys from what the backward pass left."""
    both = add_partial_sums(partials, 0, torch.float32)[0]
    query, key = both.chunk(2)
    return query.to(norm.query_gain.dtype), key.to(norm.key_gain.dtype)


def _constants(x: Tensor, heads: Heads, norm: HeadNorm | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gains and what is added to mean squares, and what kernels are compiled for."""
    gains = (x, x, 0.0, 0.0) if norm is None else (norm.query_gain, norm.key_gain, norm.query_eps, norm.key_eps)
    return gains, {"GROUP": heads.group, "NORM": norm is not None, "D": heads.size, "ITEMS": _ITEMS}
