"""Processes of a loop that is not ours, each with rows of its own: what all of them agree on, and sums of gradients.

The loop has joined them already, as Accelerate does for transformers' Trainer. What hosts say to one another goes by a
group of its own between their memories, so that it waits for no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

#: Bytes of gradients that are summed at once.
_TOGETHER_BYTES = 64 << 20


class ProcessGroup:
    """All processes of torch.distributed. Made by all of them at once.

    num_rows: of the update of now in all processes, after `agree`.
    """

    def __init__(self) -> None:
        self._hosts = dist.new_group(backend="gloo")
        self.num_rows = 0

    def agree(self, *, num_rows: int, refuses: bool) -> bool:
        """Return True if some process refuses the update of now. num_rows: of this process."""
        found = torch.tensor([num_rows, int(refuses)])
        dist.all_reduce(found, group=self._hosts)
        self.num_rows = int(found[0])
        return bool(found[1])

    def sum(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Replace gradients and loss by their sums over all processes; one without rows for a parameter adds zero."""
        has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._hosts)
        for parameter, one_has in zip(parameters, has.tolist(), strict=True):
            if one_has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(loss)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for some in _parts(gradients):
            flat = torch.cat([gradient.flatten() for gradient in some])
            dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in some])
            for gradient, piece in zip(some, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def close(self) -> None:
        """End what the processes say to one another."""
        dist.destroy_process_group(self._hosts)


def _parts(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype after another, as many at once as fit."""
    some: list[Tensor] = []
    for gradient in gradients:
        if some and (some[0].dtype != gradient.dtype or sum(g.nbytes for g in (*some, gradient)) > _TOGETHER_BYTES):
            yield some
            some = []
        some.append(gradient)
    if some:
        yield some
