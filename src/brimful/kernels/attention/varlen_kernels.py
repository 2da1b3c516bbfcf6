"""The kernels of variable-length attention, one forward and one backward; `varlen` cuts and launches them.

One program works on one block of one segment of one head. The backward pass visits the same block twice, as keys for
their gradient and as queries for theirs, so nothing is added atomically and equal inputs give equal bits. Windows, soft
caps, causality and dropout are inside; a segment shorter than a block is a single pass.

Dropout hashes (seed, head, query, key), the query by its place in the effective batch and the key by its position: the
forward and backward pass draw the same mask without storing it.

Source: Dao 2023, arXiv 2307.08691 (FlashAttention-2).
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from brimful.kernels.dropout import column_keys, kept, kept_at, row_keys


@triton.jit
def _scores(q, k, inner, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Products of rows of q with rows of k; with a soft cap, the tanh of them times `inner`, over 2 log2(e).

    What multiplies them further is left to the multiply-add of whoever takes their exponential.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP:
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * inner))
    return s


@triton.jit
def _seen(queries, keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Mask of the keys that a query sees by causality and window; both in shapes that broadcast."""
    distance = queries - keys
    seen = distance == distance
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW > 0:
        seen = seen & (distance < WINDOW) & (distance > -WINDOW)
    return seen


