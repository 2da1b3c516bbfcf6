"""Bias, dropout, residual and LayerNorm in one kernel forward and one backward, as post-norm layers have them.

Forward it reads what a matrix product left and the residual once, and writes the normalised rows: in fp32 for the next
residual, and in half precision for the next product. Backward it computes the rows again from the same two, so nothing
but mean and deviation is kept; gradients of gain, shift and bias are summed in strips of rows, then the strips.

`dropout_add_norm` is the plain twin. Arithmetic within is fp32.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.dropout import column_keys, kept, kept_mask_PRC, row_keys, threshold
from brimful.kernels.strips import sum_strips

#: Rows whose parameter gradients one program sums, at the least and for large inputs.
_FEWEST_ROWS, _MOST_PROGRAMS = 2, 528


def dropout_add_norm(
    x_TH: Tensor, bias_H: Tensor, residual_TH: Tensor, gain_H: Tensor, shift_H: Tensor, eps: float, p: float,
    seed: Tensor, site: int = 0,
) -> Tensor:  # fmt: skip
    """The plain twin: layer_norm(dropout(x + bias) + residual), (T, H), with the mask that the kernel draws."""
    mask_TH = kept_mask_PRC(seed, 1, x_TH.shape[0], x_TH.shape[1], p, site)[0]
    dropped_TH = torch.where(mask_TH, (x_TH + bias_H) / (1 - p), 0.0)
    return F.layer_norm(dropped_TH + residual_TH, (x_TH.shape[1],), gain_H, shift_H, eps)


@triton.jit
def _row(X, BIAS, RESIDUAL, SEED, site, row, columns, inside, width, drop_below, keep, DROPOUT: tl.constexpr):
    """One row before normalisation, (1, WIDTH) fp32, and what dropout keeps of it."""
    places = row * width + columns
    z = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(BIAS + columns, mask=inside, other=0.0).to(tl.float32)
    stays = inside
    if DROPOUT:
        stays = kept(row_keys(SEED, site, 0, tl.zeros([1], tl.int32) + row), column_keys(columns), drop_below)
        z = tl.where(stays, z / keep, 0.0)
    z += tl.load(RESIDUAL + places, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, z, 0.0), stays


@triton.jit(do_not_specialize=["site"])
def norm_forward(X, BIAS, RESIDUAL, GAIN, SHIFT, SEED, Y, HALF, MEAN, RSTD, site, width, eps, drop_below, keep,
                 DROPOUT: tl.constexpr, HALF_TOO: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    z, _ = _row(X, BIAS, RESIDUAL, SEED, site, row, columns, inside, width, drop_below, keep, DROPOUT)
    mean = tl.sum(z, 0) / width
    d = tl.where(inside, z - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 0) / width + eps)
    gain = tl.load(GAIN + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + columns, mask=inside, other=0.0).to(tl.float32)
    y = d * rstd * gain + shift
    tl.store(Y + row * width + columns, y.to(Y.dtype.element_ty), mask=inside)
    if HALF_TOO:
        tl.store(HALF + row * width + columns, y.to(HALF.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@triton.jit(do_not_specialize=["site"])
def norm_backward(DY, DHALF, X, BIAS, RESIDUAL, GAIN, SEED, MEAN, RSTD, DX, DRESIDUAL, STRIPS, site, num_rows,
                  width, drop_below, keep, DROPOUT: tl.constexpr, HAS_DY: tl.constexpr, HAS_DHALF: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """STRIPS: (programs, 3, width) partial gradients of gain, shift and bias."""
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    gain = tl.load(GAIN + columns, mask=inside, other=0.0).to(tl.float32)
    dgain = tl.zeros([WIDTH], tl.float32)
    dshift = tl.zeros([WIDTH], tl.float32)
    dbias = tl.zeros([WIDTH], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = row * width + columns
        z, stays = _row(X, BIAS, RESIDUAL, SEED, site, row, columns, inside, width, drop_below, keep, DROPOUT)
        rstd = tl.load(RSTD + row)
        x = tl.where(inside, (z - tl.load(MEAN + row)) * rstd, 0.0)
        dy = tl.zeros([WIDTH], tl.float32)
        if HAS_DY:
            dy += tl.load(DY + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_DHALF:
            dy += tl.load(DHALF + places, mask=inside, other=0.0).to(tl.float32)
        dgain += dy * x
        dshift += dy
        dy *= gain
        dz = rstd * (dy - tl.sum(dy, 0) / width - x * (tl.sum(dy * x, 0) / width))
        tl.store(DRESIDUAL + places, dz.to(DRESIDUAL.dtype.element_ty), mask=inside)
        dx = dz
        if DROPOUT:
            dx = tl.where(stays, dz / keep, 0.0)
        dbias += dx
        tl.store(DX + places, dx.to(DX.dtype.element_ty), mask=inside)
    strip = STRIPS + tl.program_id(0) * 3 * width + columns
    tl.store(strip, dgain, mask=inside)
    tl.store(strip + width, dshift, mask=inside)
    tl.store(strip + 2 * width, dbias, mask=inside)


def fused_forward(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor, site: int, eps: float,
    p: float, half: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalised rows like `residual`, the same like `x` if `half` (else empty), and (2, T) mean and 1/deviation."""
    rows, width = x.shape
    y, statistics = torch.empty_like(residual), x.new_empty(2, rows, dtype=torch.float32)
    copy = torch.empty_like(x) if half else x.new_empty(0)
    wide = triton.next_power_of_2(width)
    norm_forward[(rows,)](
        x, bias, residual, gain, shift, seed, y, copy, statistics[0], statistics[1], site, width, eps,
        threshold(p), 1.0 - p, DROPOUT=p > 0, HALF_TOO=half, WIDTH=wide, num_warps=_warps(wide),
    )  # fmt: skip
    return y, copy, statistics


def fused_backward(
    dy: Tensor | None, dhalf: Tensor | None, x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor,
    statistics: Tensor, seed: Tensor, site: int, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and residual, and strips (S, 3, H) of those of gain, shift and bias."""
    rows, width = x.shape
    programs = _programs(rows)
    dx, dresidual = torch.empty_like(x), torch.empty_like(residual)
    strips = x.new_empty(programs, 3, width, dtype=torch.float32)
    wide = triton.next_power_of_2(width)
    norm_backward[(programs,)](
        x if dy is None else dy, x if dhalf is None else dhalf, x, bias, residual, gain, seed, statistics[0],
        statistics[1], dx, dresidual, strips, site, rows, width, threshold(p), 1.0 - p, DROPOUT=p > 0,
        HAS_DY=dy is not None, HAS_DHALF=dhalf is not None, WIDTH=wide,
        num_warps=8,
    )  # fmt: skip
    return dx, dresidual, strips


def parameter_gradients(strips: Tensor, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gain and shift, fp32, and of the bias, from what `fused_backward` left."""
    width = strips.shape[2]
    norms, dbias = sum_strips(strips.flatten(1), width, bias_dtype)
    return norms[:width], norms[width:], dbias


def _programs(rows: int) -> int:
    return max(1, min(rows // _FEWEST_ROWS, _MOST_PROGRAMS))


def _warps(wide: int) -> int:
    return 4 if wide <= 1024 else 8
