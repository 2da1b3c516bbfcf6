"""A matrix product that leaves gelu(x w^T + bias): the accumulator is activated before it is written.

For passes without gradients, which need what comes out and nothing else. The product and the kernel of `gelu` one after
the other write the wide rows, read them and write them again.

Each multiprocessor of a GPU has one program, which takes tile after tile: the tensor memory accelerator fetches the
next tile's operands while the last one is activated. What the matrix units wait for then is the activation's
arithmetic: it has one special function, where that of `gelu` has two.

`gelu.bias_gelu` of the product is the reference. Sums and the activation are fp32; what is between the two is not
rounded, unlike in the reference.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from brimful.kernels.tiles import num_tiles

#: Rows, columns and inner numbers of a tile: among the fastest of sixteen ways on an H200 (benchmarks/sustained).
_ROWS, _COLUMNS, _INNER = 128, 256, 64
_WARPS, _STAGES = 8, 3
#: Tiles below one another that are taken in a row, so that caches still have the weights.
_GROUP = 8
#: Bytes that the accelerator's rows and addresses are multiples of.
_ALIGNMENT = 16


@triton.jit
def half_gelu(x):
    """gelu(x) = max(x, 0) - |x| P(X < -|x|), for results in half precision.

    The probability is 2 to a polynomial of |x|, fitted to the smallest relative error of gelu where that is below
    -0.003: within 3e-5 of gelu, and 1e-7, where fp16 rounds by up to 5e-4 of it. Infinity is not a number here.
    """
    a = tl.abs(x)
    power = -1.00003787 + a * (
        -1.15040024 + a * (-0.461278969 + a * (-0.0505068364 + a * (0.00655684507 + a * -0.000401661776)))
    )
    return tl.maximum(x, 0.0) - a * tl.exp2(power)


@triton.jit
def _store(Y, acc, BIAS, row, column, COLUMNS: tl.constexpr):
    bias = tl.load(BIAS + column + tl.arange(0, COLUMNS)).to(tl.float32)
    Y.store([row, column], half_gelu(acc + bias[None, :]).to(Y.dtype))


@triton.jit
def gelu_product(X, W, BIAS, Y, num_rows, width, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
                 GROUP: tl.constexpr):  # fmt: skip
    """X (num_rows, depth), W (width, depth) and Y (num_rows, width) are descriptors, of whole tiles or, Y, of halves.

    width: a multiple of COLUMNS.
    """
    down, across = tl.cdiv(num_rows, ROWS), width // COLUMNS
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * across) * GROUP
        group = tl.minimum(down - first, GROUP)
        row = (first + tile % group) * ROWS
        column = tile % (GROUP * across) // group * COLUMNS
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for inner in range(0, depth, INNER):
            acc = tl.dot(X.load([row, inner]), W.load([column, inner]).T, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _store(Y, left, BIAS, row, column, COLUMNS // 2)
        _store(Y, right, BIAS, row, column + COLUMNS // 2, COLUMNS // 2)


def suits(x_TK: Tensor, w_NK: Tensor) -> bool:
    """True if the kernel takes these operands, on GPUs where it was measured to be faster, from 1,024 rows on.

    With fewer it is up to 8 µs slower, and taken even so, lest the number of texts decide what is rounded in between.
    """
    return x_TK.is_cuda and _is_hopper(x_TK.device) and takes(x_TK, w_NK)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def takes(x_TK: Tensor, w_NK: Tensor) -> bool:
    """True if the kernel could: half precision, columns of whole tiles, rows as the accelerator finds them."""
    return (
        x_TK.dtype.itemsize == 2
        and len(x_TK) > 0
        and len(w_NK) % _COLUMNS == 0
        and all(_is_aligned(each) for each in (x_TK, w_NK))
    )


def _is_aligned(rows: Tensor) -> bool:
    """Rows that lie one behind the other, each beginning where the accelerator can read."""
    pitch = rows.shape[1]
    aligned = rows.data_ptr() % _ALIGNMENT == 0 and pitch * rows.element_size() % _ALIGNMENT == 0
    return aligned and rows.stride() == (pitch, 1)


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x w^T + bias), (T, N), in the dtype of x (T, K) and w (N, K), which `suits` was asked about."""
    (rows, depth), width = x.shape, len(weight)
    y = x.new_empty(rows, width)
    described = [
        TensorDescriptor.from_tensor(each, [tile, columns])
        for each, tile, columns in ((x, _ROWS, _INNER), (weight, _COLUMNS, _INNER), (y, _ROWS, _COLUMNS // 2))
    ]
    tiles = num_tiles(rows, _ROWS) * (width // _COLUMNS)
    gelu_product[(min(tiles, _multiprocessors(x.device)),)](
        described[0], described[1], bias, described[2], rows, width, depth, ROWS=_ROWS, COLUMNS=_COLUMNS,
        INNER=_INNER, GROUP=_GROUP, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return y


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
