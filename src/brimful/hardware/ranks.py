"""Processes that take each step together: sums over all of them, and a leader whose orders the others follow.

One process group: gloo between hosts' memories, NCCL between GPUs. It lives for one run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from brimful.core.errors import DeviceError, RanksError, first_line, printable
from brimful.core.place import Place

#: Time for all processes to come, and for one to wait for others at work: an epoch's evaluation, a checkpoint.
_MEETING, _WAITING = timedelta(minutes=10), timedelta(hours=24)
#: Time for a process that failed to say so, after the others noticed.
_LAST_WORDS_S = 2.0


class Ranks:
    """Several processes, of which this is number `rank` of `count`; the first leads. One alone has nothing to do.

    Raises, wherever others are waited for: RanksError if one of them is gone.
    """

    def __init__(self, place: Place | None = None, store: Any = None) -> None:
        place = place or Place()
        self.rank, self.count, self.leads = place.rank, place.count, place.leads
        self._store, self._failed = store, False

    @property
    def reachable(self) -> bool:
        """True if there are others, who wait for an order or are at work."""
        return self.count > 1 and not self._failed

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place."""
        with self._others():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is set in some process. Waits for the hosts, not for the devices."""
        if self.count == 1:
            return list(flags)
        found = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        with self._others():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in found.tolist()]

    def tell(self, order: int, number: int = 0) -> None:
        """Give an order and its number to all others, as the leader. Nobody hears it after work that failed."""
        if self.reachable:
            with self._others():
                dist.broadcast(torch.tensor([order, number]), src=0)

    @contextmanager
    def together(self, order: int, number: int = 0) -> Iterator[None]:
        """Order work that all do, and do it within. Where it fails, the others are left in the midst of it."""
        self.tell(order, number)
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def hear(self) -> tuple[int, int]:
        """Wait for the leader's next order."""
        told = torch.zeros(2, dtype=torch.int64)
        with self._others():
            dist.broadcast(told, src=0)
        order, number = told.tolist()
        return order, number

    def send(self, array: np.ndarray, to: int = 0) -> None:
        """Send an array to another process, which `receive`s it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        shape = torch.tensor([_DTYPES.index(tensor.dtype), *tensor.shape, *[-1] * (2 - tensor.ndim)])
        with self._others():
            dist.send(shape, to)
            if tensor.numel():
                dist.send(tensor, to)

    def receive(self, sender: int) -> np.ndarray:
        """Wait for an array of one or two dimensions that another process sends."""
        shape = torch.zeros(3, dtype=torch.int64)
        with self._others():
            dist.recv(shape, sender)
            dtype, *sizes = shape.tolist()
            tensor = torch.empty([size for size in sizes if size >= 0], dtype=_DTYPES[dtype])
            if tensor.numel():
                dist.recv(tensor, sender)
        found: np.ndarray = tensor.numpy()
        return found

    def fail(self, error: BaseException) -> None:
        """Leave word of why this process ends, for the others."""
        if self._store is not None and not isinstance(error, RanksError):
            with suppress(Exception):
                self._store.set(f"failed/{self.rank}", f"{socket.gethostname()}: {first_line(error)}")

    @contextmanager
    def _others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the other end of a connection is gone
            raise RanksError(self._who_failed() or f"another process is gone ({first_line(error)})") from error

    def _who_failed(self) -> str | None:
        """Wait a moment for last words: the connection may break before they are there."""
        until = time.monotonic() + _LAST_WORDS_S
        with suppress(Exception):  # the store may have gone with its process
            while time.monotonic() < until:
                for rank in range(self.count):
                    if self._store.check([f"failed/{rank}"]):
                        said = self._store.get(f"failed/{rank}").decode()
                        return f"process {rank} of {self.count} failed: {printable(said, 500)}"
                time.sleep(_LAST_WORDS_S / 20)
        return None


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a number that is the same for tensors of the same bits. Waits for the device."""
    whole = {4: torch.int32, 8: torch.int64, 2: torch.int16}
    sums = [tensor.detach().view(whole[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return int(torch.stack(sums).mul(torch.arange(1, len(sums) + 1, device=sums[0].device)).sum())


_DTYPES = (torch.int64, torch.float32, torch.float64)

#: One process by itself.
ALONE = Ranks()


@contextmanager
def joined(place: Place, device: torch.device) -> Iterator[Ranks]:
    """Within, this process is one of those that a launcher has started; alone where there is one.

    Raises: DeviceError where they do not meet, or the process has a group of torch.distributed already.
    """
    if place.count == 1:
        yield ALONE
        return
    if dist.is_initialized():
        hint = "call it before init_process_group, or train in your own loop with brimful.Step"
        raise DeviceError("torch.distributed is in use in this process already", hint=hint)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, count = next(rendezvous("env://", place.rank, place.count, timeout=_MEETING))
        store.set_timeout(_MEETING)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_WAITING)
    except (RuntimeError, ValueError) as error:
        hint = "see that MASTER_ADDR and MASTER_PORT are the same in all, and that all were started"
        raise DeviceError(f"the {place.count} processes did not meet: {first_line(error)}", hint=hint) from error
    ranks = Ranks(place, PrefixStore("brimful", store))
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        with suppress(Exception):
            dist.destroy_process_group()
