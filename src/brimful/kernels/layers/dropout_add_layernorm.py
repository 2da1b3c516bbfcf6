"""Bias, dropout, residual and LayerNorm in one kernel forward and one backward, as post-norm layers have them.

Forward it reads what a matrix product left and the residual once, and writes the normalised rows: for the next
residual, and for the next product too if that is in another dtype. Backward it computes the rows again from the same
two, so nothing but mean and deviation is kept; gradients of gain, shift and bias are summed in blocks of rows, then the
partials.

`dropout_add_norm` is the reference. Arithmetic within is fp32.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.dropout import kept_factor, kept_in, kept_mask_PRC, threshold
from brimful.kernels.rng import row_seeds
from brimful.kernels.split_reduction import add_partial_sums
from brimful.kernels.tiles import num_tiles, power_of_2

#: Numbers of a forward program's tile, whole rows of them, without dropout and with it; its warps.
_TILE, _DROPPED_TILE, _WARPS = 4096, 2048, 4
#: Rows whose parameter gradients one program sums at the least.
_FEWEST_ROWS = 2
#: Rows from which on the backward kernel reads the next ones ahead.
_MANY_ROWS = 4096


def dropout_add_norm(
    x_TH: Tensor, bias_H: Tensor, residual_TH: Tensor, gain_H: Tensor, shift_H: Tensor, eps: float, p: float,
    seed: Tensor, site: int = 0,
) -> Tensor:  # fmt: skip
    """The reference: layer_norm(dropout(x + bias) + residual), (T, H), with the mask that the kernel draws."""
    mask_TH = kept_mask_PRC(seed, 1, x_TH.shape[0], x_TH.shape[1], p, site)[0]
    dropped_TH = torch.where(mask_TH, (x_TH + bias_H) / (1 - p), 0.0)
    return F.layer_norm(dropped_TH + residual_TH, (x_TH.shape[1],), gain_H, shift_H, eps)


@triton.jit
def _rows(
    X, BIAS, RESIDUAL, SEED, site, rows, num_rows, columns, inside, width, drop_below, more, DROPOUT: tl.constexpr
):  # fmt: skip
    """Rows before normalisation, (ROWS, WIDTH) fp32, and what dropout keeps of them."""
    places = rows[:, None] * width + columns[None, :]
    z = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(BIAS + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    stays = inside
    if DROPOUT:
        stays = kept_in(SEED, site, 0, rows[:, None], (rows < num_rows)[:, None], columns[None, :], drop_below)
        z = tl.where(stays, z * more, 0.0)
    z += tl.load(RESIDUAL + places, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, z, 0.0), stays


@triton.jit(do_not_specialize=["site"])
def norm_forward(X, BIAS, RESIDUAL, GAIN, SHIFT, SEED, Y, HALF, MEAN, RSTD, site, num_rows, width, eps, drop_below,
                 more, DROPOUT: tl.constexpr, HALF_TOO: tl.constexpr, ROWS: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    z, _ = _rows(X, BIAS, RESIDUAL, SEED, site, rows, num_rows, columns, inside, width, drop_below, more, DROPOUT)
    mean = tl.sum(z, 1) / width
    d = tl.where(inside, z - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 1) / width + eps)
    gain = tl.load(GAIN + columns, mask=columns < width, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + columns, mask=columns < width, other=0.0).to(tl.float32)
    y = d * rstd[:, None] * gain[None, :] + shift[None, :]
    places = rows[:, None] * width + columns[None, :]
    tl.store(Y + places, y.to(Y.dtype.element_ty), mask=inside)
    if HALF_TOO:
        tl.store(HALF + places, y.to(HALF.dtype.element_ty), mask=inside)
    tl.store(MEAN + rows, mean, mask=rows < num_rows)
    tl.store(RSTD + rows, rstd, mask=rows < num_rows)


@triton.jit(do_not_specialize=["site"])
def norm_backward(DY, DHALF, X, BIAS, RESIDUAL, GAIN, SEED, MEAN, RSTD, DX, DRESIDUAL, PARTIALS, site, num_rows, width,
                  drop_below, more, DROPOUT: tl.constexpr, HAS_DY: tl.constexpr, HAS_DHALF: tl.constexpr,
                  ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """PARTIALS: (programs, 3, width) partial gradients of gain, shift and bias."""
    columns = tl.arange(0, WIDTH)
    gain = tl.load(GAIN + columns, mask=columns < width, other=0.0).to(tl.float32)
    dgain = tl.zeros([ROWS, WIDTH], tl.float32)
    dshift = tl.zeros([ROWS, WIDTH], tl.float32)
    dbias = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        places = rows[:, None] * width + columns[None, :]
        z, stays = _rows(
            X, BIAS, RESIDUAL, SEED, site, rows, num_rows, columns, inside, width, drop_below, more, DROPOUT
        )
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)[:, None]
        mean = tl.load(MEAN + rows, mask=rows < num_rows, other=0.0)[:, None]
        x = tl.where(inside, (z - mean) * rstd, 0.0)
        dy = tl.zeros([ROWS, WIDTH], tl.float32)
        if HAS_DY:
            dy += tl.load(DY + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_DHALF:
            dy += tl.load(DHALF + places, mask=inside, other=0.0).to(tl.float32)
        dgain += dy * x
        dshift += dy
        dy *= gain[None, :]
        dz = rstd * (dy - (tl.sum(dy, 1) / width)[:, None] - x * (tl.sum(dy * x, 1) / width)[:, None])
        tl.store(DRESIDUAL + places, dz.to(DRESIDUAL.dtype.element_ty), mask=inside)
        if DROPOUT:
            dz = tl.where(stays, dz * more, 0.0)
        dbias += dz
        tl.store(DX + places, dz.to(DX.dtype.element_ty), mask=inside)
    partial = PARTIALS + tl.program_id(0) * 3 * width + columns
    tl.store(partial, tl.sum(dgain, 0), mask=columns < width)
    tl.store(partial + width, tl.sum(dshift, 0), mask=columns < width)
    tl.store(partial + 2 * width, tl.sum(dbias, 0), mask=columns < width)


def fused_forward(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor, site: int, eps: float,
    p: float, half: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Normalised rows in `dtype`, in that of `x` too if `half` (else None); (2, T) mean and 1/deviation."""
    rows, width = x.shape
    y, statistics = x.new_empty(rows, width, dtype=dtype), x.new_empty(2, rows, dtype=torch.float32)
    copy = torch.empty_like(x) if half else None
    seed, wide = row_seeds(seed, rows, p), power_of_2(width)
    together = max(1, (_DROPPED_TILE if p else _TILE) // wide)
    norm_forward[(num_tiles(rows, together),)](
        x, bias, residual, gain, shift, seed, y, y if copy is None else copy, *statistics, site, rows, width, eps,
        threshold(p), kept_factor(p), DROPOUT=p > 0, HALF_TOO=half, ROWS=together, WIDTH=wide, num_warps=_WARPS,
    )  # fmt: skip
    return y, copy, statistics


def fused_backward(
    dy: Tensor | None, dhalf: Tensor | None, x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor,
    statistics: Tensor, seed: Tensor, site: int, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and residual, and partials (S, 3, H) of those of gain, shift and bias."""
    rows, width = x.shape
    how, seed = _Backward.of(residual), row_seeds(seed, rows, p)
    programs = max(1, min(rows // _FEWEST_ROWS, how.programs))
    dx, dresidual = torch.empty_like(x), torch.empty_like(residual)
    partials = x.new_empty(programs, 3, width, dtype=torch.float32)
    norm_backward[(programs,)](
        x if dy is None else dy, x if dhalf is None else dhalf, x, bias, residual, gain, seed, statistics[0],
        statistics[1], dx, dresidual, partials, site, rows, width, threshold(p), kept_factor(p), DROPOUT=p > 0,
        HAS_DY=dy is not None, HAS_DHALF=dhalf is not None, ROWS=how.rows,
        WIDTH=power_of_2(width), STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip
    return dx, dresidual, partials


def parameter_gradients(partials: Tensor, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gain and shift, fp32, and of the bias, from what `fused_backward` left."""
    width = partials.shape[2]
    norms, dbias = add_partial_sums(partials.flatten(1), width, bias_dtype)
    return norms[:width], norms[width:], dbias


@dataclass(frozen=True)
class _Backward:
    """Launch shape of the backward kernel: most programs, warps, rows of a tile, and stages."""

    programs: int
    warps: int
    rows: int
    stages: int

    @classmethod
    def of(cls, residual: Tensor) -> _Backward:
        """The fastest of those tried on an H200 at 1,072 and 13,056 rows of 768, 13,056 and 16,384 of 1,024
        (benchmarks/sustained)."""
        rows, width = residual.shape
        if rows < _MANY_ROWS:
            return cls(528, warps=8, rows=1, stages=1)
        if residual.dtype.itemsize == 2:
            return cls(264, warps=4, rows=2, stages=3) if width <= 1024 else cls(792, warps=4, rows=1, stages=3)
        return cls(528, warps=8, rows=1, stages=3 if width < 1024 else 2)
