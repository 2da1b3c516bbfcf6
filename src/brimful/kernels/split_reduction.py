"""Sums over rows in two stages, without atomics: equal inputs give equal bits.

A first kernel leaves partial sums of blocks of rows, here or as a by-product elsewhere; a second one adds them up.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.tiles import num_tiles

#: Columns and rows of one program's tile. Larger ones are faster alone, and slower beside the products of a step.
_COLUMNS, _ROWS = 32, 32
#: Most rows that are summed as they are, in one stage.
_FEW_ROWS = 2048
#: Of the first stage: columns of a tile, its rows, and rows of a partial.
_WIDE, _STEP, ROWS_A_SUM = 64, 32, 128


@triton.jit
def partial_sums(X, PARTIALS, num_rows, width, COLUMNS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP, COLUMNS], tl.float32)  # added up across rows once, at the end
    for first in range(0, ROWS, STEP):
        rows = tl.program_id(0).to(tl.int64) * ROWS + first + tl.arange(0, STEP)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        x = tl.load(X + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        total += x.to(tl.float32)
    tl.store(PARTIALS + tl.program_id(0) * width + columns, tl.sum(total, 0), mask=columns < width)


def make_partial_sums(x: Tensor) -> Tensor:
    """(S, C) fp32 partial sums over the rows of (T, C)."""
    rows, width = x.shape
    partials = x.new_empty(num_tiles(rows, ROWS_A_SUM), width, dtype=torch.float32)
    grid = (partials.shape[0], num_tiles(width, _WIDE))
    partial_sums[grid](x, partials, rows, width, COLUMNS=_WIDE, STEP=_STEP, ROWS=ROWS_A_SUM)
    return partials


@triton.jit
def partial_sums_add(PARTIALS, OUT, LAST, num_partials, width, first_last, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_partials, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < num_partials)[:, None] & (columns < width)[None, :]
        total += tl.load(PARTIALS + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(total, 0)
    tl.store(OUT + columns, total, mask=columns < first_last)
    last = columns - first_last
    tl.store(LAST + last, total.to(LAST.dtype.element_ty), mask=(last >= 0) & (columns < width))


def add_partial_sums(partials: Tensor, num_last: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sums of (S, C) partials: the first C - num_last in fp32, the last in `dtype`."""
    num_partials, width = partials.shape
    first, last = partials.new_empty(width - num_last, dtype=torch.float32), partials.new_empty(num_last, dtype=dtype)
    grid = (num_tiles(width, _COLUMNS),)
    partial_sums_add[grid](partials, first, last, num_partials, width, width - num_last, COLUMNS=_COLUMNS, ROWS=_ROWS)
    return first, last


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(C,) sums over the rows of (T, C), in `dtype`."""
    return add_partial_sums(x if len(x) <= _FEW_ROWS else make_partial_sums(x), x.shape[1], dtype)[1]
