"""Dropout, residual and normalisation in one kernel forward and one backward, as pre-norm layers have them.

Forward it reads what a matrix product left and the residual once, and writes their sum, which goes on as the residual,
and the normalised sum in the dtype of the next product, its only reader. Backward the gradients that reach the sum on
both ways meet in registers; the result is written in fp32 for the residual and in half precision for the product.

The norm is RMSNorm, or LayerNorm without a shift (`centred`). `add_norm` is the reference. Arithmetic within is fp32.

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

from brimful.kernels.dropout import kept_factor, kept_in, kept_mask_PRC, threshold
from brimful.kernels.rng import row_seeds
from brimful.kernels.split_reduction import add_partial_sums
from brimful.kernels.tiles import num_tiles, power_of_2

#: Tiles whose gains' gradients one program sums at the least, and most programs: four for each of 132 multiprocessors.
_FEWEST_TILES, _MOST_PROGRAMS = 2, 528


def add_norm(
    x_TH: Tensor, residual_TH: Tensor, gain_H: Tensor, eps: float, p: float, seed: Tensor, site: int = 0, *,
    centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The reference: z = residual + dropout(x), with the mask that the kernel draws, and norm(z); (T, H) each."""
    mask_TH = kept_mask_PRC(seed, 1, x_TH.shape[0], x_TH.shape[1], p, site)[0]
    z_TH = residual_TH + torch.where(mask_TH, x_TH / (1 - p), 0.0)
    d_TH = z_TH - z_TH.mean(1, keepdim=True) if centred else z_TH
    return z_TH, d_TH * torch.rsqrt(d_TH.square().mean(1, keepdim=True) + eps) * gain_H


