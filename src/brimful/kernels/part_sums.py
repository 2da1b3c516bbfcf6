"""Sums of what several processes have of one part, in one pass over memory for each two of them.

torch's own operations take two: one that widens the first of them, one that adds the second.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from brimful.kernels.tiles import num_tiles

#: Numbers of one program.
_BLOCK = 4096


@triton.jit
def part_sum(FIRST, SECOND, SUM, size, SIZE: tl.constexpr):
    """FIRST and SECOND, fp32 or halves, are added up in fp32; SUM may be FIRST."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = places < size
    first = tl.load(FIRST + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(SECOND + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(SUM + places, first + second, mask=inside)


def add_parts(parts: Sequence[Tensor], into: Tensor) -> None:
    """Sum at least two parts in fp32, in their order. parts: (N,) fp32 or halves; into: (N,) fp32."""
    first, *others = parts
    for other in others:
        part_sum[(num_tiles(len(into), _BLOCK),)](first, other, into, len(into), SIZE=_BLOCK)
        first = into
