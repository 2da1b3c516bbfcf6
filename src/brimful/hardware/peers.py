"""Memory of the GPUs of one host that processes read and write one another's of.

Copies between two GPUs' memory are made by copy engines, and leave multiprocessors to the model, from which NCCL's
kernels take some. By torch's symmetric memory, whose barriers are kernels of one block and may be part of a graph.
Source: torch.distributed._symmetric_memory of torch 2.11 and 2.13.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from brimful.core.errors import DeviceError, OptionError, first_line
from brimful.core.place import find_local_count
from brimful.hardware.pulse import system_name
from brimful.hardware.ranks import Ranks

#: Numbers that each process copies to every other one before copies are relied on: 4 MiB.
_TRIED = 1 << 20
#: Multicast over NVLink, which is not needed, and which a GPU that others share may not have.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """Memory of the same size in each process: `all_R` in their order, this one's own among them.

    meet: waits on the device, as the current stream comes to it, until all processes' streams have come to theirs.
    """

    all_R: Sequence[Tensor]
    own: Tensor
    meet: Callable[[], None]


class Peers(Protocol):
    """Makes `PeerMemory`, by all processes at once and in one order."""

    def zeros(self, size: int, dtype: torch.dtype) -> PeerMemory:
        """Memory of `size` zeros."""
        ...


class PeerGpus:
    """`Peers` on GPUs of one host."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device

    def zeros(self, size: int, dtype: torch.dtype) -> PeerMemory:
        """As `Peers` has it. Raises: DeviceError in all processes where one has none that others reach."""
        from torch.distributed import _symmetric_memory as symmetric

        with _without_multicast():
            own = self._agreed(lambda: symmetric.empty(size, dtype=dtype, device=self._device).zero_())
            group: Any = dist.group.WORLD
            handle: Any = self._agreed(lambda: symmetric.rendezvous(own, group))
        others = [handle.get_buffer(rank, (size,), dtype) for rank in range(self._ranks.count)]
        others[self._ranks.rank] = own
        handle.barrier()  # nobody writes before all zeros are there
        return PeerMemory(all_R=others, own=own, meet=handle.barrier)

    def _agreed(self, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, if it does in all processes: nobody waits for one that failed."""
        made, said = None, ""
        try:
            made = make()
        except (RuntimeError, ImportError, AttributeError) as error:
            said = first_line(error) or type(error).__name__
        if any(self._ranks.any([bool(said)])):
            why = said or "in another process"
            raise DeviceError(
                f"memory that GPUs reach one another's could not be made: {why}", hint="pass --no-peer-copies"
            )
        return made


def why_not_linked(count: int) -> str:
    """Return why NVLink does not join the GPUs of `count` processes on one host, or "". Asks no other process.

    Copies work without it where GPUs reach one another by PCIe; how fast they are there is not known.
    """
    if find_local_count() < count:
        return "its launcher does not say that all processes are on this host"
    if torch.cuda.device_count() < count:
        return f"of {count} GPUs this process sees {torch.cuda.device_count()}"
    try:
        import pynvml
    except ImportError:
        return "pynvml is missing, which says what joins the GPUs"
    try:
        pynvml.nvmlInit()
        gpus = [
            pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(number).uuid}")
            for number in range(count)
        ]
        for first, second in combinations(range(count), 2):
            status = pynvml.nvmlDeviceGetP2PStatus(gpus[first], gpus[second], pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status != pynvml.NVML_P2P_STATUS_OK:
                return f"NVLink does not join GPUs {first} and {second}"
    except (AttributeError, pynvml.NVMLError) as error:
        return f"the driver does not say what joins the GPUs ({first_line(error) or type(error).__name__})"
    return ""


def peers_of(ranks: Ranks, device: torch.device) -> tuple[PeerGpus | None, str]:
    """Return the peers of a process, or None and why there are none, the same in all processes. All ask at once."""
    own = f"{socket.gethostname()} {system_name()}"
    elsewhere = ranks.spread(own) != own
    if any(ranks.any([elsewhere])):
        return None, "its processes are on several hosts"
    peers, said = PeerGpus(ranks, device), ""
    try:
        _try(peers, ranks)
    except (DeviceError, RuntimeError) as error:
        said = first_line(error)
    if any(ranks.any([bool(said)])):
        return None, f"GPUs do not reach one another's memory ({said or 'in another process'})"
    return peers, ""


def peers_for(
    find: Callable[[Ranks, torch.device], tuple[Peers | None, str]], ranks: Ranks, device: torch.device, *, must: bool
) -> tuple[Peers | None, str]:
    """Return the peers that are found, or None and what users are to be warned of. All processes ask at once.

    must: whether to end where there are none, by the process that leads. Raises: OptionError then, in all.
    """
    peers, why = find(ranks, device)
    if peers is not None:
        return peers, ""
    if ranks.spread("must" if must else ""):
        raise OptionError(f"--peer-copies does not work here: {why}", hint="leave it out")
    return None, f"gradients and weights are sent by NCCL and not copied: {why}; --no-peer-copies does not try"


def others_of(rank: int, count: int) -> list[int]:
    """Return the other processes, from the next one on: so no two begin with the same one's memory."""
    return [(rank + distance) % count for distance in range(1, count)]


def _try(peers: PeerGpus, ranks: Ranks) -> None:
    """Write each other's memory by large copies, and read it. Raises: RuntimeError where that fails, or where bits are
    not those that were written, as on hosts whose PCIe bridges send copies elsewhere."""
    memory = peers.zeros(ranks.count * _TRIED, torch.int32)
    expected = torch.cat([_numbers(rank, memory.own.device) for rank in range(ranks.count)])
    mine = slice(ranks.rank * _TRIED, (ranks.rank + 1) * _TRIED)
    for other in memory.all_R:
        other[mine].copy_(expected[mine])
    memory.meet()
    wrong = [rank for rank, each in enumerate(memory.all_R) if not torch.equal(each.clone(), expected)]
    memory.meet()
    if wrong:
        raise RuntimeError(f"what was copied to the memory of process {wrong[0]} is not what is there")


def _numbers(rank: int, device: torch.device) -> Tensor:
    """Bits that a process writes, at no two places alike."""
    return torch.arange(_TRIED, dtype=torch.int32, device=device) * 2654435 + rank


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
