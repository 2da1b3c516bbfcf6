"""Copies between the memory of processes, instead of what NCCL sends of weights in parts (FSDP2).

    weights      each process puts its part of a group of layers into memory that all reach, and fetches the others'
    gradients    each puts what the others sum into their memory, and sums its own part in fp32

Copy engines make them, and leave multiprocessors to the model. Gradients in half precision are sent as they are, half
the bytes of fp32; one kernel sums them in fp32.

Both are what `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` of torch 2.11 to 2.13 ask for. torch
calls them in the order of the pass, the same in all processes, each kind on a stream of its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from brimful.data.batches.packing import round_up
from brimful.hardware.peers import PeerMemory, Peers, others_of
from brimful.hardware.ranks import Ranks
from brimful.models.fsdp_hooks import Sent, await_read, is_awaited, is_read, sent_of

try:
    from brimful.kernels import part_sums
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    part_sums = None  # type: ignore[assignment]

#: Memories that groups of weights arrive in: one is read from while the next group arrives in another.
_IN_TURN = 2
#: Bytes that what each process sends begins at a multiple of.
_ALIGNMENT = 256


def send_by_copies(modules: Sequence[nn.Module], peers: Peers, ranks: Ranks, layers: Sequence[nn.Module]) -> None:
    """Have what FSDP2 sends for these modules copied. By all processes at once.

    modules: those that one call of a pass reaches. layers: of these, one of each group of layers. What is larger than
    all of them, a table of words, is left to NCCL: its memory would stay for as long as the training does.
    """
    sent = {module: found for module in modules if (found := sent_of(module)).num_bytes}
    if not sent:
        return
    most = max(sent[module].num_bytes for module in [each for each in layers if each in sent] or sent)
    sent = {module: each for module, each in sent.items() if each.num_bytes <= most}
    weights = [peers.zeros(most, torch.uint8) for _ in range(min(_IN_TURN, len(sent)))]
    part_bytes = round_up(most // ranks.count, _ALIGNMENT)
    gradients = peers.zeros(part_bytes * (ranks.count - 1), torch.uint8)
    for module, each in sent.items():
        changed: Any = module
        changed.set_custom_all_gather(WeightCopies(module, list(sent), weights, ranks))
        changed.set_custom_reduce_scatter(GradientCopies(each, gradients, part_bytes, ranks))


class WeightCopies:
    """A module's whole weights, put together in one of the memories: an `AllGather` of FSDP2.

    modules: all that use these memories.
    """

    def __init__(
        self, module: nn.Module, modules: Sequence[nn.Module], memories: Sequence[PeerMemory], ranks: Ranks
    ) -> None:
        self._module, self._modules, self._memories, self._ranks = module, modules, memories, ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory to arrive in, that of others where all of ours waits to be read. In all processes the same, and
        in each pass: what was there in passes before does not count."""
        free = [each.own for each in self._memories if not is_awaited(self._modules, each.own)]
        if not free:
            return torch.empty(size, dtype=dtype, device=device)
        memory = min(free, key=partial(is_read, self._module))
        await_read(self._module, memory)
        return _viewed(memory, math.prod(size), dtype)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fetch the others' parts, between two meetings: all are there, and none is needed any more."""
        memory = next((each for each in self._memories if each.own.data_ptr() == output_tensor.data_ptr()), None)
        if memory is None:
            self._ranks.begin_gather(output_tensor, input_tensor)()
            return
        memory.meet()
        part = input_tensor.numel()
        for rank in others_of(self._ranks.rank, self._ranks.count):
            theirs = _viewed(memory.all_R[rank], output_tensor.numel(), output_tensor.dtype)
            at = slice(rank * part, (rank + 1) * part)
            output_tensor[at].copy_(theirs[at])
        memory.meet()


class GradientCopies:
    """The sum of this process's part of a module's gradients: a `ReduceScatter` of FSDP2.

    memory: of what the others send, `part_bytes` of each, from the next process on.
    """

    def __init__(self, sent: Sent, memory: PeerMemory, part_bytes: int, ranks: Ranks) -> None:
        self._half, self._memory, self._part_bytes, self._ranks = sent.half, memory, part_bytes, ranks
        self._given: Callable[[], Tensor | None] = lambda: None  # gradients that are to be summed, while they last

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of gradients, in the precision that they come in, and then of their sum."""
        given = self._given()
        if given is not None and math.prod(size) * self._ranks.count == given.numel():
            return torch.empty(size, dtype=dtype, device=device)
        given = torch.empty(size, dtype=self._half or dtype, device=device)
        self._given = weakref.ref(given)
        return given

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
        _sum([part if rank == own else self._place(own, rank, part) for rank, part in enumerate(parts)], output_tensor)
        self._memory.meet()  # all have summed: the next module's may be put there

    def _place(self, receiver: int, sender: int, like: Tensor) -> Tensor:
        start = (sender - receiver - 1) % self._ranks.count * self._part_bytes
        return _viewed(self._memory.all_R[receiver][start:], like.numel(), like.dtype)


def _sum(parts: Sequence[Tensor], into: Tensor) -> None:
    """Sum parts in their order, in the precision of the sum."""
    if into.is_cuda and into.dtype == torch.float32 and part_sums is not None:
        part_sums.add_parts(parts, into)
        return
    for number, part in enumerate(parts):
        into.copy_(part) if number == 0 else into.add_(part)


def _viewed(memory: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """The first numbers of a memory of bytes."""
    return memory[: number * dtype.itemsize].view(dtype)
