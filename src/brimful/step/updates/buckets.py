"""Buckets of parameters that are updated together, in the order in which a backward pass completes their gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Elements that a parameter's gradient starts at a multiple of among sums.
_ALIGNMENT = 16


@dataclass(eq=False)
class Bucket:
    """Parameters by number, where each starts among `size` elements, and how many have their gradient by now.

    places: byte that the states of each start at, of num_bytes.
    """

    number: int
    members: list[int]
    starts: list[int]
    size: int
    places: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0
    num_complete: int = 0
    is_done: bool = False


def buckets_of(
    parameters: Sequence[Tensor], most: int, owner: Callable[[int], Hashable] = lambda _: None
) -> list[Bucket]:
    """Parameters from the last to the first, as a backward pass comes to them; in one bucket those of one owner."""
    found: list[Bucket] = []
    for index in reversed(range(len(parameters))):
        size = -(-parameters[index].numel() // _ALIGNMENT) * _ALIGNMENT
        if not found or found[-1].size + size > most or owner(found[-1].members[0]) != owner(index):
            found.append(Bucket(number=len(found), members=[], starts=[], size=0))
        found[-1].members.append(index)
        found[-1].starts.append(found[-1].size)
        found[-1].size += size
    return found


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient; in fp32 of those in half precision, whose own would be rounded to it."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        chosen = [k for k, gradient in enumerate(gradients) if gradient.dtype == dtype]
        wide = torch.float32 if dtype.itemsize == 2 else None
        found |= zip(chosen, torch._foreach_norm([gradients[k] for k in chosen], 2.0, dtype=wide), strict=True)
    return [found[k] for k in range(len(gradients))]
