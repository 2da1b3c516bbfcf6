"""Variable-length attention in Triton, as operators with gradients; `reference_attention` is its reference.

How the kernels (`varlen_kernels`) are cut into tiles depends on how long segments are.

A product in fp32 is the sum of three in tf32, of the leading and of the trailing bits of each factor: on matrix units,
with an error below that of torch's own fp32 attention (benchmarks/attention). Where tf32 is allowed it is one.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.attention.varlen_kernels import (
    varlen_attention_backward,
    varlen_attention_delta,
    varlen_attention_forward,
)
from brimful.kernels.dropout import kept_factor, threshold
from brimful.kernels.forward_context import current
from brimful.kernels.layout import Segments
from brimful.kernels.rng import row_seeds
from brimful.kernels.tiles import num_tiles

_LOG2_E = 1.4426950408889634


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel takes such queries: bf16, fp16 and fp32, heads of 16, 32, 64 or 128."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch shape of a kernel: rows per program, rows of the other operand per iteration, warps, stages.

    registers: most of a thread, so that more programs fit a multiprocessor; None for as many as the compiler likes.
    split: whether blocks that need no mask have a loop of their own. ready: backward, whether row sums of outputs times
    their gradients are there before it, by a kernel of their own.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    split: bool = False
    ready: bool = False


#: For heads of 64 in half precision on an H200 (benchmarks/attention): short segments, long ones forward and backward.
#: MASKED: forward with causality or a window. DROPPED: backward with dropout and neither of them.
SHORT = Tiles(block_m=64, block_n=32, warps=4, stages=1)
LONG_FORWARD = Tiles(block_m=64, block_n=64, warps=4, stages=3, registers=128, split=True)
MASKED_LONG_FORWARD = Tiles(block_m=64, block_n=64, warps=4, stages=3)
LONG_BACKWARD = Tiles(block_m=64, block_n=32, warps=4, stages=1, registers=128, ready=True)
DROPPED_LONG_BACKWARD = Tiles(block_m=64, block_n=32, warps=4, stages=2, registers=128, split=True, ready=True)
#: fp32 (benchmarks/attention).
_WIDE = Tiles(block_m=64, block_n=32, warps=4, stages=1)
#: Wide heads: what fits.
_SMALL = Tiles(block_m=32, block_n=32, warps=4, stages=2)
#: Mean length beyond which segments are long: between two of `attention.LENGTH_CLASSES`.
_LONG = 128


def _tiles(q: Tensor, typical_length: int, long: Tiles) -> Tiles:
    if q.shape[2] > 64:
        return _SMALL
    if q.dtype == torch.float32:
        return _WIDE
    return long if typical_length > _LONG else SHORT


def launch(q: Tensor, offsets: Tensor, max_length: int, tiles: Tiles) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid, and the constants of all kernels that follow from the shapes."""
    heads, _, head_dim = q.shape
    grid = (num_tiles(max_length, tiles.block_m), offsets.shape[0] - 1, heads)
    full = torch.backends.cuda.matmul.fp32_precision != "tf32"
    precision = "tf32x3" if q.dtype == torch.float32 and full else "tf32"
    constants = {"D": head_dim, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "PRECISION": precision}
    return grid, constants | {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers}


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """Factors of the scores before the tanh of a soft cap, and before the exponential to base 2."""
    if softcap > 0:
        return 2.0 * _LOG2_E * scale / softcap, softcap * _LOG2_E
    return 1.0, scale * _LOG2_E


