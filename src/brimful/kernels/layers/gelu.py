"""Bias and exact GELU in one kernel forward and one backward, which also sums the bias's gradient.

`bias_gelu` is the reference. Arithmetic within is fp32.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.split_reduction import ROWS_A_SUM
from brimful.kernels.tiles import num_tiles

#: Columns and rows of one program's tile, forward and backward.
_COLUMNS, _STEP = 256, 16
_SUM_COLUMNS, _SUM_STEP = 64, 8


def bias_gelu(x_TF: Tensor, bias_F: Tensor) -> Tensor:
    """The reference: gelu(x + bias), by the error function and not its approximation."""
    return F.gelu(x_TF + bias_F)


@triton.jit
def normal(x, EXACT: tl.constexpr):
    """Distribution and density of the standard normal at x.

    For half precision the error function is a polynomial times the density's own exponential, within 1.5e-7
    (Abramowitz and Stegun 1964, 7.1.26), a third of the instructions: with more, these kernels wait for arithmetic.
    """
    e = tl.exp2(x * x * -0.7213475204444817)
    if EXACT:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(x))
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
        share = tl.where(x < 0.0, tail, 1.0 - tail)
    return share, 0.3989422804014327 * e


@triton.jit
def gelu_forward(X, BIAS, Y, num_rows, width, EXACT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows[:, None] * width + columns[None, :]
    x = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(BIAS + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    share, _ = normal(x, EXACT)
    y = x * share
    tl.store(Y + places, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def gelu_backward(DY, X, BIAS, DX, PARTIALS, num_rows, width, EXACT: tl.constexpr, COLUMNS: tl.constexpr,
                  STEP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """PARTIALS: (row programs, width) partial gradients of the bias."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(BIAS + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([STEP, COLUMNS], tl.float32)  # added up across rows once, at the end
    for first in range(0, ROWS, STEP):
        rows = tl.program_id(0).to(tl.int64) * ROWS + first + tl.arange(0, STEP)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        places = rows[:, None] * width + columns[None, :]
        dx = tl.load(DY + places, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + places, mask=inside, other=0.0).to(tl.float32) + bias
        share, density = normal(x, EXACT)
        dx *= share + x * density
        tl.store(DX + places, dx.to(DX.dtype.element_ty), mask=inside)
        total += dx
    tl.store(PARTIALS + tl.program_id(0) * width + columns, tl.sum(total, 0), mask=columns < width)


def fused_forward(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), (T, F), in the dtype of x."""
    rows, width = x.shape
    y = torch.empty_like(x)
    grid = (num_tiles(rows, _STEP), num_tiles(width, _COLUMNS))
    gelu_forward[grid](x, bias, y, rows, width, EXACT=x.dtype == torch.float32, COLUMNS=_COLUMNS, STEP=_STEP)
    return y


def fused_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x, and partials (S, F) of that of the bias."""
    rows, width = x.shape
    dx, partials = torch.empty_like(x), x.new_empty(num_tiles(rows, ROWS_A_SUM), width, dtype=torch.float32)
    grid = (partials.shape[0], num_tiles(width, _SUM_COLUMNS))
    gelu_backward[grid](
        dy, x, bias, dx, partials, rows, width, EXACT=x.dtype == torch.float32, COLUMNS=_SUM_COLUMNS,
        STEP=_SUM_STEP, ROWS=ROWS_A_SUM,
    )  # fmt: skip
    return dx, partials