@triton.jit
def _tile(first, num_rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows, columns, where they lie, and which of them exist."""
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return rows, columns, places, (rows < num_rows)[:, None] & (columns < width)[None, :]


@triton.jit
def _stays(SEED, site, rows, num_rows, columns, drop_below):
    """Mask of elements that dropout keeps."""
    return kept_in(SEED, site, 0, rows[:, None], (rows < num_rows)[:, None], columns[None, :], drop_below)


@triton.jit(do_not_specialize=["site"])
def prenorm_forward(X, RESIDUAL, GAIN, SEED, Z, Y, MEAN, RSTD, site, num_rows, width, eps, drop_below, more,
                    ADD: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, DROPOUT: tl.constexpr,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    rows, columns, places, inside = _tile(tl.program_id(0) * ROWS, num_rows, width, ROWS, WIDTH)
    z = tl.load(RESIDUAL + places, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            x = tl.where(_stays(SEED, site, rows, num_rows, columns, drop_below), x * more, 0.0)
        rounded = (z + x).to(Z.dtype.element_ty)
        tl.store(Z + places, rounded, mask=inside)
        z = rounded.to(tl.float32)  # what the backward pass will read
    if NORM:
        if CENTRED:
            mean = tl.sum(z, 1) / width
            tl.store(MEAN + rows, mean, mask=rows < num_rows)
            z = tl.where(inside, z - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(z * z, 1) / width + eps)
        tl.store(RSTD + rows, rstd, mask=rows < num_rows)
        gain = tl.load(GAIN + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(Y + places, (z * rstd[:, None] * gain[None, :]).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site"])
def prenorm_backward(DY, DZ, Z, GAIN, SEED, MEAN, RSTD, DRESIDUAL, DX, PARTIALS, site, num_rows, width, drop_below,
                     more, CENTRED: tl.constexpr, DROPOUT: tl.constexpr, DX_TOO: tl.constexpr, ROWS: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    """PARTIALS: (programs, width) partial gradients of the gain."""
    columns = tl.arange(0, WIDTH)
    gain = tl.load(GAIN + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    dgain = tl.zeros([ROWS, WIDTH], tl.float32)  # added up across rows once, at the end
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows, columns, places, inside = _tile(first, num_rows, width, ROWS, WIDTH)
        x = tl.load(Z + places, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + places, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(DZ + places, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)[:, None]
        if CENTRED:
            x = tl.where(inside, x - tl.load(MEAN + rows, mask=rows < num_rows, other=0.0)[:, None], 0.0)
        x *= rstd
        dgain += dy * x
        dy *= gain
        if CENTRED:
            dz -= rstd * (tl.sum(dy, 1) / width)[:, None]
        dz += rstd * (dy - x * (tl.sum(dy * x, 1) / width)[:, None])
        tl.store(DRESIDUAL + places, dz.to(DRESIDUAL.dtype.element_ty), mask=inside)
        if DX_TOO:
            if DROPOUT:
                dz = tl.where(_stays(SEED, site, rows, num_rows, columns, drop_below), dz * more, 0.0)
            tl.store(DX + places, dz.to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTIALS + tl.program_id(0) * width + columns, tl.sum(dgain, 0), mask=columns < width)


@triton.jit(do_not_specialize=["site"])
def dropped(DZ, SEED, DX, site, num_rows, width, drop_below, more, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of what dropout was applied to, in the dtype of the product."""
    rows, columns, places, inside = _tile(tl.program_id(0) * ROWS, num_rows, width, ROWS, WIDTH)
    dz = tl.load(DZ + places, mask=inside, other=0.0).to(tl.float32)
    dx = tl.where(_stays(SEED, site, rows, num_rows, columns, drop_below), dz * more, 0.0)
    tl.store(DX + places, dx.to(DX.dtype.element_ty), mask=inside)


def fused_add(x: Tensor, residual: Tensor, seed: Tensor, site: int, p: float) -> Tensor:
    """residual + dropout(x), in the shape of the residual."""
    z = torch.empty_like(residual, dtype=torch.promote_types(residual.dtype, x.dtype))
    rows, width = x.shape
    tile, seed = _tile_of(width), row_seeds(seed, rows, p)
    prenorm_forward[(num_tiles(rows, tile["ROWS"]),)](
        x, residual, x, seed, z, z, z, z, site, rows, width, 0.0, threshold(p), kept_factor(p), ADD=True, NORM=False,
        CENTRED=False, DROPOUT=p > 0, **tile,
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
    tile, seed = _tile_of(width), row_seeds(seed, rows, p)
    prenorm_forward[(num_tiles(rows, tile["ROWS"]),)](
        residual if x is None else x, residual, gain, seed, z, y, statistics[0], statistics[1], site, rows, width, eps,
        threshold(p), kept_factor(p), ADD=x is not None, NORM=True, CENTRED=centred, DROPOUT=p > 0, **tile,
    )  # fmt: skip
    return z, y, statistics


def fused_add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, gain: Tensor, statistics: Tensor, dtype: torch.dtype, seed: Tensor, site: int,
    p: float, *, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the residual, and of x in `dtype`, one tensor where they are equal; partials (S, H) of the gain's.

    All tensors are contiguous; gradients have the shape of z.
    """
    width = z.shape[-1]
    rows = z.numel() // width
    tile, seed = _tile_of(width, 2048), row_seeds(seed, rows, p)
    programs = max(1, min(rows // (tile["ROWS"] * _FEWEST_TILES), _MOST_PROGRAMS))
    dresidual, apart = torch.empty_like(z), p > 0 or dtype != z.dtype
    dx = torch.empty_like(z, dtype=dtype) if apart else dresidual
    partials = z.new_empty(programs, width, dtype=torch.float32)
    prenorm_backward[(programs,)](
        dy, dz, z, gain, seed, statistics[0], statistics[1], dresidual, dx, partials, site, rows, width, threshold(p),
        kept_factor(p), CENTRED=centred, DROPOUT=p > 0, DX_TOO=apart, **tile,
    )  # fmt: skip
    return dresidual, dx, partials


def fused_dropped(dz: Tensor, dtype: torch.dtype, seed: Tensor, site: int, p: float) -> Tensor:
    """The gradient of x in `dtype`, from that of residual + dropout(x), contiguous."""
    width, tile = dz.shape[-1], _tile_of(dz.shape[-1])
    rows = dz.numel() // width
    dx = torch.empty_like(dz, dtype=dtype)
    dropped[(num_tiles(rows, tile["ROWS"]),)](
        dz, row_seeds(seed, rows), dx, site, rows, width, threshold(p), kept_factor(p), **tile
    )  # fmt: skip
    return dx


def gain_gradient(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the gain from what the backward pass left."""
    return add_partial_sums(partials, partials.shape[1], dtype)[1]


def _tile_of(width: int, numbers: int = 1024) -> dict[str, Any]:
    """Whole rows of about so many numbers together: one of 768 or 1024 forward, two backward, more of narrow ones."""
    wide = power_of_2(width)
    return {
        "ROWS": max(1, numbers // wide), "WIDTH": wide, "num_warps": 4 if wide <= 1024 else 8 if wide <= 4096 else 16
    }  # fmt: skip
