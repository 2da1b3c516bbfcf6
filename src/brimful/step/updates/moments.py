"""Moments of AdamW as bytes: in fp32, in bf16, or in 8 bits a number with a scale for each 256 of them.

In 8 bits a number is the nearest of 255 shares of the largest in its block: seven decades, each cut finer than the one
below it (block-wise dynamic quantisation, Dettmers et al. 2022, arXiv 2110.02861). Of the second moment nothing but 0
becomes 0: the root of it divides the first. Numbers that were read from 8 bits are written as the same 8 bits.

In bf16 numbers are rounded by chance (`rounding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from brimful.step.updates.rounding import stochastic_bf16

#: Numbers of a block with a scale of its own.
BLOCK = 256
#: Bytes that each part starts at a multiple of.
_ALIGNMENT = 256
#: Powers of ten that shares span.
_DECADES = 7


@dataclass(frozen=True, eq=False)
class Moments:
    """Both moments of one parameter where they are kept. scales: (blocks) fp32 of each, where they are in 8 bits."""

    first: Tensor
    second: Tensor
    scales: tuple[Tensor, Tensor] | None

    @property
    def by_chance(self) -> bool:
        """True if they are rounded by chance."""
        return self.scales is None and self.first.dtype != torch.float32

    def read(self) -> tuple[Tensor, Tensor]:
        """Both in fp32: as they are kept, or copies."""
        if self.scales is None:
            return self.first.float(), self.second.float()
        one, two = self.scales
        return unpacked(self.first, one, signed=True), unpacked(self.second, two, signed=False)

    def write(self, first: Tensor, second: Tensor, seeds: tuple[Tensor, Tensor] | None = None) -> None:
        """Keep both, from fp32. seeds: of what is rounded by chance, where that is."""
        if self.scales is not None:
            one, two = self.scales
            packed(first, self.first, one, signed=True)
            packed(second, self.second, two, signed=False)
        elif self.by_chance:
            assert seeds is not None
            self.first.copy_(stochastic_bf16(first, seeds[0]))
            self.second.copy_(stochastic_bf16(second, seeds[1]))

    def load(self, first: Tensor, second: Tensor) -> None:
        """Keep what `read` gave, of any run."""
        first, second = (each.to(self.first.device).flatten() for each in (first, second))
        if self.scales is None:
            self.first.copy_(first)
            self.second.copy_(second)
        else:
            nothing = torch.zeros((), dtype=torch.int32, device=self.first.device)
            self.write(first.float(), second.float(), (nothing, nothing))

    def on_host(self) -> Moments:
        """Copies in host memory."""
        scales = None if self.scales is None else (self.scales[0].cpu(), self.scales[1].cpu())
        return Moments(self.first.cpu(), self.second.cpu(), scales)


def num_bytes(dtype: torch.dtype, numel: int) -> int:
    """Bytes of both moments of a parameter, of which the next one's start. dtype: uint8 for 8 bits."""
    return sum(_sizes(dtype, numel))


def moments_in(memory: Tensor, start: int, dtype: torch.dtype, numel: int) -> Moments:
    """The moments of a parameter that begin at byte `start` of memory."""
    parts = []
    for size in _sizes(dtype, numel):
        parts.append(memory[start : start + size])
        start += size
    first, second = (part.view(dtype)[:numel] for part in parts[:2])
    if dtype != torch.uint8:
        return Moments(first, second, None)
    blocks = _blocks(numel)
    one, two = parts[2].view(torch.float32)[: 2 * blocks].view(2, blocks).unbind()
    return Moments(first, second, (one, two))


def packed(x: Tensor, into: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Write (N) fp32 numbers as 8 bits each and a scale for each block."""
    whole = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    torch.amax(whole.abs(), 1, out=scales)
    shares = whole / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    codes = torch.bucketize(shares, middles(signed, x.device))
    if not signed:
        codes = torch.where(shares > 0, codes.clamp_min(1), codes)
    into.copy_(codes.flatten()[: len(x)])


def unpacked(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """(N) fp32 numbers of their 8 bits."""
    each = scales.repeat_interleave(BLOCK)[: len(codes)]
    return shares_of(signed, codes.device)[codes.int()] * each


@cache
def shares_of(signed: bool, device: torch.device) -> Tensor:
    """(256,) fp32: the share that each code stands for, in order; the last code is not used."""
    positive = list(_positive(1 if signed else 2))
    found = [-x for x in reversed(positive)] if signed else []
    return torch.tensor([*found, 0.0, *positive, 1.0], dtype=torch.float32, device=device)


@cache
def middles(signed: bool, device: torch.device) -> Tensor:
    """(255,) fp32: between two shares each; a number has the code that as many of them are below it."""
    found = between(shares_of(signed, torch.device("cpu")))
    found[-1] = float("inf")
    return found.to(device)


def between(shares: Tensor) -> Tensor:
    """(255,) fp32: the middles between each two of (256,) shares in order."""
    return ((shares[1:].double() + shares[:-1].double()) / 2).float()


def _positive(fineness: int) -> Iterator[float]:
    """Shares above 0: of each decade the middles of equal parts, twice as many as of the one below. The last is 1."""
    for decade in range(_DECADES):
        count = fineness << decade
        for part in range(count):
            if decade == _DECADES - 1 and part == count - 1:
                yield 1.0
            else:
                yield 10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (part + 0.5) / count)


def _sizes(dtype: torch.dtype, numel: int) -> list[int]:
    each = [numel * dtype.itemsize] * 2 + ([8 * _blocks(numel)] if dtype == torch.uint8 else [])
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in each]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)
