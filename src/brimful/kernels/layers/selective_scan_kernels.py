"""The kernels of `selective_scan`, one forward and one backward.

A program has some channels of a row and all of its positions. A step from state to state is x -> a x + b, and two of
them after one another are such a step again, so that all positions are computed by a scan in parallel (Blelloch 1990),
one number of the states after the other. A backward pass computes the states anew, and scans their gradient from the
last position on. Sums over channels are written by program and added up in one order: each run gives the same numbers.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.tiles import num_tiles, power_of_2

#: Numbers of one program's tile, channels times positions, and the fewest positions of one.
_TILE, _FEWEST = 2048, 16


@triton.jit
def one_after_the_other(first_a, first_b, then_a, then_b):
    """The step that two steps x -> a x + b are."""
    return first_a * then_a, then_a * first_b + then_b


@triton.jit
def with_what_was_kept(first_a, first_b, first_kept, then_a, then_b, then_kept):
    """The same, and what the last of the steps kept of its x, without what it added: 0 of a single one, from x = 0."""
    return first_a * then_a, then_a * first_b + then_b, then_a * first_b + then_kept


@triton.jit
def selective_scan_forward(
    U, DELTA, A, B, C, Y, width, length, num_states, u_b, u_d, delta_b, delta_d, b_b, b_n, b_l, c_b, c_n, c_l,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    channels, places = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, LENGTH)
    here, of_width = places < length, channels < width
    inside = of_width[:, None] & here[None, :]
    u = tl.load(U + row * u_b + channels[:, None] * u_d + places[None, :], mask=inside, other=0.0).to(tl.float32)
    delta_places = DELTA + row * delta_b + channels[:, None] * delta_d + places[None, :]
    delta = tl.load(delta_places, mask=inside, other=0.0).to(tl.float32)
    added, y = delta * u, tl.zeros([CHANNELS, LENGTH], tl.float32)
    for n in range(num_states):
        power = tl.load(A + channels * num_states + n, mask=of_width, other=0.0)[:, None]
        b = tl.load(B + row * b_b + n * b_n + places * b_l, mask=here, other=0.0).to(tl.float32)[None, :]
        c = tl.load(C + row * c_b + n * c_n + places * c_l, mask=here, other=0.0).to(tl.float32)[None, :]
        _, states = tl.associative_scan((tl.exp(delta * power), added * b), 1, one_after_the_other)
        y += states * c
    tl.store(Y + (row * width + channels[:, None]) * length + places[None, :], y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def selective_scan_backward(
    DY, U, DELTA, A, B, C, DU, DDELTA, DA, DB, DC, width, length, num_states, dy_b, dy_d, u_b, u_d, delta_b, delta_d,
    b_b, b_n, b_l, c_b, c_n, c_l, CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """DA: (B, D, N), to be added up over rows. DB, DC: (programs of a row, B, N, L), to be added up over these."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels, places = program * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, LENGTH)
    here, of_width = places < length, channels < width
    inside = of_width[:, None] & here[None, :]
    dy = tl.load(DY + row * dy_b + channels[:, None] * dy_d + places[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_b + channels[:, None] * u_d + places[None, :], mask=inside, other=0.0).to(tl.float32)
    delta_places = DELTA + row * delta_b + channels[:, None] * delta_d + places[None, :]
    delta = tl.load(delta_places, mask=inside, other=0.0).to(tl.float32)
    follows = of_width[:, None] & (places + 1 < length)[None, :]
    delta_after = tl.load(delta_places + 1, mask=follows, other=0.0).to(tl.float32)
    added = delta * u
    dadded, ddelta = tl.zeros([CHANNELS, LENGTH], tl.float32), tl.zeros([CHANNELS, LENGTH], tl.float32)
    sums = (program * tl.num_programs(1) + row) * num_states
    for n in range(num_states):
        power = tl.load(A + channels * num_states + n, mask=of_width, other=0.0)[:, None]
        b = tl.load(B + row * b_b + n * b_n + places * b_l, mask=here, other=0.0).to(tl.float32)[None, :]
        c = tl.load(C + row * c_b + n * c_n + places * c_l, mask=here, other=0.0).to(tl.float32)[None, :]
        steps = (tl.exp(delta * power), added * b, tl.zeros([CHANNELS, LENGTH], tl.float32))
        _, states, kept = tl.associative_scan(steps, 1, with_what_was_kept)
        _, dstates = tl.associative_scan((tl.exp(delta_after * power), dy * c), 1, one_after_the_other, reverse=True)
        tl.store(DC + (sums + n) * length + places, tl.sum(dy * states, 0), mask=here)
        tl.store(DB + (sums + n) * length + places, tl.sum(dstates * added, 0), mask=here)
        dadded += dstates * b
        dpower = dstates * kept  # states - added * b would be all rounding where little is kept
        ddelta += dpower * power
        tl.store(DA + (row * width + channels) * num_states + n, tl.sum(dpower * delta, 1), mask=of_width)
    out = (row * width + channels[:, None]) * length + places[None, :]
    tl.store(DU + out, (dadded * delta).to(DU.dtype.element_ty), mask=inside)
    tl.store(DDELTA + out, (ddelta + dadded * u).to(DDELTA.dtype.element_ty), mask=inside)


def scan_forward(u_BDL: Tensor, delta_BDL: Tensor, A_DN: Tensor, B_BNL: Tensor, C_BNL: Tensor) -> Tensor:
    """Outputs of the states, (B, D, L), in the dtype of u."""
    u, delta, A = _lines(u_BDL), _lines(delta_BDL), A_DN.float().contiguous()
    y_BDL = u.new_empty(u.shape)
    grid, shape = _launch(u)
    selective_scan_forward[grid](
        u, delta, A, B_BNL, C_BNL, y_BDL, *u.shape[1:], A.shape[1], *u.stride()[:2], *delta.stride()[:2],
        *B_BNL.stride(), *C_BNL.stride(), **shape,
    )  # fmt: skip
    return y_BDL


def scan_backward(
    dy_BDL: Tensor, u_BDL: Tensor, delta_BDL: Tensor, A_DN: Tensor, B_BNL: Tensor, C_BNL: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u and delta, in their dtypes, and of A, B and C, fp32."""
    dy, u, delta, A = _lines(dy_BDL), _lines(u_BDL), _lines(delta_BDL), A_DN.float().contiguous()
    du_BDL, ddelta_BDL = u.new_empty(u.shape), delta.new_empty(u.shape)
    grid, shape = _launch(u)
    dA_BDN = A.new_empty(len(u), *A.shape)
    dB_PBNL, dC_PBNL = (A.new_empty(grid[0], *B_BNL.shape) for _ in range(2))
    selective_scan_backward[grid](
        dy, u, delta, A, B_BNL, C_BNL, du_BDL, ddelta_BDL, dA_BDN, dB_PBNL, dC_PBNL, *u.shape[1:], A.shape[1],
        *dy.stride()[:2], *u.stride()[:2], *delta.stride()[:2], *B_BNL.stride(), *C_BNL.stride(), **shape,
    )  # fmt: skip
    return du_BDL, ddelta_BDL, dA_BDN.sum(0), dB_PBNL.sum(0), dC_PBNL.sum(0)


def _lines(x_BDL: Tensor) -> Tensor:
    """The same with the positions of a channel beside one another."""
    return x_BDL if x_BDL.stride(2) == 1 else x_BDL.contiguous()


def _launch(u_BDL: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and the shape of a tile."""
    num_rows, width, length = u_BDL.shape
    of_line = max(_FEWEST, power_of_2(length))
    channels = max(1, min(power_of_2(width), _TILE // of_line))
    return (num_tiles(width, channels), num_rows), {"CHANNELS": channels, "LENGTH": of_line, "num_warps": 8}
