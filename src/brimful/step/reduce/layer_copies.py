"""Copies between the memory of processes, instead of what NCCL sends of weights in parts (FSDP2).

    weights      each process puts its part of a group of layers into memory that all reach, and fetches the others'
    gradients    each puts what the others sum into their memory, and sums its own part in fp32

Copy engines make them, and leave multiprocessors to the model. Gradients in half precision are sent as they are: half
the bytes of fp32, and their sums are those of fp32.

Both are what `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` of torch 2.11 to 2.13 ask for. torch
calls them in the order of the pass, each on a stream of its own, and waits for what was sent before it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brimful.data.batches.packing import round_up
from brimful.hardware.peers import PeerMemory, Peers, others_of
from brimful.hardware.ranks import Ranks
from brimful.models.fsdp_hooks import Sent, await_copied_out, sent_of

#: Most bytes of a group of weights that are copied. NCCL sends a larger one, a table of words: the memory that it would
#: be copied to stays for as long as the training does.
MOST_BYTES = 1 << 29
#: Memories that groups of weights arrive in, one after the other: one is read from while the next one arrives.
_IN_TURN = 2
#: Bytes that what each process sends begins at a multiple of.
_ALIGNMENT = 256


def send_by_copies(modules: Sequence[nn.Module], peers: Peers, ranks: Ranks) -> None:
    """Have what FSDP2 sends for these modules copied. By all processes at once.

    modules: those of one root, about in the order that a pass calls them in.
    """
    sent = {module: found for module in modules if 0 < (found := sent_of(module)).num_bytes <= MOST_BYTES}
    if not sent:
        return
    most = max(each.num_bytes for each in sent.values())
    weights = [peers.zeros(most, torch.uint8) for _ in range(_IN_TURN)]
    part_bytes = round_up(most // ranks.count, _ALIGNMENT)
    gradients = peers.zeros(part_bytes * (ranks.count - 1), torch.uint8)
    for number, (module, each) in enumerate(sent.items()):
        changed: Any = module
        changed.set_custom_all_gather(WeightCopies(module, weights[number % _IN_TURN], ranks))
        changed.set_custom_reduce_scatter(GradientCopies(each, gradients, part_bytes, ranks))


class WeightCopies:
    """A group's weights of all processes, put together in `memory`: an `AllGather` of FSDP2."""

    def __init__(self, module: nn.Module, memory: PeerMemory, ranks: Ranks) -> None:
        self._module, self._memory, self._ranks = module, memory, ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory that a group arrives in, once what was there before has been read."""
        await_copied_out(self._module, self._memory.own)
        return _viewed(self._memory.own, math.prod(size), dtype)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fetch the others' parts, between two meetings: all are there, and none is needed any more."""
        self._memory.meet()
        part = input_tensor.numel()
        for rank in others_of(self._ranks.rank, self._ranks.count):
            theirs = _viewed(self._memory.all_R[rank], output_tensor.numel(), output_tensor.dtype)
            at = slice(rank * part, (rank + 1) * part)
            output_tensor[at].copy_(theirs[at])
        self._memory.meet()


class GradientCopies:
    """The sum of this process's part of a group's gradients: a `ReduceScatter` of FSDP2.

    memory: of what the others send, `part_bytes` of each, from the next process on.
    """

    def __init__(self, sent: Sent, memory: PeerMemory, part_bytes: int, ranks: Ranks) -> None:
        self._half, self._memory, self._part_bytes, self._ranks = sent.half, memory, part_bytes, ranks
        self._num_sent = 0  # numbers of the gradients that are to be summed

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of gradients, in the precision that they come in, and then of their sum."""
        number = math.prod(size)
        is_sum = number * self._ranks.count == self._num_sent
        self._num_sent = 0 if is_sum else number
        return torch.empty(size, dtype=dtype if is_sum else self._half or dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Put parts where the others sum them, and sum this process's, in the order of the processes.

        Raises: RuntimeError if the sum were rounded.
        """
        if output_tensor.dtype.itemsize < 4:
            raise RuntimeError(f"sums of gradients are of fp32, and not of {output_tensor.dtype}")
        own, parts = self._ranks.rank, input_tensor.view(self._ranks.count, -1)
        for rank in others_of(own, self._ranks.count):
            self._place(rank, own, parts[rank]).copy_(parts[rank])
        self._memory.meet()
        for rank, part in enumerate(parts):
            part = part if rank == own else self._place(own, rank, part)
            output_tensor.copy_(part) if rank == 0 else output_tensor.add_(part)
        self._memory.meet()  # all have summed: the next group's may be put there

    def _place(self, receiver: int, sender: int, like: Tensor) -> Tensor:
        start = (sender - receiver - 1) % self._ranks.count * self._part_bytes
        return _viewed(self._memory.all_R[receiver][start:], like.numel(), like.dtype)


def _viewed(memory: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """The first numbers of a memory of bytes."""
    return memory[: number * dtype.itemsize].view(dtype)
