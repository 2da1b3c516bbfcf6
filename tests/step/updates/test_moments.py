"""Moments in 8 bits: near, never 0 where they are not, and the same 8 bits when they are written again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brimful.step.updates.moments import BLOCK, middles, moments_in, num_bytes, packed, shares_of, unpacked

CPU = torch.device("cpu")


@given(st.integers(1, 3 * BLOCK + 1), st.integers(0, 10_000), st.floats(-12, 6), st.booleans())
def test_what_is_read_is_near_and_is_written_as_it_was(size: int, seed: int, power: float, signed: bool) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=drawn) * 10.0**power * 10 ** (4 * torch.rand(size, generator=drawn) - 4)
    x = x if signed else x.square()
    codes, scales = torch.zeros(size, dtype=torch.uint8), torch.zeros(-(-size // BLOCK))
    packed(x, codes, scales, signed=signed)
    found = unpacked(codes, scales, signed=signed)
    largest = torch.nn.functional.pad(x, (0, -size % BLOCK)).view(-1, BLOCK).abs().amax(1)
    assert torch.equal(scales, largest)
    # Shares are less than 1/64 of the largest apart, and half of themselves in all but the lowest decade.
    off, most = (found - x).abs(), largest.repeat_interleave(BLOCK)[:size]
    assert bool((off <= most / 128 + 1e-12 * most).all())
    assert bool((off <= 0.5 * x.abs() + 1e-6 * most).all())
    assert signed or bool(((found > 0) == (x > 0)).all())
    again, same = torch.zeros_like(codes), torch.zeros_like(scales)
    packed(found, again, same, signed=signed)
    assert torch.equal(scales, same)
    assert torch.equal(unpacked(again, same, signed=signed), found)


def test_shares_are_in_order_and_reach_one() -> None:
    for signed in (True, False):
        shares, between = shares_of(signed, CPU), middles(signed, CPU)
        assert len(shares) == 256
        assert bool((shares[1:-1] > shares[:-2]).all())
        assert bool((between[1:] > between[:-1]).all())
        assert float(shares[-2]) == 1.0
        assert float(shares[0]) == (-1.0 if signed else 0.0)
    assert torch.equal(shares_of(True, CPU)[:255], -shares_of(True, CPU)[:255].flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parameters_share_memory_and_do_not_touch(dtype: torch.dtype) -> None:
    sizes = (1, 300, 256)
    starts = [sum(num_bytes(dtype, size) for size in sizes[:k]) for k in range(3)]
    memory = torch.zeros(sum(num_bytes(dtype, size) for size in sizes), dtype=torch.uint8)
    given = [(torch.full((size,), -1.0 * (k + 1)), torch.full((size,), k + 1.0)) for k, size in enumerate(sizes)]
    for start, size, (first, second) in zip(starts, sizes, given, strict=True):
        moments_in(memory, start, dtype, size).load(first, second)
    for start, size, (first, second) in zip(starts, sizes, given, strict=True):
        found = moments_in(memory, start, dtype, size).read()
        assert torch.equal(found[0], first)
        assert torch.equal(found[1], second)
