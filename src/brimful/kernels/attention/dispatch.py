"""Variable-length attention over one packed row: fast kernels beside their reference.

All take queries (H, T, D), keys and values (K, T, D) with K dividing H, and return (H, T, D). A token sees the tokens
of its own segment: those before it and itself if `causal`; those nearer than `window` if there is one, so that a
window of w covers w tokens of the past with the token itself, and as many of the future where it is not causal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.kernels.layout import Group, Segments

try:
    from brimful.kernels.attention import distance_bias, varlen
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    distance_bias = varlen = None  # type: ignore[assignment]


Attention = Callable[[Tensor, Tensor, Tensor, Segments, Pattern], Tensor]


def reference_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """The reference: a T x T score matrix with everything outside a segment masked. Memory grows with T squared."""
    k_HTD, v_HTD = _repeat_heads(q_HTD, k_KTD, v_KTD)
    same_TT = segments.segment_T[:, None] == segments.segment_T[None, :]
    place_T = torch.arange(q_HTD.shape[1], device=q_HTD.device)
    bias_HTT = None if pattern.relative is None else _bias_HTT(q_HTD, k_HTD, place_T, pattern.relative)
    return _masked_attention(q_HTD, k_HTD, v_HTD, same_TT & _visible(place_T, pattern), pattern, bias_HTT)


def grouped_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """Padded rows of similar length through torch's scaled-dot-product attention; only attention sees padding.

    For devices and dtypes without a variable-length kernel, and for patterns that kernels do not have (soft caps).
    """
    if not segments.groups:
        raise ValueError("grouped_attention needs segments made by with_groups")
    k_HTD, v_HTD = _repeat_heads(q_HTD, k_KTD, v_KTD)
    by_torch = pattern.softcap is None and pattern.relative is None
    outputs = []
    for group in segments.groups:
        q, k, v = (_rows_RHLD(x, group) for x in (q_HTD, k_HTD, v_HTD))
        if by_torch and pattern.causal and not _cuts(pattern, group):
            found = F.scaled_dot_product_attention(
                q, k, v, dropout_p=pattern.dropout, scale=pattern.scale, is_causal=True
            )
        else:
            bias = None if pattern.relative is None else _bias_RHLL(q, k, pattern.relative)
            found = _masked_attention(q, k, v, _seen(pattern, group), pattern, bias)
        outputs.append(found.transpose(1, 2).flatten(0, 1))
    # Whole tokens are gathered, (H * D) at once: their gradient is then a sum of rows, which is fast everywhere.
    out_TX = torch.cat(outputs).flatten(1) if len(outputs) > 1 else outputs[0].flatten(1)
    if segments.place_T is not None:
        out_TX = out_TX.index_select(0, segments.place_T)
    out_THD: Tensor = out_TX.unflatten(1, (q_HTD.shape[0], -1))
    return out_THD.transpose(0, 1)


def _cuts(pattern: Pattern, group: Group) -> bool:
    """True if rows of a group are longer than the window."""
    return pattern.window is not None and pattern.window < group.index_RL.shape[1]


def _seen(pattern: Pattern, group: Group) -> Tensor | None:
    """Bool, of a shape that broadcasts to (R, H, L, L): which keys a query sees; None if all. No row of it is empty."""
    place_L = torch.arange(group.index_RL.shape[1], device=group.index_RL.device)
    if pattern.causal:  # padding is behind a row's tokens, where none of them looks
        return _visible(place_L, pattern)
    seen = group.valid_RL[:, None, None, :]
    if _cuts(pattern, group):
        return seen & _visible(place_L, pattern) | (place_L == place_L[:, None])  # padding sees itself
    return None if group.start is not None or _full(group.valid_RL) else seen


def _rows_RHLD(x_HTD: Tensor, group: Group) -> Tensor:
    index_RL, x_THD = group.index_RL, x_HTD.transpose(0, 1)  # as projections make them: one copy of a gradient
    if group.start is not None:
        size = index_RL.numel()
        if size < x_THD.shape[0]:  # else a gradient would be copied for nothing
            x_THD = x_THD.narrow(0, group.start, size)
        rows_RLHD: Tensor = x_THD.unflatten(0, index_RL.shape)
        return rows_RLHD.transpose(1, 2)
    rows_RLX = x_THD.flatten(1).index_select(0, index_RL.flatten()).unflatten(0, index_RL.shape)
    rows_RLHD = rows_RLX.unflatten(2, (x_HTD.shape[0], -1))
    return rows_RLHD.transpose(1, 2)


def _full(valid_RL: Tensor) -> bool:
    """True if a group has no padding; only asked on the CPU, where looking costs nothing."""
    return valid_RL.device.type == "cpu" and bool(valid_RL.all())


def flash_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """FlashAttention-2 as torch ships it, for bf16 and fp16 on a GPU; windows and dropout included, no soft cap."""
    cu_seqlens_N, longest = segments.cu_seqlens_N, segments.max_length
    left = -1 if pattern.window is None else pattern.window - 1
    out_THD: Tensor = torch.ops.aten._flash_attention_forward(
        *(x.transpose(0, 1) for x in (q_HTD, k_KTD, v_KTD)),
        cu_seqlens_N,
        cu_seqlens_N,
        longest,
        longest,
        pattern.dropout,
        pattern.causal,
        False,
        scale=pattern.scale,
        window_size_left=left,
        window_size_right=0 if pattern.causal else left,
    )[0]
    return out_THD.transpose(0, 1)


def efficient_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """The memory-efficient kernel as torch ships it: variable length in fp32 on a GPU; no window, no soft cap."""
    k_HTD, v_HTD = _repeat_heads(q_HTD, k_KTD, v_KTD)
    out_1THD: Tensor = torch.ops.aten._efficient_attention_forward(
        *(x.transpose(0, 1)[None] for x in (q_HTD, k_HTD, v_HTD)),
        None,
        segments.cu_seqlens_N,
        segments.cu_seqlens_N,
        segments.max_length,
        segments.max_length,
        pattern.dropout,
        1 if pattern.causal else 0,
        True,
        scale=pattern.scale,
    )[0]
    return out_1THD[0].transpose(0, 1)


def triton_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """Our own kernel (`varlen.py`): variable length with windows and soft caps, in bf16, fp16 and fp32 on a GPU."""
    assert varlen is not None
    k_HTD, v_HTD = _repeat_heads(q_HTD, k_KTD, v_KTD)
    return varlen.varlen_attention_HTD(q_HTD, k_HTD, v_HTD, segments, pattern)


def relative_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
    """Our own kernel with a bias by distance (`distance_bias.py`): variable length in bf16, fp16 and fp32 on a GPU."""
    assert distance_bias is not None
    k_HTD, v_HTD = _repeat_heads(q_HTD, k_KTD, v_KTD)
    return distance_bias.relative_attention_HTD(q_HTD, k_HTD, v_HTD, segments, pattern)


#: Mean length up to which our kernel is taken where none was measured, with heads of 64 at the most: there it is faster
#: than FlashAttention-2 on an H200 (benchmarks/attention).
_SHORT = 512
#: Mean lengths up to which classes go, for each of which kernels are measured; the last class is all longer ones.
LENGTH_CLASSES = (64, 128, 256, 512, 1024, 2048, 4096)


def length_class(typical_length: int) -> int:
    """The number of the class that a mean length is in."""
    for number, longest in enumerate(LENGTH_CLASSES):
        if typical_length <= longest:
            return number
    return len(LENGTH_CLASSES)


def candidates(device: torch.device, dtype: torch.dtype, pattern: Pattern, head_dim: int) -> tuple[Attention, ...]:
    """The kernels that can do it here, at least one; ours, the only one inside of fused layers, comes first."""
    if device.type != "cuda" or dtype == torch.float64:
        return (grouped_attention,)
    ours = varlen is not None and varlen.supports(dtype, head_dim)
    if pattern.relative is not None:
        plain = not pattern.causal and pattern.window is None and pattern.softcap is None
        return (relative_attention if ours and plain else grouped_attention,)
    half = dtype in (torch.bfloat16, torch.float16)
    other: Attention | None = None
    if pattern.softcap is None:
        if half:
            other = flash_attention if head_dim <= 256 else None
        elif pattern.window is None:
            other = efficient_attention
    if not ours:
        return (other or grouped_attention,)
    return (triton_attention,) if other is None else (triton_attention, other)


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    pattern: Pattern,
    head_dim: int,
    typical_length: int | None = None,
    wanted: str | None = None,
) -> Attention:
    """The kernel that is wanted, or the one that is known to be the fastest, of those that can do it here. The choice
    depends on no input's value, so it may be captured.

    typical_length: mean length of the sequences to come; None if it is not known. wanted: the name of a kernel.
    """
    found = candidates(device, dtype, pattern, head_dim)
    if len(found) == 1 or found[0].__name__ == wanted:
        return found[0]
    if found[1].__name__ == wanted or typical_length is None:
        return found[1]
    return found[0] if typical_length <= _SHORT and head_dim <= 64 else found[1]


def _repeat_heads(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Tensor]:
    times = q_HTD.shape[0] // k_KTD.shape[0]
    if times == 1:
        return k_KTD, v_KTD
    return k_KTD.repeat_interleave(times, 0), v_KTD.repeat_interleave(times, 0)


def _visible(place_T: Tensor, pattern: Pattern) -> Tensor:
    """(T, T) bool: which keys a query sees by causality and window alone."""
    distance_TT = place_T[:, None] - place_T[None, :]
    seen = distance_TT >= 0 if pattern.causal else torch.ones_like(distance_TT, dtype=torch.bool)
    return seen if pattern.window is None else seen & (distance_TT.abs() < pattern.window)


def _bias_HTT(q_HTD: Tensor, k_HTD: Tensor, place_T: Tensor, given: RelativeBias) -> Tensor:
    """The bias of every pair, by its definition. Distances that no segment has are taken as the farthest."""
    reach = given.bucket_W.shape[0] // 2
    bucket_TT = given.bucket_W[(place_T - place_T[:, None] + reach).clamp(0, 2 * reach - 1)]
    bias_HTT = q_HTD.new_zeros(q_HTD.shape[0], *bucket_TT.shape)
    if given.keys_HRD is not None:
        by_query_HTR = q_HTD @ given.keys_HRD.to(q_HTD.dtype).transpose(1, 2)
        bias_HTT = bias_HTT + by_query_HTR.gather(2, bucket_TT.expand_as(bias_HTT))
    if given.queries_HRD is not None:
        by_key_HTR = k_HTD @ given.queries_HRD.to(k_HTD.dtype).transpose(1, 2)
        bias_HTT = bias_HTT + by_key_HTR.gather(2, bucket_TT.T.expand_as(bias_HTT)).transpose(1, 2)
    if given.bias_HR is not None:
        bias_HTT = bias_HTT + given.bias_HR[:, bucket_TT].to(q_HTD.dtype)
    return bias_HTT


def _bias_RHLL(q_RHLD: Tensor, k_RHLD: Tensor, given: RelativeBias) -> Tensor:
    """The bias of pairs in padded rows: products with the 2 L nearest distances, each row then moved into its place."""
    length, reach = q_RHLD.shape[2], given.bucket_W.shape[0] // 2
    near = slice(reach - length, reach + length)
    ahead_W, behind_W = given.bucket_W[near], given.bucket_W.flip(0).roll(1)[near]  # by distances j - i, and i - j
    parts = []
    if given.keys_HRD is not None:
        parts.append(_aligned(q_RHLD @ _rows_of(given.keys_HRD, ahead_W, q_RHLD.dtype).transpose(1, 2)))
    if given.queries_HRD is not None:
        by_key = k_RHLD @ _rows_of(given.queries_HRD, behind_W, k_RHLD.dtype).transpose(1, 2)
        parts.append(_aligned(by_key).transpose(2, 3))
    if given.bias_HR is not None:
        parts.append(_aligned(_rows_of(given.bias_HR, ahead_W, q_RHLD.dtype)[:, None].expand(-1, length, -1)))
    total: Tensor = sum(parts[1:], parts[0])
    return total


def _rows_of(table: Tensor, bucket_W: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of a table (H, R, ...) that distances read; the gradient of a row that many read is summed in fp32."""
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    rows: Tensor = wide.index_select(1, bucket_W).to(dtype)
    return rows


def _aligned(by_distance: Tensor) -> Tensor:
    """(..., L, 2 L) by row and distance + L, to (..., L, L) by row and column: row i begins i columns further left."""
    length = by_distance.shape[-2]
    shifted: Tensor = by_distance.flatten(-2)[..., length:].unflatten(-1, (length, 2 * length - 1))
    return shifted[..., :length]


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, pattern: Pattern, bias: Tensor | None = None
) -> Tensor:
    if pattern.softcap is None:
        mask = seen if bias is None else bias if seen is None else bias.masked_fill(~seen, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=pattern.dropout, scale=pattern.scale)
    scores = q @ k.transpose(-1, -2)
    if bias is None:
        scores = scores * (pattern.scale / pattern.softcap)
    else:
        scores = (scores * pattern.scale + bias) / pattern.softcap
    scores = pattern.softcap * torch.tanh(scores)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, pattern.dropout) @ v