def empty_outputs(q: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of the forward pass's output, logs of sums, and keys of the dropout mask's rows."""
    heads, tokens, head_dim = q.shape
    out = q.new_empty(tokens, heads, head_dim).transpose(0, 1)
    mask_rows = q.new_empty((heads, tokens) if dropout > 0 else (0, 0), dtype=torch.int32)
    return out, q.new_empty(heads, tokens, dtype=torch.float32), mask_rows


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    seed: Tensor | None,
    max_length: int,
    typical_length: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    dropout: float,
    site: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log of the weights' sums (H, T), and keys of the dropout mask's rows (H, T) if there is one.

    seed: as of `row_seeds`; None for those of the next site of the active forward context, whatever `site` is.
    """
    if seed is None:
        seed, site = current().dropout_site(offsets, q.shape[1], dropout)
    seed = row_seeds(seed, q.shape[1], dropout)
    out, lse, mask_rows = empty_outputs(q, dropout)
    tiles = _tiles(q, typical_length, MASKED_LONG_FORWARD if causal or window else LONG_FORWARD)
    grid, constants = launch(q, offsets, max_length, tiles)
    strides = [x.stride(axis) for x in (q, k, v, out) for axis in (1, 0)]
    varlen_attention_forward[grid](
        q, k, v, out, lse, mask_rows, offsets, seed, site, q.shape[1], *strides,
        *_factors(scale, softcap), threshold(dropout), kept_factor(dropout), CAUSAL=causal, WINDOW=window,
        CAP=softcap > 0, DROPOUT=dropout > 0, SPLIT=tiles.split, **constants,
    )  # fmt: skip
    return out, lse, mask_rows


#: The same for graphs of torch's compiler and our recordings, and with a gradient: a tenth of a millisecond more.
attend = torch.library.custom_op("brimful::varlen_attention", attended, mutates_args=())


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, seed: Tensor | None, max_length: int, typical_length: int,
    scale: float, causal: bool, window: int, softcap: float, dropout: float, site: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_outputs(q, dropout)


def attended_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask_rows: Tensor, offsets: Tensor,
    max_length: int, typical_length: int, scale: float, causal: bool, window: int, softcap: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Gradients of queries, keys and values, (T, 3, H, D)."""
    heads, tokens, head_dim = q.shape
    packed = q.new_empty(tokens, 3, heads, head_dim)
    found = [packed[:, part].transpose(0, 1) for part in range(3)]
    gradient = gradient if gradient.stride(2) == 1 else gradient.contiguous()
    dropped = dropout > 0 and not causal and not window
    tiles = _tiles(q, typical_length, DROPPED_LONG_BACKWARD if dropped else LONG_BACKWARD)
    grid, constants = launch(q, offsets, max_length, tiles)
    strides = [x.stride(axis) for x in (q, k, v, out, gradient, found[0]) for axis in (1, 0)]
    more = kept_factor(dropout)
    less = 1.0 / more if more else 0.0
    pairs = lse
    if tiles.ready:
        both = lse.new_empty(heads, tokens, 2)
        varlen_attention_delta[(num_tiles(tokens, 64), heads)](
            out, gradient, lse, both, tokens, *strides[6:10], less, PAIRED=True, D=head_dim, BLOCK=64
        )
        pairs = both.view(torch.int64)
    varlen_attention_backward[grid](
        q, k, v, out, gradient, *found, lse, pairs, mask_rows, offsets, tokens, *strides, scale,
        *_factors(scale, softcap), threshold(dropout), more, less, CAUSAL=causal, WINDOW=window, CAP=softcap > 0,
        DROPOUT=dropout > 0, READY=tiles.ready, SPLIT=tiles.split, **constants,
    )  # fmt: skip
    return packed


attend_backward = torch.library.custom_op("brimful::varlen_attention_backward", attended_backward, mutates_args=())


@attend_backward.register_fake
def _(gradient: Tensor, q: Tensor, *_: Any) -> Tensor:
    heads, tokens, head_dim = q.shape
    return q.new_empty(tokens, 3, heads, head_dim)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, offsets, _, *ctx.settings, _ = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    packed = attend_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return *(part.transpose(0, 1) for part in packed.unbind(1)), *[None] * (3 + len(ctx.settings))


attend.register_autograd(_gradients, setup_context=_setup)


def varlen_attention_HTD(
    q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, segments: Segments, pattern: Pattern, seed: Tensor | None = None
) -> Tensor:
    """Attention within segments, (H, T, D); every token must be in one of them.

    seed: as of `attend`.
    """
    q_HTD, k_HTD, v_HTD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_HTD, k_HTD, v_HTD))
    out: Tensor = attend(
        q_HTD, k_HTD, v_HTD, segments.cu_seqlens_N, seed, segments.max_length, segments.typical_length or 0,
        pattern.scale, pattern.causal, pattern.window or 0, pattern.softcap or 0.0, pattern.dropout,
    )[0]  # fmt: skip
    return out
