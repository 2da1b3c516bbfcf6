"""Dropout, residual and normalisation in one kernel forward and one backward, as pre-norm layers have them.

Forward it reads what a matrix product left and the residual once, and writes their sum, which goes on as the residual,
and the normalised sum in the dtype of the next product, its only reader. Backward the gradients that reach the sum on
both ways meet in registers; the result is written in fp32 for the residual and in half precision for the product.

The norm is RMSNorm, or LayerNorm without a shift (`centred`). `add_norm` is the plain twin. Arithmetic within is fp32.

Source: Zhang and Sennrich 2019, arXiv 1910.07467 (RMSNorm).
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.dropout import column_keys, kept, kept_factor, kept_mask_PRC, row_keys, threshold
from brimful.kernels.strips import sum_strips

#: Rows whose gains' gradients one program sums at the least, and most programs.
_FEWEST_ROWS, _MOST_PROGRAMS = 2, 528


def add_norm(
    x_TH: Tensor, residual_TH: Tensor, gain_H: Tensor, eps: float, p: float, seed: Tensor, site: int = 0, *,
    centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The plain twin: z = residual + dropout(x), with the mask that the kernel draws, and norm(z); (T, H) each."""
    mask_TH = kept_mask_PRC(seed, 1, x_TH.shape[0], x_TH.shape[1], p, site)[0]
    z_TH = residual_TH + torch.where(mask_TH, x_TH / (1 - p), 0.0)
    d_TH = z_TH - z_TH.mean(1, keepdim=True) if centred else z_TH
    return z_TH, d_TH * torch.rsqrt(d_TH.square().mean(1, keepdim=True) + eps) * gain_H


