"""A sum of embeddings, LayerNorm and dropout in one kernel forward and one backward.

Backward, gradients of rows are added to tables atomically, except that of a table of one or two rows (token types),
which every token hits: it is summed block by block as those of gain and shift are. Sums in a table may therefore differ
in their last bits from run to run; where deterministic algorithms are asked for this is not used.

`embeddings_norm` is the reference. Arithmetic within is fp32.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.dropout import kept_factor, kept_in, kept_mask_PRC, threshold
from brimful.kernels.rng import row_seeds
from brimful.kernels.split_reduction import add_partial_sums
from brimful.kernels.tiles import power_of_2

#: Tables that are added at most; rows of a table that is summed block by block.
MOST_TABLES, _FEW_ROWS = 3, 2
#: Rows whose gradients one program sums, at the least and for large inputs.
_FEWEST_ROWS, _MOST_PROGRAMS = 8, 528


def embeddings_norm(
    ids: Sequence[Tensor], tables: Sequence[Tensor], gain_H: Tensor, shift_H: Tensor, eps: float, p: float,
    seed: Tensor, site: int = 0,
) -> Tensor:  # fmt: skip
    """The reference: dropout(layer_norm(sum of tables at ids)), (T, H), with the mask that the kernel draws."""
    total_TH = torch.stack([F.embedding(ids_T, table) for ids_T, table in zip(ids, tables, strict=True)]).sum(0)
    y_TH = F.layer_norm(total_TH, gain_H.shape, gain_H, shift_H, eps)
    return torch.where(kept_mask_PRC(seed, 1, y_TH.shape[0], y_TH.shape[1], p, site)[0], y_TH / (1 - p), 0.0)


@triton.jit
def _look_up(ID, TABLE, size, row, columns, inside, width):
    """One row of a table; NaN for an index that it does not have: the step is skipped then, and its texts are named."""
    index = tl.load(ID + row)
    known = (index >= 0) & (index < size)
    z = tl.load(TABLE + tl.where(known, index, 0) * width + columns, mask=inside, other=0.0)
    return z.to(tl.float32) + tl.where(known, 0.0, float("nan"))


@triton.jit
def _sum(ID0, ID1, ID2, TABLE0, TABLE1, TABLE2, size0, size1, size2, row, columns, inside, width, TABLES: tl.constexpr):
    z = _look_up(ID0, TABLE0, size0, row, columns, inside, width)
    if TABLES > 1:
        z += _look_up(ID1, TABLE1, size1, row, columns, inside, width)
    if TABLES > 2:
        z += _look_up(ID2, TABLE2, size2, row, columns, inside, width)
    return z


@triton.jit
def _stays(SEED, site, row, columns, drop_below):
    """Mask of a row's elements that dropout keeps."""
    return kept_in(SEED, site, 0, row + tl.zeros([1], tl.int32), tl.full([1], True, tl.int1), columns, drop_below)


