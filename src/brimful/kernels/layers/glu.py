"""Gated activations in one kernel forward and one backward: the activation of one half of a product times the other.

GeGLU by the error function, and SwiGLU. `gated` is the reference. Arithmetic within is fp32.

Source: Shazeer 2020, arXiv 2002.05202.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.dropout import kept_factor, kept_in, kept_mask_PRC, threshold
from brimful.kernels.layers.gelu import normal
from brimful.kernels.rng import row_seeds
from brimful.kernels.tiles import num_tiles

Activation = Literal["gelu", "silu"]

#: Columns and rows of one program's tile: columns that divide the widths of most models, 16 numbers a thread.
_COLUMNS, _STEP = 128, 16


def gated(x_TG: Tensor, activation: Activation, p: float, seed: Tensor, site: int = 0) -> Tensor:
    """The reference: dropout(activation(a) * b), (T, F), of a and b side by side, with the mask the kernel draws."""
    a_TF, b_TF = x_TG.chunk(2, 1)
    y_TF = (F.gelu(a_TF) if activation == "gelu" else F.silu(a_TF)) * b_TF
    return torch.where(kept_mask_PRC(seed, 1, y_TF.shape[0], y_TF.shape[1], p, site)[0], y_TF / (1 - p), 0.0)


@triton.jit
def _activated(a, SILU: tl.constexpr, EXACT: tl.constexpr):
    """The activation of a, and its slope there."""
    if SILU:
        share = 1.0 / (1.0 + tl.exp2(a * -1.4426950408889634))
        slope = share * (1.0 + a * (1.0 - share))
    else:
        share, density = normal(a, EXACT)
        slope = share + a * density
    return a * share, slope


@triton.jit
def _tile(num_rows, width, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Rows and columns of a program, and which of them exist."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(0) * STEP + tl.arange(0, STEP)
    return rows, columns, (rows < num_rows)[:, None] & (columns < width)[None, :]


@triton.jit(do_not_specialize=["site"])
def gated_forward(X, Y, SEED, site, num_rows, width, drop_below, more, SILU: tl.constexpr, EXACT: tl.constexpr,
                  DROPOUT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    rows, columns, inside = _tile(num_rows, width, COLUMNS, STEP)
    places = rows.to(tl.int64)[:, None] * width * 2 + columns[None, :]
    a = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(X + places + width, mask=inside, other=0.0).to(tl.float32)
    y, _ = _activated(a, SILU, EXACT)
    y *= b
    if DROPOUT:
        stays = kept_in(SEED, site, 0, rows[:, None], (rows < num_rows)[:, None], columns[None, :], drop_below)
        y = tl.where(stays, y * more, 0.0)
    tl.store(Y + rows.to(tl.int64)[:, None] * width + columns[None, :], y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site"])
def gated_backward(DY, X, DX, SEED, site, num_rows, width, drop_below, more, SILU: tl.constexpr, EXACT: tl.constexpr,
                   DROPOUT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    rows, columns, inside = _tile(num_rows, width, COLUMNS, STEP)
    places = rows.to(tl.int64)[:, None] * width * 2 + columns[None, :]
    dy = tl.load(DY + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    a = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(X + places + width, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        stays = kept_in(SEED, site, 0, rows[:, None], (rows < num_rows)[:, None], columns[None, :], drop_below)
        dy = tl.where(stays, dy * more, 0.0)
    y, slope = _activated(a, SILU, EXACT)
    tl.store(DX + places, (dy * b * slope).to(DX.dtype.element_ty), mask=inside)
    tl.store(DX + places + width, (dy * y).to(DX.dtype.element_ty), mask=inside)


def fused_forward(x: Tensor, activation: Activation, seed: Tensor, site: int, p: float) -> Tensor:
    """dropout(activation(a) * b), (T, F), of x = (a, b), (T, 2 F), in its dtype."""
    y, seed = x.new_empty(x.shape[0], x.shape[1] // 2), row_seeds(seed, len(x), p)
    gated_forward[_grid(y)](x, y, seed, site, *y.shape, threshold(p), kept_factor(p), **_constants(x, activation, p))
    return y


def fused_backward(dy: Tensor, x: Tensor, activation: Activation, seed: Tensor, site: int, p: float) -> Tensor:
    """The gradient of x, (T, 2 F)."""
    dx, seed = torch.empty_like(x), row_seeds(seed, len(x), p)
    gated_backward[_grid(dy)](
        dy, x, dx, seed, site, *dy.shape, threshold(p), kept_factor(p), **_constants(x, activation, p)
    )
    return dx


def _grid(y: Tensor) -> tuple[int, int]:
    return num_tiles(y.shape[0], _STEP), num_tiles(y.shape[1], _COLUMNS)


def _constants(x: Tensor, activation: Activation, p: float) -> dict[str, Any]:
    exact = x.dtype == torch.float32
    return {"SILU": activation == "silu", "EXACT": exact, "DROPOUT": p > 0, "COLUMNS": _COLUMNS, "STEP": _STEP}
