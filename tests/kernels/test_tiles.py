"""Numbers and widths of tiles against Triton's own functions."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton

from brimful.kernels.tiles import num_tiles, power_of_2


def test_tiles_are_triton_s() -> None:
    for number in range(1, 300):
        assert power_of_2(number) == triton.next_power_of_2(number)
        for size in (1, 32, 64, 100):
            assert num_tiles(number, size) == triton.cdiv(number, size)
    assert num_tiles(0, 64) == 0