@triton.jit
def _row(first, row, columns, inside, width):
    """One row, (WIDTH,) fp32, 0 beyond its end."""
    return tl.load(first + row.to(tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _stays(SEED, site, row, columns, drop_below):
    """What dropout keeps of a row."""
    return kept(row_keys(SEED, site, 0, tl.zeros([1], tl.int32) + row), column_keys(columns), drop_below)


@triton.jit(do_not_specialize=["site"])
def prenorm_forward(X, RESIDUAL, GAIN, SEED, Z, Y, MEAN, RSTD, site, width, eps, drop_below, more, ADD: tl.constexpr,
                    NORM: tl.constexpr, CENTRED: tl.constexpr, DROPOUT: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    places = row.to(tl.int64) * width + columns
    z = _row(RESIDUAL, row, columns, inside, width)
    if ADD:
        x = _row(X, row, columns, inside, width)
        if DROPOUT:
            x = tl.where(_stays(SEED, site, row, columns, drop_below), x * more, 0.0)
        rounded = (z + x).to(Z.dtype.element_ty)
        tl.store(Z + places, rounded, mask=inside)
        z = rounded.to(tl.float32)  # what the backward pass will read
    if NORM:
        if CENTRED:
            mean = tl.sum(z, 0) / width
            tl.store(MEAN + row, mean)
            z = tl.where(inside, z - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(z * z, 0) / width + eps)
        tl.store(RSTD + row, rstd)
        y = z * rstd * tl.load(GAIN + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + places, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site"])
def prenorm_backward(DY, DZ, Z, GAIN, SEED, MEAN, RSTD, DRESIDUAL, DX, STRIPS, site, num_rows, width, drop_below, more,
                     CENTRED: tl.constexpr, DROPOUT: tl.constexpr, DX_TOO: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    """STRIPS: (programs, width) partial gradients of the gain."""
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    gain = tl.load(GAIN + columns, mask=inside, other=0.0).to(tl.float32)
    dgain = tl.zeros([WIDTH], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * width + columns
        x = tl.load(Z + places, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + places, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(DZ + places, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        if CENTRED:
            x = tl.where(inside, x - tl.load(MEAN + row), 0.0)
        x *= rstd
        dgain += dy * x
        dy *= gain
        if CENTRED:
            dz -= rstd * (tl.sum(dy, 0) / width)
        dz += rstd * (dy - x * (tl.sum(dy * x, 0) / width))
        tl.store(DRESIDUAL + places, dz.to(DRESIDUAL.dtype.element_ty), mask=inside)
        if DX_TOO:
            if DROPOUT:
                dz = tl.where(_stays(SEED, site, row, columns, drop_below), dz * more, 0.0)
            tl.store(DX + places, dz.to(DX.dtype.element_ty), mask=inside)
    tl.store(STRIPS + tl.program_id(0) * width + columns, dgain, mask=inside)


@triton.jit(do_not_specialize=["site"])
def dropped(DZ, SEED, DX, site, width, drop_below, more, WIDTH: tl.constexpr):
    """The gradient of what dropout was applied to, in the dtype of the product."""
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    dz = _row(DZ, row, columns, inside, width)
    dx = tl.where(_stays(SEED, site, row, columns, drop_below), dz * more, 0.0)
    tl.store(DX + row.to(tl.int64) * width + columns, dx.to(DX.dtype.element_ty), mask=inside)


def fused_add(x: Tensor, residual: Tensor, seed: Tensor, site: int, p: float) -> Tensor:
    """residual + dropout(x), in the shape of the residual."""
    z = torch.empty_like(residual, dtype=torch.promote_types(residual.dtype, x.dtype))
    rows, width = x.shape
    prenorm_forward[(rows,)](
        x, residual, x, seed, z, z, z, z, site, width, 0.0, threshold(p), kept_factor(p), ADD=True, NORM=False,
        CENTRED=False, DROPOUT=p > 0, **_row_of(width),
    )  # fmt: skip
    return z


def fused_add_norm(
    x: Tensor | None, residual: Tensor, gain: Tensor, dtype: torch.dtype, seed: Tensor, site: int, eps: float, p: float,
    *, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """z = residual + dropout(x), which is the residual itself without x; norm(z) in `dtype`; (2, T) mean, 1/deviation.

    x: (T, H). residual: contiguous, of T rows; z and the normalised rows have its shape.
    """
    width = residual.shape[-1]
    rows = residual.numel() // width
    z = residual if x is None else torch.empty_like(residual, dtype=torch.promote_types(residual.dtype, x.dtype))
    y, statistics = torch.empty_like(residual, dtype=dtype), residual.new_empty(2, rows, dtype=torch.float32)
    prenorm_forward[(rows,)](
        residual if x is None else x, residual, gain, seed, z, y, statistics[0], statistics[1], site, width, eps,
        threshold(p), kept_factor(p), ADD=x is not None, NORM=True, CENTRED=centred, DROPOUT=p > 0, **_row_of(width),
    )  # fmt: skip
    return z, y, statistics


def fused_add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, gain: Tensor, statistics: Tensor, dtype: torch.dtype, seed: Tensor, site: int,
    p: float, *, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the residual, and of x in `dtype`, one tensor where they are the same; strips (S, H) of the gain's.

    All tensors are contiguous; gradients have the shape of z.
    """
    width = z.shape[-1]
    rows = z.numel() // width
    programs = max(1, min(rows // _FEWEST_ROWS, _MOST_PROGRAMS))
    dresidual, apart = torch.empty_like(z), p > 0 or dtype != z.dtype
    dx = torch.empty_like(z, dtype=dtype) if apart else dresidual
    strips = z.new_empty(programs, width, dtype=torch.float32)
    prenorm_backward[(programs,)](
        dy, dz, z, gain, seed, statistics[0], statistics[1], dresidual, dx, strips, site, rows, width, threshold(p),
        kept_factor(p), CENTRED=centred, DROPOUT=p > 0, DX_TOO=apart, **_row_of(width),
    )  # fmt: skip
    return dresidual, dx, strips


def fused_dropped(dz: Tensor, dtype: torch.dtype, seed: Tensor, site: int, p: float) -> Tensor:
    """The gradient of x in `dtype`, from that of residual + dropout(x), contiguous."""
    width = dz.shape[-1]
    dx = torch.empty_like(dz, dtype=dtype)
    dropped[(dz.numel() // width,)](
        dz, seed, dx, site, width, threshold(p), kept_factor(p), **_row_of(width)
    )  # fmt: skip
    return dx


def gain_gradient(strips: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the gain from what the backward pass left."""
    return sum_strips(strips, strips.shape[1], dtype)[1]


def _row_of(width: int) -> dict[str, Any]:
    """A program holds a whole row: 8 numbers a thread of 768 or 1024, the widths of most encoders."""
    wide = triton.next_power_of_2(width)
    return {"WIDTH": wide, "num_warps": 4 if wide <= 1024 else 8 if wide <= 4096 else 16}
