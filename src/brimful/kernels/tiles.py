"""Numbers of tiles, and their widths, as the host reckons them before a launch.

Triton's own functions for it look for constants of kernels first: 5 microseconds each, on a CPU, at every launch.
"""

from __future__ import annotations


def num_tiles(count: int, size: int) -> int:
    """Tiles of a size that cover `count` numbers."""
    return -(-count // size)


def power_of_2(least: int) -> int:
    """The first power of two that is not smaller."""
    return 1 << (least - 1).bit_length()
