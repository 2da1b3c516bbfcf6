"""Casting matrices to fp8 with a scale for each row or column: `float8.rows_of` and `columns_of` as kernels."""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.tiles import num_tiles, power_of_2

#: Tokens and columns of one program's tile, for columns.
_STEP, _COLUMNS = 64, 64


@triton.jit
def _scales(bits, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """Scale of the values and its inverse, from the bits of the largest absolute value."""
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)  # of what is not a number, itself
    return LARGEST / largest, largest / LARGEST


@triton.jit
def _bits(x):
    """Absolute values as integers, which order as these do, with what is not a number above all."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _fit(x, LARGEST: tl.constexpr):
    """Within what e4m3 holds; what is not a number stays so."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def rows_cast(X, VALUES, SCALES, width, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WIDTH: tl.constexpr):
    """One row a program, read once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    x = tl.load(X + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    factor, scale = _scales(tl.max(_bits(x), 0), SMALLEST, LARGEST)
    values = _fit(x * factor, LARGEST).to(VALUES.dtype.element_ty)
    tl.store(VALUES + row * width + columns, values, mask=columns < width)
    tl.store(SCALES + row, scale)


@triton.jit
def columns_measure(X, BITS, num_rows, width, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """BITS: (width,) of the largest absolute values. A maximum is the same in whatever order it is taken."""
    rows = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(X + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.atomic_max(BITS + columns, tl.max(_bits(x), 0), mask=columns < width, sem="relaxed")


@triton.jit
def columns_cast(X, BITS, VALUES, SCALES, num_rows, width, SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
                 STEP: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """VALUES: (width, num_rows)."""
    rows = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    bits = tl.load(BITS + columns, mask=columns < width, other=0)
    factor, scale = _scales(bits, SMALLEST, LARGEST)
    x = tl.load(X + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    values = _fit(x * factor[None, :], LARGEST).to(VALUES.dtype.element_ty)
    places = columns[:, None] * num_rows + rows[None, :]
    tl.store(VALUES + places, tl.trans(values), mask=(columns < width)[:, None] & (rows < num_rows)[None, :])
    if tl.program_id(0) == 0:
        tl.store(SCALES + columns, scale, mask=columns < width)


def rows(x_RC: Tensor, values_RC: Tensor, scales_R1: Tensor, smallest: float, largest: float) -> None:
    """`float8.rows_of` of a contiguous matrix, into values and scales."""
    num_rows, width = x_RC.shape
    block = power_of_2(width)
    warps = max(1, min(8, block // 512))
    rows_cast[(num_rows,)](
        x_RC, values_RC, scales_R1, width, SMALLEST=smallest, LARGEST=largest, WIDTH=block, num_warps=warps
    )


def columns(x_RC: Tensor, values_CR: Tensor, scales_C1: Tensor, smallest: float, largest: float) -> None:
    """`float8.columns_of` of a contiguous matrix, into values and scales."""
    num_rows, width = x_RC.shape
    bits = x_RC.new_zeros(width, dtype=torch.int32)
    grid = (num_tiles(num_rows, _STEP), num_tiles(width, _COLUMNS))
    columns_measure[grid](x_RC, bits, num_rows, width, STEP=_STEP, COLUMNS=_COLUMNS)
    columns_cast[grid](
        x_RC, bits, values_CR, scales_C1, num_rows, width, SMALLEST=smallest, LARGEST=largest, STEP=_STEP,
        COLUMNS=_COLUMNS,
    )  # fmt: skip
