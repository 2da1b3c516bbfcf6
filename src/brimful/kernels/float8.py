"""Matrix products of numbers in 8 bits: e4m3, four bits of exponent and three of mantissa, each row with its own scale.

A linear layer has three products, and each sums over another axis. An operand is cast along the axis that its product
sums over, so that its scales can be taken out of the sum:

    output             x (T, K)    w (N, K)      rows of x, rows of w
    input's gradient   g (T, N)    w^T (K, N)    rows of g, columns of w
    weight's gradient  g^T (N, T)  x^T (K, T)    columns of g, columns of x

The scale of a row is its largest absolute value over 448, the largest e4m3 number, found anew every time: nothing is
carried from step to step, and nothing is too large. Gradients are e4m3 too: with a scale for each row they need no
wider exponent (Micikevicius et al. 2022, arXiv 2209.05433; the rowwise recipe of torchao.float8). Casting rows reads
them once. Casting columns reads them twice, and leaves them transposed, as the matrix units of Hopper want operands.

What is infinite or not a number makes its row of the product not a number; a row of zeros stays one.

`Plan` says which products of which weights are taken in fp8, and keeps the fp8 copies of weights between updates.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
#: Rows that are all smaller than this are cast as if this were their largest value: its inverse is still finite.
_SMALLEST = 2.0**-100
#: Sizes and counts of tokens are multiples of this, or the matrix units do not take them.
ALIGNMENT = 16
#: Tokens and columns of one program's tile, for columns.
_STEP, _COLUMNS = 64, 64

Shape = tuple[int, int]


class Scaled(NamedTuple):
    """A matrix in fp8: values (R, C) e4m3, contiguous, times scales (R, 1) fp32."""

    values: Tensor
    scales: Tensor

    def restored(self) -> Tensor:
        """(R, C) fp32."""
        return self.values.float() * self.scales


def rows_of(x_RC: Tensor) -> Scaled:
    """`x` with a scale for each row: the plain twin of the kernel."""
    x = x_RC.float()
    largest = x.abs().amax(1, keepdim=True).clamp_min(_SMALLEST)
    return Scaled((x * (LARGEST / largest)).clamp(-LARGEST, LARGEST).to(DTYPE), largest / LARGEST)


def columns_of(x_RC: Tensor) -> Scaled:
    """`x` transposed, (C, R), with a scale for each column of x: the plain twin of the kernels."""
    return rows_of(x_RC.t().contiguous())


@triton.jit
def _scales(bits, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """What values are multiplied with, and the scale that undoes it, from the bits of the largest."""
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


def rows_by_kernel(x_RC: Tensor, out: Scaled) -> None:
    """`rows_of`, contiguous, into `out`."""
    rows, width = x_RC.shape
    block = triton.next_power_of_2(width)
    warps = max(1, min(8, block // 512))
    rows_cast[(rows,)](x_RC, *out, width, SMALLEST=_SMALLEST, LARGEST=LARGEST, WIDTH=block, num_warps=warps)


def columns_by_kernel(x_RC: Tensor, out: Scaled) -> None:
    """`columns_of`, contiguous, into `out`."""
    rows, width = x_RC.shape
    bits = x_RC.new_zeros(width, dtype=torch.int32)
    grid = (triton.cdiv(rows, _STEP), triton.cdiv(width, _COLUMNS))
    columns_measure[grid](x_RC, bits, rows, width, STEP=_STEP, COLUMNS=_COLUMNS)
    columns_cast[grid](x_RC, bits, *out, rows, width, SMALLEST=_SMALLEST, LARGEST=LARGEST, STEP=_STEP, COLUMNS=_COLUMNS)


def cast(x_RC: Tensor, *, transposed: bool = False, out: Scaled | None = None) -> Scaled:
    """Rows of `x` in fp8, or its columns if `transposed`; into `out` if it is given.

    By the kernels on a GPU. Triton's interpreter does not round to e4m3 as GPUs and torch do, so elsewhere by the twin.
    """
    rows, width = x_RC.shape
    if out is None:
        out = _empty(x_RC, width, rows) if transposed else _empty(x_RC, rows, width)
    if x_RC.is_cuda:
        (columns_by_kernel if transposed else rows_by_kernel)(x_RC.contiguous(), out)
    else:
        found = (columns_of if transposed else rows_of)(x_RC)
        out.values.copy_(found.values)
        out.scales.copy_(found.scales)
    return out


def _empty(x: Tensor, rows: int, width: int) -> Scaled:
    return Scaled(x.new_empty(rows, width, dtype=DTYPE), x.new_empty(rows, 1, dtype=torch.float32))


def product(
    a_MK: Scaled, b_NK: Scaled, dtype: torch.dtype, bias_N: Tensor | None = None, *, quick: bool = False
) -> Tensor:
    """a b^T + bias, (M, N), in `dtype`; on a GPU that is bf16. K and N are multiples of 16.

    quick: sums in the matrix units alone, whose accumulators keep fewer bits than fp32. Activations take that,
    gradients do not (the default of NVIDIA's Transformer Engine).
    """
    if a_MK.values.is_cuda:
        return torch._scaled_mm(
            a_MK.values, b_NK.values.t(), scale_a=a_MK.scales, scale_b=b_NK.scales.t(), bias=bias_N, out_dtype=dtype,
            use_fast_accum=quick,
        )  # fmt: skip
    return _plain_product(a_MK, b_NK, bias_N).to(dtype)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        out_TN = _plain_product(rows_of(x.flatten(0, -2)), rows_of(weight), bias)
        return out_TN.view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        g_TN = gradient.flatten(0, -2)
        dx = _plain_product(rows_of(g_TN), columns_of(weight), None).view(x.shape)
        dweight = _plain_product(columns_of(g_TN), columns_of(x.flatten(0, -2)), None)
        dbias = None if ctx.bias_dtype is None else g_TN.float().sum(0).to(ctx.bias_dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear with the operands of all three products rounded to fp8: the plain twin of a layer in fp8."""
    out: Tensor = _RoundedLinear.apply(x, weight, bias)
    return out


def _plain_product(a_MK: Scaled, b_NK: Scaled, bias_N: Tensor | None) -> Tensor:
    out_MN = a_MK.restored() @ b_NK.restored().t()
    return out_MN if bias_N is None else out_MN + bias_N


def fits(shape: Shape) -> bool:
    """Whether the matrix units take products with a weight of this shape."""
    return all(size % ALIGNMENT == 0 for size in shape)


class Products(NamedTuple):
    """Which of a linear layer's three products are in fp8."""

    output: bool = False
    input_gradient: bool = False
    weight_gradient: bool = False


class Plan:
    """Which products are taken in fp8 by the shape of their weight, (N, K).

    choices: None for all. met: weights of which shapes were asked for while it was active.

    fp8 copies of weights are kept from one use to the next: whoever changes weights behind torch's back, as fused
    updates do, calls `renew` after each change. Copies first made within a capture are not kept: their memory is the
    graph's, which writes something else to it before it is done.
    """

    def __init__(self, choices: Mapping[Shape, Products] | None = None) -> None:
        self._choices = choices
        self._copies: dict[tuple[int, Shape], _Copies] = {}
        self.met: dict[Shape, None] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, layers on fused kernels take their products by this plan."""
        global _active
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before

    def products(self, num_tokens: int, shape: Shape) -> Products:
        """Of a weight (N, K) with so many tokens."""
        self.met[shape] = None
        if num_tokens == 0 or not fits(shape):
            return Products()
        found = Products(True, True, True) if self._choices is None else self._choices.get(shape, Products())
        return found if num_tokens % ALIGNMENT == 0 else found._replace(weight_gradient=False)

    def weight(self, w_NK: Tensor, *, transposed: bool, keep: bool) -> Scaled:
        """Rows of a weight in fp8, or its columns. keep: it is where the model keeps it, and no copy for one use."""
        if not keep or w_NK.is_inference():
            return cast(w_NK, transposed=transposed)
        key = (w_NK.data_ptr(), (w_NK.shape[0], w_NK.shape[1]))
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = _Copies(w_NK.detach())
        return found.read(transposed)

    def renew(self) -> None:
        """After weights were changed."""
        for each in self._copies.values():
            each.renew()

    def forget(self) -> None:
        """Frees all copies."""
        self._copies.clear()


class _Copies:
    """fp8 copies of one weight, whose memory they keep from being anyone else's."""

    def __init__(self, w_NK: Tensor) -> None:
        self._weight, self._version = w_NK, w_NK._version
        self._made: dict[bool, Scaled] = {}

    def read(self, transposed: bool) -> Scaled:
        if self._weight._version != self._version:
            self.renew()
        if transposed in self._made:
            return self._made[transposed]
        made = cast(self._weight, transposed=transposed)
        if not (made.values.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._made[transposed] = made
        return made

    def renew(self) -> None:
        self._version = self._weight._version
        for transposed, copy in self._made.items():
            cast(self._weight, transposed=transposed, out=copy)


_active: Plan | None = None


def active_plan() -> Plan | None:
    """The plan that products are taken by here, None where none of them is in fp8."""
    return _active