@triton.jit
def _range(first, last, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
           OF_KEYS: tl.constexpr):  # fmt: skip
    """From a multiple of BLOCK: keys that queries from `first` up to `last` see, or queries that see such keys."""
    low, high = 0, length
    if WINDOW > 0:
        low = tl.maximum(0, first - WINDOW + 1) // BLOCK * BLOCK
        high = tl.minimum(high, last + WINDOW - 1)
    if CAUSAL:
        if OF_KEYS:
            high = tl.minimum(high, last)
        else:
            low = tl.maximum(low, first // BLOCK * BLOCK)
    return low, high


@triton.jit
def _kept_block(mask_rows, mask_columns, place, drop_below):
    """`kept_at` for columns from `place` on. mask_columns: keys of columns from 0 on; a key is linear in its place."""
    places = (mask_rows + column_keys(place + tl.zeros([1], tl.int32)))[:, None] + mask_columns[None, :]
    return kept(places, mask_rows[:, None], drop_below)


@triton.jit
def head_rows(X, start, rows, length, head, stride_t, stride_h, D: tl.constexpr, MASKED: tl.constexpr = True):
    """Rows of one head, (BLOCK, D), 0 beyond the segment."""
    places = X + start.to(tl.int64) * stride_t + head * stride_h + (rows[:, None] * stride_t + tl.arange(0, D)[None, :])
    return tl.load(places, mask=(rows < length)[:, None], other=0.0) if MASKED else tl.load(places)


@triton.jit
def row_numbers(X, rows, length, MASKED: tl.constexpr = True):
    """A number for each row of a segment, 0 beyond it. X: where the segment's first is."""
    return tl.load(X + rows, mask=rows < length, other=0) if MASKED else tl.load(X + rows)


@triton.jit(do_not_specialize=["site"])
def varlen_attention_forward(
    Q, K, V, OUT, LSE, MASK_ROWS, CU_SEQLENS, SEED, site, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, inner, power,
    drop_below, more, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
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
    mask_columns = column_keys(tl.arange(0, BLOCK_N))
    if DROPOUT:
        mask_rows = row_keys(SEED, site, head, start + rows, rows < length)
        places = head.to(tl.int64) * T + start + rows
        tl.store(MASK_ROWS + places, mask_rows.to(tl.int32, bitcast=True), mask=rows < length)
    low, high = _range(first, first + BLOCK_M, length, CAUSAL, WINDOW, BLOCK_N, True)
    whole = length // BLOCK_N * BLOCK_N
    for tail in tl.static_range(1 - SPLIT, 2):  # whole blocks, then the last one, which needs masks
        for place in range(whole if SPLIT and tail else low, high if tail else whole, BLOCK_N):
            columns = place + tl.arange(0, BLOCK_N)
            k = head_rows(K, start, columns, length, head, k_t, k_h, D, tail)
            v = head_rows(V, start, columns, length, head, v_t, v_h, D, tail)
            s = _scores(q, k, inner, CAP, PRECISION)
            if tail:
                seen = (columns < length)[None, :]
                if CAUSAL or WINDOW > 0:
                    seen = seen & _seen(rows[:, None], columns[None, :], CAUSAL, WINDOW)
                s = tl.where(seen, s, float("-inf"))
            now = tl.maximum(largest, tl.max(s, 1) * power)
            base = now
            if tail:
                base = tl.where(now == float("-inf"), 0.0, now)
            p = tl.exp2(s * power - base[:, None])
            shrink = tl.exp2(largest - base)
            total = total * shrink + tl.sum(p, 1)
            if DROPOUT:
                p = tl.where(_kept_block(mask_rows, mask_columns, place, drop_below), p, 0.0)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            largest = now
    inside = rows < length
    total = tl.where(inside, total, 1.0)
    out = out * (more / total)[:, None]
    places = (start + rows).to(tl.int64)[:, None] * o_t + head * o_h + tl.arange(0, D)[None, :]
    tl.store(OUT + places, out.to(OUT.dtype.element_ty), mask=inside[:, None])
    tl.store(LSE + head.to(tl.int64) * T + start + rows, largest + tl.log2(total), mask=inside)


@triton.jit
def varlen_attention_delta(OUT, DO, LSE, DELTA, T, o_t, o_h, do_t, do_h, less, PAIRED: tl.constexpr, D: tl.constexpr,
                           BLOCK: tl.constexpr):  # fmt: skip
    """Row sums of out times its gradient, times `less`, (H, T); or PAIRED, (H, T, 2), behind LSE times -1."""
    start, head, rows = tl.program_id(0) * BLOCK, tl.program_id(1), tl.arange(0, BLOCK)
    o = head_rows(OUT, start, rows, T - start, head, o_t, o_h, D)
    do = head_rows(DO, start, rows, T - start, head, do_t, do_h, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) * less
    inside = rows < T - start
    places = head.to(tl.int64) * T + start + rows
    if PAIRED:
        tl.store(DELTA + 2 * places, -tl.load(LSE + places, mask=inside, other=0.0), mask=inside)
        tl.store(DELTA + 2 * places + 1, delta, mask=inside)
    else:
        tl.store(DELTA + places, delta, mask=inside)


@triton.jit
def _row_sums(OUT, LSE, PAIRS, do, start, rows, length, head, T, o_t, o_h, less, READY: tl.constexpr, D: tl.constexpr,
              MASKED: tl.constexpr = True):  # fmt: skip
    """Of a block's rows, LSE times -1 and delta: read as one number of 64 bits each where they are READY, or delta made
    of what was read anyway."""
    first = head.to(tl.int64) * T + start
    if READY:
        pairs = row_numbers(PAIRS + first, rows, length, MASKED)
        below = pairs.to(tl.int32).to(tl.float32, bitcast=True)
        delta = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        below = -row_numbers(LSE + first, rows, length, MASKED)
        o = head_rows(OUT, start, rows, length, head, o_t, o_h, D, MASKED)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) * less
    return below, delta


@triton.jit
def _gradient_of_keys(
    Q, K, V, OUT, DO, DK, DV, LSE, PAIRS, MASK_ROWS, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t, do_h, g_t, g_h,
    scale, inner, power, drop_below, more, less, start, length, first, head, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr, READY: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block as keys, (keys, queries): their gradient and their values', from every query that sees them."""
    own = first + tl.arange(0, BLOCK_M)
    k = head_rows(K, start, own, length, head, k_t, k_h, D)
    v = head_rows(V, start, own, length, head, v_t, v_h, D)
    dk = tl.zeros([BLOCK_M, D], tl.float32)
    dv = tl.zeros([BLOCK_M, D], tl.float32)
    place_of_rows = head.to(tl.int64) * T + start
    low, high = _range(first, first + BLOCK_M, length, CAUSAL, WINDOW, BLOCK_N, False)
    whole = length // BLOCK_N * BLOCK_N
    for tail in tl.static_range(1 - SPLIT, 2):
        for place in range(whole if SPLIT and tail else low, high if tail else whole, BLOCK_N):
            rows = place + tl.arange(0, BLOCK_N)
            q = head_rows(Q, start, rows, length, head, q_t, q_h, D, tail)
            do = head_rows(DO, start, rows, length, head, do_t, do_h, D, tail)
            below, delta = _row_sums(OUT, LSE, PAIRS, do, start, rows, length, head, T, o_t, o_h, less, READY, D, tail)
            s = _scores(k, q, inner, CAP, PRECISION)
            exponent = s * power + below[None, :]
            if tail:
                exponent = tl.minimum(exponent, 0.0)
            p = tl.exp2(exponent)
            if CAUSAL or WINDOW > 0:
                p = tl.where(_seen(rows[None, :], own[:, None], CAUSAL, WINDOW), p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            met = p
            if DROPOUT:
                mask_rows = row_numbers(MASK_ROWS + place_of_rows, rows, length, tail).to(tl.uint32, bitcast=True)
                met = tl.where(kept_at(mask_rows[None, :], own[:, None], drop_below), p, 0.0)
            ds = met * dp - p * delta[None, :]
            if CAP:
                ds = ds * (1.0 - s * s)
            dv += tl.dot(met.to(do.dtype), do, input_precision=PRECISION)
            dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    places = (start + own).to(tl.int64)[:, None] * g_t + head * g_h + tl.arange(0, D)[None, :]
    inside = (own < length)[:, None]
    dk *= scale * more
    dv *= more
    tl.store(DK + places, dk.to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + places, dv.to(DV.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_of_queries(
    Q, K, V, OUT, DO, DQ, LSE, PAIRS, MASK_ROWS, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t, do_h, g_t, g_h,
    scale, inner, power, drop_below, more, less, start, length, first, head, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr, READY: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block as queries, (queries, keys): their gradient, from every key that they see."""
    own = first + tl.arange(0, BLOCK_M)
    q = head_rows(Q, start, own, length, head, q_t, q_h, D)
    do = head_rows(DO, start, own, length, head, do_t, do_h, D)
    below, delta = _row_sums(OUT, LSE, PAIRS, do, start, own, length, head, T, o_t, o_h, less, READY, D)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    mask_rows = own
    mask_columns = column_keys(tl.arange(0, BLOCK_N))
    if DROPOUT:
        mask_rows = row_numbers(MASK_ROWS + head.to(tl.int64) * T + start, own, length).to(tl.uint32, bitcast=True)
    low, high = _range(first, first + BLOCK_M, length, CAUSAL, WINDOW, BLOCK_N, True)
    whole = length // BLOCK_N * BLOCK_N
    for tail in tl.static_range(1 - SPLIT, 2):
        for place in range(whole if SPLIT and tail else low, high if tail else whole, BLOCK_N):
            columns = place + tl.arange(0, BLOCK_N)
            k = head_rows(K, start, columns, length, head, k_t, k_h, D, tail)
            v = head_rows(V, start, columns, length, head, v_t, v_h, D, tail)
            s = _scores(q, k, inner, CAP, PRECISION)
            exponent = s * power + below[:, None]
            if tail:
                exponent = tl.minimum(exponent, 0.0)
            p = tl.exp2(exponent)
            if CAUSAL or WINDOW > 0:
                p = tl.where(_seen(own[:, None], columns[None, :], CAUSAL, WINDOW), p, 0.0)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if DROPOUT:
                dp = tl.where(_kept_block(mask_rows, mask_columns, place, drop_below), dp, 0.0)
            ds = p * (dp - delta[:, None])
            if CAP:
                ds = ds * (1.0 - s * s)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    places = (start + own).to(tl.int64)[:, None] * g_t + head * g_h + tl.arange(0, D)[None, :]
    inside = (own < length)[:, None]
    dq *= scale * more
    tl.store(DQ + places, dq.to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def varlen_attention_backward(
    Q, K, V, OUT, DO, DQ, DK, DV, LSE, PAIRS, MASK_ROWS, CU_SEQLENS, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t,
    do_h, g_t, g_h, scale, inner, power, drop_below, more, less, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, DROPOUT: tl.constexpr, READY: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Beyond its segment a block reads zeros, and what comes of them is multiplied with zeros or not stored.

    Only the exponential needs care there: its argument is at most 0 where it counts, and is cut at 0 elsewhere.
    PAIRS: (H, T) of 64 bits, what `varlen_attention_delta` leaves in pairs, if READY.
    """
    block, segment, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(CU_SEQLENS + segment)
    length = tl.load(CU_SEQLENS + segment + 1) - start
    first = block * BLOCK_M
    if first >= length:
        return
    _gradient_of_keys(
        Q, K, V, OUT, DO, DK, DV, LSE, PAIRS, MASK_ROWS, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t, do_h, g_t,
        g_h, scale, inner, power, drop_below, more, less, start, length, first, head, CAUSAL, WINDOW, CAP,
        DROPOUT, READY, D, BLOCK_M, BLOCK_N, SPLIT, PRECISION,
    )  # fmt: skip
    _gradient_of_queries(
        Q, K, V, OUT, DO, DQ, LSE, PAIRS, MASK_ROWS, T, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t, do_h, g_t, g_h,
        scale, inner, power, drop_below, more, less, start, length, first, head, CAUSAL, WINDOW, CAP, DROPOUT, READY,
        D, BLOCK_M, BLOCK_N, SPLIT, PRECISION,
    )  # fmt: skip
