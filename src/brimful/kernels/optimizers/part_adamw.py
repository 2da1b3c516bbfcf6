"""AdamW of one contiguous fp32 tensor, such as a process's part of a weight: 28 bytes a number and step.

torch's fused kernel also writes the gradient back, 32 bytes. Arithmetic is that of `torch.optim.AdamW`.

Source: Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from math import log

import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.tiles import num_tiles

#: Numbers of one program.
_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["STEPS"])  # of which one lies four bytes behind another
def adamw_part(WEIGHT, GRADIENT, MOMENT1, MOMENT2, STEPS, RATE, SCALE, SKIPPED, size, decay, rest1, rest2, epsilon,
               LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """A block of weights and moments, unless the step is skipped. rest1, rest2: 1 - beta."""
    if tl.load(SKIPPED) != 0.0:
        return
    steps, rate, scale = tl.load(STEPS).to(tl.float64), tl.load(RATE), tl.load(SCALE)
    # In fp64: 1 - beta^n loses half of fp32's digits where n is small.
    bias1 = (1.0 - tl.exp(steps * LOG_BETA1)).to(tl.float32)
    bias2 = tl.sqrt(1.0 - tl.exp(steps * LOG_BETA2)).to(tl.float32)
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = places < size
    g = tl.load(GRADIENT + places, mask=inside, other=0.0) / scale
    p = tl.load(WEIGHT + places, mask=inside, other=0.0)
    m = tl.load(MOMENT1 + places, mask=inside, other=0.0)
    v = tl.load(MOMENT2 + places, mask=inside, other=0.0)
    p -= rate * decay * p
    m += rest1 * (g - m)
    v += rest2 * (tl.minimum(g * g, 3.4e38) - v)  # not inf - inf
    p -= rate / bias1 * (m / (tl.sqrt(v) / bias2 + epsilon))
    tl.store(MOMENT1 + places, m, mask=inside)
    tl.store(MOMENT2 + places, v, mask=inside)
    tl.store(WEIGHT + places, p, mask=inside)


def update_part(
    weight: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], *, steps: Tensor, rate: Tensor, scale: Tensor,
    skipped: Tensor, decay: float, betas: tuple[float, float], epsilon: float,
) -> None:  # fmt: skip
    """Update a weight and its moments in place. All of one shape, contiguous, fp32.

    steps: () how many it has had, with this one. rate, scale, skipped: (), fp32, read on the device: the learning
    rate, what gradients are divided by, and whether nothing is to change, if not 0. betas: above 0.
    """
    rests = (1 - betas[0], 1 - betas[1])
    adamw_part[(num_tiles(weight.numel(), _BLOCK),)](
        weight, gradient, *moments, steps, rate, scale, skipped, weight.numel(), decay, *rests, epsilon,
        LOG_BETA1=log(betas[0]), LOG_BETA2=log(betas[1]), SIZE=_BLOCK,
    )  # fmt: skip
