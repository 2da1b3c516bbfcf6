"""Stochastic rounding to bfloat16: up or down by chance, so that on average nothing is lost.

Added to a bf16 weight, an update of less than 1/512 of it is rounded away. Rounded up with a chance of the share of the
step that it is, it arrives in the mean. Numbers are drawn by (seed, place) on the device: a run that is gone on with,
and a CUDA graph, draw the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: A hash of 32 bits by two multiplications (Wang 2007; constants of the search by C. Wellons, 2018, lowbias32).
_SPREAD, _FIRST, _SECOND = -1640531527, 0x7FEB352D, 0x846CA68B - (1 << 32)


def stochastic_bf16(x: Tensor, seed: Tensor) -> Tensor:
    """Round fp32 numbers to bf16. seed: () int32, of no other call. Those that are bf16 already stay, as do infinities.

    >>> stochastic_bf16(torch.tensor([1.0, -2.5]), torch.tensor(7, dtype=torch.int32)).tolist()
    [1.0, -2.5]
    """
    noise = _hash(torch.arange(x.numel(), dtype=torch.int32, device=x.device), seed).view(x.shape)
    noise.bitwise_and_(0xFFFF).add_(x.contiguous().view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(torch.isfinite(x), noise.view(torch.float32), x).bfloat16()


def mix(*numbers: Tensor | int) -> Tensor:
    """One () int32 seed of several numbers, the first of which is on the device."""
    first, *others = numbers
    assert isinstance(first, Tensor)
    found = _hash(first.to(torch.int32, copy=True), None)
    for number in others:
        found = _hash(found.add_(number), None)
    return found


def _hash(x: Tensor, seed: Tensor | None) -> Tensor:
    """In place, (N) int32; products wrap."""
    x.mul_(_SPREAD)
    if seed is not None:
        x.bitwise_xor_(seed)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
