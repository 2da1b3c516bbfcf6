"""Sums of several processes' parts beside torch's own."""

from __future__ import annotations

import pytest
import torch

part_sums = pytest.importorskip("brimful.kernels.part_sums")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "size"), [(2, 10_001), (3, 4096), (4, 7)])
def test_sums_are_torchs_to_the_bit(dtype: torch.dtype, count: int, size: int) -> None:
    check_sums("cpu", dtype, count, size)


def check_sums(device: str, dtype: torch.dtype, count: int, size: int) -> None:
    """Also of parts that begin at no multiple of 16 bytes; what is behind a part stays."""
    torch.manual_seed(0)
    parts = [torch.randn(size + 1, device=device).to(dtype)[1:] for _ in range(count)]
    into = torch.full((size + 5,), 7.0, device=device)
    part_sums.add_parts(parts, into[:size])
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(into[:size], expected)
    assert into[size:].eq(7).all()
