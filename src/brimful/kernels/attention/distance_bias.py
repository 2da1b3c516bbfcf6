"""Variable-length attention with a bias by distance, forward and backward; `reference_attention` is its reference.

The score of query i and key j of one segment is q_i . k_j * scale + q_i . keys[b] + k_j . queries[b] + bias[b], where b
is the bucket of their distance j - i. DeBERTa has keys and queries of positions, MPNet a bias.

Products with positions are made by dense matrix products before the kernel, by distance and not by pair: W = 2 * reach
columns a token, for distances from -reach to reach - 1. In the kernel the pair (i, j) reads column j - i + reach of
row i, and of row j. Its gradient goes back into the same place, which no other pair has: nothing is added atomically,
and equal inputs give equal bits. Dense products then make of these columns the gradients of tokens and tables. Nothing
of W columns is kept for the backward pass, which makes them again.

Sources: He et al. 2021, arXiv 2006.03654 (DeBERTa); Dao 2023, arXiv 2307.08691 (FlashAttention-2).
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.attention.varlen import Tiles, empty_outputs, launch
from brimful.kernels.attention.varlen_kernels import head_rows, row_numbers, varlen_attention_delta
from brimful.kernels.dropout import kept_at, kept_factor, row_keys, threshold
from brimful.kernels.forward_context import current
from brimful.kernels.layout import Segments
from brimful.kernels.rng import row_seeds
from brimful.kernels.tiles import num_tiles

_LOG2_E = 1.4426950408889634


@triton.jit
def _places(start, owners, queries, keys, head, stride_t, stride_h, reach):
    """Index into a table of each distance for the rows of `owners`, the queries or the keys."""
    return head.to(tl.int64) * stride_h + (start + owners).to(tl.int64) * stride_t + (keys - queries + reach)


@triton.jit
def _scores(
    products, BY_QUERY, BY_KEY, start, queries, keys, inside, head, bq_t, bq_h, bk_t, bk_h, reach,
    HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr,
):  # fmt: skip
    """Scores times log2(e) of products that are scaled so; queries and keys in shapes that broadcast to theirs."""
    scores = products
    if HAS_QUERY:
        places = _places(start, queries, queries, keys, head, bq_t, bq_h, reach)
        scores += tl.load(BY_QUERY + places, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    if HAS_KEY:
        places = _places(start, keys, queries, keys, head, bk_t, bk_h, reach)
        scores += tl.load(BY_KEY + places, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    return scores


@triton.jit(do_not_specialize=["site"])
def relative_attention_forward(
    Q, K, V, BY_QUERY, BY_KEY, OUT, LSE, MASK_ROWS, CU_SEQLENS, SEED, site, T, reach, q_t, q_h, k_t, k_h, v_t, v_h,
    bq_t, bq_h, bk_t, bk_h, o_t, o_h, scale, drop_below, more, HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr,
    DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, segment, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(CU_SEQLENS + segment)
    length = tl.load(CU_SEQLENS + segment + 1) - start
    first = block * BLOCK_M
    if first >= length:
        return
    rows = first + tl.arange(0, BLOCK_M)
    q = head_rows(Q, start, rows, length, head, q_t, q_h, D)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, D], tl.float32)
    mask_rows = rows
    if DROPOUT:
        mask_rows = row_keys(SEED, site, head, start + rows, rows < length)
        places = head.to(tl.int64) * T + start + rows
        tl.store(MASK_ROWS + places, mask_rows.to(tl.int32, bitcast=True), mask=rows < length)
    for place in range(0, length, BLOCK_N):
        columns = place + tl.arange(0, BLOCK_N)
        inside = (rows < length)[:, None] & (columns < length)[None, :]
        k = head_rows(K, start, columns, length, head, k_t, k_h, D)
        v = head_rows(V, start, columns, length, head, v_t, v_h, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        s = _scores(
            s, BY_QUERY, BY_KEY, start, rows[:, None], columns[None, :], inside, head, bq_t, bq_h, bk_t, bk_h, reach,
            HAS_QUERY, HAS_KEY,
        )  # fmt: skip
        s = tl.where((columns < length)[None, :], s, float("-inf"))
        now = tl.maximum(largest, tl.max(s, 1))  # finite: every block has a key of the segment
        p = tl.exp2(s - now[:, None])
        shrink = tl.exp2(largest - now)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept_at(mask_rows[:, None], columns[None, :], drop_below), p, 0.0)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        largest = now
    out = out * (more / total)[:, None]
    places = (start + rows).to(tl.int64)[:, None] * o_t + head * o_h + tl.arange(0, D)[None, :]
    tl.store(OUT + places, out.to(OUT.dtype.element_ty), mask=(rows < length)[:, None])
    tl.store(LSE + head.to(tl.int64) * T + start + rows, largest + tl.log2(total), mask=rows < length)


@triton.jit
def _gradient_of_keys(
    Q, K, V, BY_QUERY, BY_KEY, DO, DK, DV, D_BY_KEY, LSE, DELTA, MASK_ROWS, T, reach, q_t, q_h, k_t, k_h, v_t, v_h,
    bq_t, bq_h, bk_t, bk_h, do_t, do_h, g_t, g_h, d_t, d_h, scale, drop_below, more, start, length, first, head,
    HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block as keys, (keys, queries): its gradient, its values' and its columns', from every query."""
    own = first + tl.arange(0, BLOCK_M)
    k = head_rows(K, start, own, length, head, k_t, k_h, D)
    v = head_rows(V, start, own, length, head, v_t, v_h, D)
    dk = tl.zeros([BLOCK_M, D], tl.float32)
    dv = tl.zeros([BLOCK_M, D], tl.float32)
    for place in range(0, length, BLOCK_N):
        rows = place + tl.arange(0, BLOCK_N)
        inside = (own < length)[:, None] & (rows < length)[None, :]
        q = head_rows(Q, start, rows, length, head, q_t, q_h, D)
        do = head_rows(DO, start, rows, length, head, do_t, do_h, D)
        lse = row_numbers(LSE + head.to(tl.int64) * T + start, rows, length)
        delta = row_numbers(DELTA + head.to(tl.int64) * T + start, rows, length)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * 1.4426950408889634)
        s = _scores(
            s, BY_QUERY, BY_KEY, start, rows[None, :], own[:, None], inside, head, bq_t, bq_h, bk_t, bk_h, reach,
            HAS_QUERY, HAS_KEY,
        )  # fmt: skip
        p = tl.exp2(tl.minimum(s - lse[None, :], 0.0))
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        met = p
        if DROPOUT:
            mask_rows = row_numbers(MASK_ROWS + head.to(tl.int64) * T + start, rows, length).to(tl.uint32, bitcast=True)
            stays = kept_at(mask_rows[None, :], own[:, None], drop_below)
            met = tl.where(stays, p, 0.0)
            dp = tl.where(stays, dp * more, 0.0)
        ds = p * (dp - delta[None, :])
        if HAS_KEY:
            places = _places(start, own[:, None], rows[None, :], own[:, None], head, d_t, d_h, reach)
            tl.store(D_BY_KEY + places, ds.to(D_BY_KEY.dtype.element_ty), mask=inside)
        dv += tl.dot(met.to(do.dtype), do, input_precision=PRECISION)
        dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    places = (start + own).to(tl.int64)[:, None] * g_t + head * g_h + tl.arange(0, D)[None, :]
    tl.store(DK + places, (dk * scale).to(DK.dtype.element_ty), mask=(own < length)[:, None])
    tl.store(DV + places, (dv * more).to(DV.dtype.element_ty), mask=(own < length)[:, None])