@triton.jit(do_not_specialize=["site"])
def embedding_norm_forward(
    ID0, ID1, ID2, TABLE0, TABLE1, TABLE2, GAIN, SHIFT, SEED, Y, HALF, MEAN, RSTD, site, size0, size1,
    size2, width, eps, drop_below, more,
    TABLES: tl.constexpr, DROPOUT: tl.constexpr, HALF_TOO: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    z = _sum(ID0, ID1, ID2, TABLE0, TABLE1, TABLE2, size0, size1, size2, row, columns, inside, width, TABLES)
    mean = tl.sum(z, 0) / width
    d = tl.where(inside, z - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 0) / width + eps)
    y = d * rstd * tl.load(GAIN + columns, mask=inside, other=0.0) + tl.load(SHIFT + columns, mask=inside, other=0.0)
    if DROPOUT:
        y = tl.where(_stays(SEED, site, row, columns, drop_below), y * more, 0.0)
    tl.store(Y + row * width + columns, y.to(Y.dtype.element_ty), mask=inside)
    if HALF_TOO:
        tl.store(HALF + row * width + columns, y.to(HALF.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@triton.jit
def _scatter(DTABLE, ID, size, padding, dz, row, columns, inside, width, FEW: tl.constexpr):
    """Adds a row's gradient to a table's, unless the table is summed otherwise or the row is its padding."""
    index = tl.load(ID + row)
    if not FEW and ((index != padding) & (index >= 0) & (index < size)):
        tl.atomic_add(DTABLE + index * width + columns, dz, mask=inside, sem="relaxed")
    return index


@triton.jit(do_not_specialize=["site", "padding0", "padding1", "padding2"])
def embedding_norm_backward(
    DY, DHALF, ID0, ID1, ID2, TABLE0, TABLE1, TABLE2, GAIN, SEED, MEAN, RSTD, DTABLE0, DTABLE1, DTABLE2, PARTIALS, site,
    size0, size1, size2, padding0, padding1, padding2, num_rows, width, drop_below, more, TABLES: tl.constexpr,
    FEW: tl.constexpr, DROPOUT: tl.constexpr, HAS_DY: tl.constexpr, HAS_DHALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """PARTIALS: (programs, 4, width) partial gradients of gain, shift and the two rows of table FEW, -1 if none is."""
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    gain = tl.load(GAIN + columns, mask=inside, other=0.0)
    dgain = tl.zeros([WIDTH], tl.float32)
    dshift = tl.zeros([WIDTH], tl.float32)
    dfirst = tl.zeros([WIDTH], tl.float32)
    dsecond = tl.zeros([WIDTH], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = row * width + columns
        z = _sum(ID0, ID1, ID2, TABLE0, TABLE1, TABLE2, size0, size1, size2, row, columns, inside, width, TABLES)
        rstd = tl.load(RSTD + row)
        x = tl.where(inside, (z - tl.load(MEAN + row)) * rstd, 0.0)
        dy = tl.zeros([WIDTH], tl.float32)
        if HAS_DY:
            dy += tl.load(DY + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_DHALF:
            dy += tl.load(DHALF + places, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            dy = tl.where(_stays(SEED, site, row, columns, drop_below), dy * more, 0.0)
        dgain += dy * x
        dshift += dy
        dy *= gain
        dz = rstd * (dy - tl.sum(dy, 0) / width - x * (tl.sum(dy * x, 0) / width))
        index = _scatter(DTABLE0, ID0, size0, padding0, dz, row, columns, inside, width, FEW == 0)
        if TABLES > 1:
            second = _scatter(DTABLE1, ID1, size1, padding1, dz, row, columns, inside, width, FEW == 1)
            if FEW == 1:
                index = second
        if TABLES > 2:
            third = _scatter(DTABLE2, ID2, size2, padding2, dz, row, columns, inside, width, FEW == 2)
            if FEW == 2:
                index = third
        if FEW >= 0:
            dfirst += tl.where(index == 0, dz, 0.0)
            dsecond += tl.where(index == 1, dz, 0.0)
    partial = PARTIALS + tl.program_id(0) * 4 * width + columns
    tl.store(partial, dgain, mask=inside)
    tl.store(partial + width, dshift, mask=inside)
    tl.store(partial + 2 * width, dfirst, mask=inside)
    tl.store(partial + 3 * width, dsecond, mask=inside)


def fused_forward(
    ids: Sequence[Tensor], tables: Sequence[Tensor], gain: Tensor, shift: Tensor, seed: Tensor, site: int, eps: float,
    p: float, half: torch.dtype | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Rows (T, H) in `dtype`, the same in `half` (None without), and (2, T) mean and 1/deviation."""
    rows, width = len(ids[0]), tables[0].shape[1]
    y, statistics = gain.new_empty(rows, width, dtype=dtype), gain.new_empty(2, rows)
    copy = None if half is None else gain.new_empty(rows, width, dtype=half)
    wide, seed = power_of_2(width), row_seeds(seed, rows, p)
    embedding_norm_forward[(rows,)](
        *_three(ids), *_three(tables), gain, shift, seed, y, y if copy is None else copy, *statistics, site,
        *_sizes(tables), width, eps, threshold(p), kept_factor(p), TABLES=len(tables), DROPOUT=p > 0,
        HALF_TOO=half is not None, WIDTH=wide, num_warps=4 if wide <= 1024 else 8,
    )  # fmt: skip
    return y, copy, statistics


def fused_backward(
    dy: Tensor | None, dhalf: Tensor | None, ids: Sequence[Tensor], tables: Sequence[Tensor],
    paddings: Sequence[int | None], gain: Tensor, statistics: Tensor, seed: Tensor, site: int, p: float,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """Gradients of the tables, of gain and of shift. paddings: of each table the row that has none."""
    rows, width = len(ids[0]), tables[0].shape[1]
    few = next((i for i, t in enumerate(tables) if len(t) <= _FEW_ROWS and paddings[i] is None), -1)
    programs = max(1, min(rows // _FEWEST_ROWS, _MOST_PROGRAMS))
    dtables = [torch.empty_like(t) if i == few else torch.zeros_like(t) for i, t in enumerate(tables)]
    partials = gain.new_empty(programs, 4, width)
    wide, seed = power_of_2(width), row_seeds(seed, rows, p)
    skipped = [-1 if padding is None else padding for padding in (*paddings, None, None)][:MOST_TABLES]
    embedding_norm_backward[(programs,)](
        gain if dy is None else dy, gain if dhalf is None else dhalf, *_three(ids), *_three(tables), gain, seed,
        statistics[0], statistics[1], *_three(dtables), partials, site, *_sizes(tables), *skipped, rows, width,
        threshold(p), kept_factor(p), TABLES=len(tables), FEW=few, DROPOUT=p > 0, HAS_DY=dy is not None,
        HAS_DHALF=dhalf is not None, WIDTH=wide, num_warps=8,
    )  # fmt: skip
    sums_4H = add_partial_sums(partials.flatten(1), 0, torch.float32)[0].view(4, width)
    if few >= 0:
        dtables[few] = sums_4H[2 : 2 + len(tables[few])]
    return dtables, sums_4H[0], sums_4H[1]


def _three(given: Sequence[Tensor]) -> list[Tensor]:
    return [*given, *[given[0]] * (MOST_TABLES - len(given))]


def _sizes(tables: Sequence[Tensor]) -> list[int]:
    return [len(table) for table in _three(tables)]
