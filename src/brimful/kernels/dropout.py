"""Dropout masks by hashing (seed, site, row, column): drawn again in the backward pass, never stored.

A site is one use of dropout in a forward pass, of which there are some per layer; all share one seed. A row is known by
its token's place in the effective batch, so that masks are the same however the batch is split and packed.

Source: the integer hash is lowbias32, found by C. Wellons' hash prospector, https://github.com/skeeto/hash-prospector.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.rng import row_seeds


@triton.jit
def hashed(x):
    """lowbias32: every bit of the result depends on every bit of x, (uint32)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(SEED, site, plane, rows, present):
    """A random number for each row of a mask, (uint32). plane: which of several masks of one site, its head.

    SEED: the seed and, behind it, the place of each row. present: mask of the rows that there are.
    """
    seed = tl.load(SEED)
    places = tl.load(SEED + 1 + rows, mask=present, other=0)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return hashed(places.to(tl.uint32) + hashed(hashed((site * 65536 + plane).to(tl.uint32) ^ high) + low))


@triton.jit
def column_keys(columns):
    """A number for each column, far from its neighbours', (uint32)."""
    return columns.to(tl.uint32) * 0x9E3779B9


@triton.jit
def kept(places, rows, threshold):
    """Mask of kept elements, bool; an element's key is the sum of its row's and its column's.

    A polynomial of degree 4 modulo 2^32: its two multiply-adds run beside the other arithmetic of attention, where the
    shifts of a hash would have to queue. Rows, columns, squares and progressions in such masks are as independent as
    those of a true generator (tests/kernels/test_dropout.py). rows: the rows' keys once more; adding the place
    itself, compilers would make x (x + 1) of it, an instruction more.
    """
    x = places * places + rows
    x = x * x + rows
    return x.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def kept_at(rows, columns, threshold):
    """`kept` where rows of these keys meet columns; both in shapes that broadcast."""
    return kept(rows + column_keys(columns), rows, threshold)


@triton.jit
def kept_in(SEED, site, plane, rows, present, columns, threshold):
    """`kept` where rows and columns of a mask meet; both in shapes that broadcast. SEED, present: as of `row_keys`."""
    return kept_at(row_keys(SEED, site, plane, rows, present), columns, threshold)


def threshold(dropout: float) -> int:
    """Drop threshold: an element is dropped if 32 random bits, as a signed number, fall below it."""
    return min(round(dropout * (1 << 32)) - (1 << 31), (1 << 31) - 1)


def kept_factor(dropout: float) -> float:
    """Factor of kept elements."""
    return 0.0 if dropout >= 1 else 1.0 / (1.0 - dropout)


def kept_mask_PRC(
    seed: Tensor, num_planes: int, num_rows: int, num_columns: int, dropout: float, site: int = 0
) -> Tensor:
    """The masks as the kernels draw them, in torch, for references: (planes, rows, columns), True where kept.

    seed: as of `row_seeds`.
    """
    mask = 0xFFFFFFFF

    def plain(x: Tensor) -> Tensor:
        x = x ^ (x >> 16)
        x = (x * 0x7FEB352D) & mask
        x = x ^ (x >> 15)
        x = (x * 0x846CA68B) & mask
        return x ^ (x >> 16)

    device = seed.device
    seed, places_R = row_seeds(seed, num_rows).split([1, num_rows])
    low, high = seed & mask, (seed >> 32) & mask
    planes_P = torch.arange(num_planes, device=device) + site * 65536
    keys_PR = plain((places_R[None] + plain((plain(planes_P ^ high) + low) & mask)[:, None]) & mask)
    bits_PRC = (keys_PR[:, :, None] + torch.arange(num_columns, device=device) * 0x9E3779B9) & mask
    for _ in range(2):
        bits_PRC = (bits_PRC * bits_PRC + keys_PR[:, :, None]) & mask
    return torch.where(bits_PRC >= 1 << 31, bits_PRC - (1 << 32), bits_PRC) >= threshold(dropout)