@triton.jit
def _gradient_of_queries(
    Q, K, V, BY_QUERY, BY_KEY, DO, DQ, D_BY_QUERY, LSE, DELTA, MASK_ROWS, T, reach, q_t, q_h, k_t, k_h, v_t, v_h,
    bq_t, bq_h, bk_t, bk_h, do_t, do_h, g_t, g_h, d_t, d_h, scale, drop_below, more, start, length, first, head,
    HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block as queries, (queries, keys): its gradient and its columns', from every key."""
    own = first + tl.arange(0, BLOCK_M)
    q = head_rows(Q, start, own, length, head, q_t, q_h, D)
    do = head_rows(DO, start, own, length, head, do_t, do_h, D)
    lse = row_numbers(LSE + head.to(tl.int64) * T + start, own, length)
    delta = row_numbers(DELTA + head.to(tl.int64) * T + start, own, length)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    mask_rows = own
    if DROPOUT:
        mask_rows = row_numbers(MASK_ROWS + head.to(tl.int64) * T + start, own, length).to(tl.uint32, bitcast=True)
    for place in range(0, length, BLOCK_N):
        columns = place + tl.arange(0, BLOCK_N)
        inside = (own < length)[:, None] & (columns < length)[None, :]
        k = head_rows(K, start, columns, length, head, k_t, k_h, D)
        v = head_rows(V, start, columns, length, head, v_t, v_h, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
        s = _scores(
            s, BY_QUERY, BY_KEY, start, own[:, None], columns[None, :], inside, head, bq_t, bq_h, bk_t, bk_h, reach,
            HAS_QUERY, HAS_KEY,
        )  # fmt: skip
        p = tl.exp2(tl.minimum(s - lse[:, None], 0.0))
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(kept_at(mask_rows[:, None], columns[None, :], drop_below), dp * more, 0.0)
        ds = p * (dp - delta[:, None])
        if HAS_QUERY:
            places = _places(start, own[:, None], own[:, None], columns[None, :], head, d_t, d_h, reach)
            tl.store(D_BY_QUERY + places, ds.to(D_BY_QUERY.dtype.element_ty), mask=inside)
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    places = (start + own).to(tl.int64)[:, None] * g_t + head * g_h + tl.arange(0, D)[None, :]
    tl.store(DQ + places, (dq * scale).to(DQ.dtype.element_ty), mask=(own < length)[:, None])


@triton.jit
def relative_attention_backward(
    Q, K, V, BY_QUERY, BY_KEY, DO, DQ, DK, DV, D_BY_QUERY, D_BY_KEY, LSE, DELTA, MASK_ROWS, CU_SEQLENS, T, reach, q_t,
    q_h, k_t, k_h, v_t, v_h, bq_t, bq_h, bk_t, bk_h, do_t, do_h, g_t, g_h, d_t, d_h, scale, drop_below, more,
    HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Beyond its segment a block reads zeros, and what comes of them is multiplied with zeros or not stored.

    Only the exponential needs care there: its argument is at most 0 where it counts, and is cut at 0 elsewhere.
    """
    block, segment, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(CU_SEQLENS + segment)
    length = tl.load(CU_SEQLENS + segment + 1) - start
    first = block * BLOCK_M
    if first >= length:
        return
    _gradient_of_keys(
        Q, K, V, BY_QUERY, BY_KEY, DO, DK, DV, D_BY_KEY, LSE, DELTA, MASK_ROWS, T, reach, q_t, q_h, k_t, k_h, v_t,
        v_h, bq_t, bq_h, bk_t, bk_h, do_t, do_h, g_t, g_h, d_t, d_h, scale, drop_below, more, start, length, first,
        head, HAS_QUERY, HAS_KEY, DROPOUT, D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    _gradient_of_queries(
        Q, K, V, BY_QUERY, BY_KEY, DO, DQ, D_BY_QUERY, LSE, DELTA, MASK_ROWS, T, reach, q_t, q_h, k_t, k_h, v_t,
        v_h, bq_t, bq_h, bk_t, bk_h, do_t, do_h, g_t, g_h, d_t, d_h, scale, drop_below, more, start, length, first,
        head, HAS_QUERY, HAS_KEY, DROPOUT, D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip


_HALF = Tiles(block_m=64, block_n=32, warps=4, stages=1)
#: Wide heads, and fp32: what fits.
_SMALL = Tiles(block_m=32, block_n=32, warps=4, stages=1)


def _tiles(q: Tensor) -> Tiles:
    return _SMALL if q.dtype == torch.float32 or q.shape[2] > 64 else _HALF


def _by_distance(
    q: Tensor, k: Tensor, keys: Tensor | None, queries: Tensor | None, bias: Tensor | None, bucket: Tensor
) -> tuple[Tensor, Tensor, bool, bool]:
    """Columns of queries and of keys, (H, T, W), and whether there are any. A bias alone is one row for all queries."""
    nothing = q.new_zeros(1, 1, 1)
    by_query = by_key = nothing
    if keys is not None:
        by_query = torch.bmm(q, keys.index_select(1, bucket).transpose(1, 2))
    if bias is not None:
        bias_H1W = bias.index_select(1, bucket)[:, None]
        by_query = bias_H1W.expand(-1, q.shape[1], -1) if keys is None else by_query + bias_H1W
    if queries is not None:
        by_key = torch.bmm(k, queries.index_select(1, bucket).transpose(1, 2))
    return by_query, by_key, by_query is not nothing, by_key is not nothing


@torch.library.custom_op("brimful::relative_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None,
    queries: Tensor | None,
    bias: Tensor | None,
    bucket: Tensor,
    offsets: Tensor,
    seed: Tensor | None,
    max_length: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log of the weights' sums (H, T), and keys of the dropout mask's rows (H, T) if there is one.

    seed: as of `relative_attention_HTD`.
    """
    dropout, site = current().probability(dropout), 0
    if seed is None:
        seed, site = current().dropout_site(offsets, q.shape[1], dropout)
    seed = row_seeds(seed, q.shape[1], dropout)
    out, lse, mask_rows = empty_outputs(q, dropout)
    by_query, by_key, has_query, has_key = _by_distance(q, k, keys, queries, bias, bucket)
    grid, constants = launch(q, offsets, max_length, _tiles(q))
    strides = [x.stride(axis) for x in (q, k, v, by_query, by_key, out) for axis in (1, 0)]
    relative_attention_forward[grid](
        q, k, v, by_query, by_key, out, lse, mask_rows, offsets, seed, site, q.shape[1], bucket.shape[0] // 2, *strides,
        scale * _LOG2_E, threshold(dropout), kept_factor(dropout), HAS_QUERY=has_query, HAS_KEY=has_key,
        DROPOUT=dropout > 0, **constants,
    )  # fmt: skip
    return out, lse, mask_rows


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, queries: Tensor | None, bias: Tensor | None, bucket: Tensor,
    offsets: Tensor, seed: Tensor | None, max_length: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_outputs(q, dropout)


@torch.library.custom_op("brimful::relative_attention_backward", mutates_args=())
def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, queries: Tensor | None,
    bias: Tensor | None, bucket: Tensor, offsets: Tensor, out: Tensor, lse: Tensor, mask_rows: Tensor,
    max_length: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys, values and the three tables; an empty tensor for a table that is not there."""
    heads, tokens, head_dim = q.shape
    gradient = gradient if gradient.stride(2) == 1 else gradient.contiguous()
    delta, found = torch.empty_like(lse), [q.new_empty(heads, tokens, head_dim) for _ in range(3)]
    varlen_attention_delta[(num_tiles(tokens, 64), heads)](
        out, gradient, lse, delta, tokens, out.stride(1), out.stride(0), gradient.stride(1), gradient.stride(0),
        1.0, PAIRED=False, D=head_dim, BLOCK=64,
    )  # fmt: skip
    by_query, by_key, has_query, has_key = _by_distance(q, k, keys, queries, bias, bucket)
    columns = (heads, tokens, bucket.shape[0])
    d_by_query, d_by_key = (q.new_zeros(columns if has else (1, 1, 1)) for has in (has_query, has_key))
    strides = [x.stride(axis) for x in (q, k, v, by_query, by_key, gradient, found[0]) for axis in (1, 0)]
    grid, constants = launch(q, offsets, max_length, _tiles(q))
    relative_attention_backward[grid](
        q, k, v, by_query, by_key, gradient, *found, d_by_query, d_by_key, lse, delta, mask_rows, offsets, tokens,
        bucket.shape[0] // 2, *strides, columns[2], tokens * columns[2], scale, threshold(dropout),
        kept_factor(dropout), HAS_QUERY=has_query, HAS_KEY=has_key, DROPOUT=dropout > 0, **constants,
    )  # fmt: skip
    d_q, d_k, d_v = found
    d_q, d_keys = _through_positions(d_q, d_by_query, q, keys, bucket)
    d_k, d_queries = _through_positions(d_k, d_by_key, k, queries, bucket)
    d_bias = q.new_empty(0)
    if bias is not None:
        d_bias = (d_by_query.sum(1, dtype=torch.float32) @ _members(bias, bucket, torch.float32).T).to(bias.dtype)
    return d_q, d_k, d_v, d_keys, d_queries, d_bias


def _through_positions(
    d_tokens: Tensor, d_columns: Tensor, tokens: Tensor, table: Tensor | None, bucket: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and of a table, (H, R, D), whose products were the columns; the tokens' added to theirs."""
    if table is None:
        return d_tokens, tokens.new_empty(0)
    d_tokens = torch.baddbmm(d_tokens, d_columns, table.index_select(1, bucket))
    d_distances = torch.bmm(d_columns.transpose(1, 2), tokens)
    return d_tokens, torch.matmul(_members(table, bucket, table.dtype), d_distances)


def _members(table: Tensor, bucket: Tensor, dtype: torch.dtype) -> Tensor:
    """(R, W): 1 where a distance is in a bucket. A product with it sums in one order, where index_add has none."""
    return (torch.arange(table.shape[1], device=bucket.device)[:, None] == bucket).to(dtype)


@attend_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, queries: Tensor | None,
    bias: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    d_keys, d_queries, d_bias = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (keys, queries, bias))
    return d_q, d_k, d_v, d_keys, d_queries, d_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _, max_length, scale, dropout = inputs
    ctx.settings = (max_length, scale, current().probability(dropout))
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    tables = ctx.saved_tensors[3:6]
    d_q, d_k, d_v, *d_tables = attend_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    found = [None if table is None else each for table, each in zip(tables, d_tables, strict=True)]
    return d_q, d_k, d_v, *found, *[None] * 6


attend.register_autograd(_gradients, setup_context=_setup)

#: What it is in the graphs of dynamo.
OPERATOR = torch.ops.brimful.relative_attention.default


def relative_attention_HTD(
    q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, segments: Segments, pattern: Pattern, seed: Tensor | None = None
) -> Tensor:
    """Attention within segments with a bias by distance, (H, T, D); every token must be in a segment.

    seed: as of `row_seeds`; None for those of the next site of the active forward context.
    Raises: ValueError without a table, or if the distances do not reach over the longest segment.
    """
    given, max_length = pattern.relative, segments.max_length
    if given is None or (given.keys_HRD is None and given.queries_HRD is None and given.bias_HR is None):
        raise ValueError("relative attention has no table")
    if given.bucket_W.shape[0] < 2 * max_length:
        raise ValueError(f"{given.bucket_W.shape[0]} distances do not reach over segments of {max_length} tokens")
    q_HTD, k_HTD, v_HTD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_HTD, k_HTD, v_HTD))
    keys_HRD, queries_HRD = (x if x is None else x.to(q_HTD.dtype) for x in (given.keys_HRD, given.queries_HRD))
    out: Tensor = attend(
        q_HTD, k_HTD, v_HTD, keys_HRD, queries_HRD, given.bias_HR, given.bucket_W, segments.cu_seqlens_N, seed,
        max_length, pattern.scale, pattern.dropout,
    )[0]  # fmt: skip
    return out
