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

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from brimful.kernels import float8_cast
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    float8_cast = None  # type: ignore[assignment]

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
#: Rows that are all smaller than this are cast as if this were their largest value: its inverse is still finite.
SMALLEST = 2.0**-100
#: Sizes and counts of tokens are multiples of this, or the matrix units do not take them.
ALIGNMENT = 16

Shape = tuple[int, int]


class Scaled(NamedTuple):
    """A matrix in fp8: values (R, C) e4m3, contiguous, times scales (R, 1) fp32."""

    values: Tensor
    scales: Tensor

    def restored(self) -> Tensor:
        """(R, C) fp32."""
        return self.values.float() * self.scales


def rows_of(x_RC: Tensor) -> Scaled:
    """`x` with a scale for each row: the reference of the kernel."""
    x = x_RC.float()
    largest = x.abs().amax(1, keepdim=True).clamp_min(SMALLEST)
    return Scaled((x * (LARGEST / largest)).clamp(-LARGEST, LARGEST).to(DTYPE), largest / LARGEST)


def columns_of(x_RC: Tensor) -> Scaled:
    """`x` transposed, (C, R), with a scale for each column of x: the reference of the kernels."""
    return rows_of(x_RC.t().contiguous())


def cast(x_RC: Tensor, *, transposed: bool = False, out: Scaled | None = None) -> Scaled:
    """Rows of `x` in fp8, or its columns if `transposed`; into `out` if it is given.

    By the kernels on a GPU. Elsewhere by the reference: Triton's interpreter does not round to e4m3 as torch does.
    """
    rows, width = x_RC.shape
    if out is None:
        out = _empty(x_RC, width, rows) if transposed else _empty(x_RC, rows, width)
    if x_RC.is_cuda:
        (float8_cast.columns if transposed else float8_cast.rows)(x_RC.contiguous(), *out, SMALLEST, LARGEST)
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
    """F.linear with the operands of all three products rounded to fp8: the reference of a layer in fp8."""
    out: Tensor = _RoundedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def _plain_product(a_MK: Scaled, b_NK: Scaled, bias_N: Tensor | None) -> Tensor:
    out_MN = a_MK.restored() @ b_NK.restored().t()
    return out_MN if bias_N is None else out_MN + bias_N


def fits(shape: Shape) -> bool:
    """True if the matrix units take products with a weight of this shape."""
    return all(size % ALIGNMENT == 0 for size in shape)


class Products(NamedTuple):
    """The products of a linear layer, of three, that are in fp8."""

    output: bool = False
    input_gradient: bool = False
    weight_gradient: bool = False


class Plan:
    """Products in fp8, by the shape of their weight, (N, K).

    choices: None for all. fewest: with fewer tokens all products stay as they are: choices were made for many more.
    met: weights of which shapes were asked for, and whether what comes out is activated at once.

    fp8 copies of weights are kept from one use to the next: whoever changes weights behind torch's back, as fused
    updates do, calls `renew` after each change. Copies first made within a capture are not kept: their memory is the
    graph's, which writes something else to it before it is done.
    """

    def __init__(self, choices: Mapping[Shape, Products] | None = None, *, fewest: int = 1) -> None:
        self._choices, self._fewest = choices, fewest
        self._copies: dict[tuple[int, Shape], _Copies] = {}
        self.met: dict[Shape, bool] = {}

    def products(self, num_tokens: int, shape: Shape, *, activated: bool = False) -> Products:
        """Of a weight (N, K) with so many tokens."""
        self.met[shape] = activated or self.met.get(shape, False)
        if num_tokens < self._fewest or not fits(shape):
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
