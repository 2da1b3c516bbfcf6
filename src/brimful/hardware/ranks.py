"""Processes that take each step together: sums over all of them, and a leader whose orders the others follow.

One process group: gloo between hosts' memories, NCCL between GPUs. It lives for one run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from brimful.core.errors import DeviceError, MemoryFullError, RanksError, first_line
from brimful.core.place import Place
from brimful.hardware.meeting import call, meet, store_is_launchers
from brimful.hardware.pulse import Beat, Lost, Pulse
from brimful.hardware.watch import Watch

#: Waits for work that was begun: until it is done, or on a GPU until what is launched from now on comes after it.
Ending = Callable[[], None]

#: Time for one process to wait for others at work: an epoch's evaluation, a checkpoint.
_WAITING = timedelta(hours=24)
#: Most seconds from the end of a connection until it is known whose process is gone.
_VERDICT_S = 9.0


class Ranks:
    """Several processes, of which this is number `rank` of `count`; the first leads. One alone has nothing to do.

    Raises, wherever others are waited for: RanksError if one of them is gone.

    watch: of the others; None for one alone. pulse: where this process is, for them to see.
    mesh: (data, tensor) groups of processes, where a model's weights are cut; None where each process has all of them.
    Processes of one tensor group have one model's weights together, and the same rows; those of one data group have the
    same part of the weights, and share the rows.
    data_rank, data_count: this process's number, and how many share the rows. tensor_rank, tensor_count: likewise of
    those that have the weights together.
    """

    def __init__(self, place: Place | None = None, watch: Watch | None = None, mesh: DeviceMesh | None = None) -> None:
        place = place or Place()
        self.rank, self.count, self.leads = place.rank, place.count, place.leads
        self.mesh, self.tensor_count = mesh, 1 if mesh is None else mesh.size(1)
        self.data_rank, self.tensor_rank = divmod(self.rank, self.tensor_count)
        self.data_count = self.count // self.tensor_count
        self.pulse = Pulse() if watch is None else watch.pulse
        self.watch, self._failed, self._warnings = watch, False, list[str]()

    @property
    def reachable(self) -> bool:
        """True if there are others, who wait for an order or are at work."""
        return self.count > 1 and not self._failed

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place."""
        with self._others():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def sum_over_data(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes that have the same part of the weights, in place."""
        if self.mesh is None:
            self.sum(tensors)
        elif self.data_count > 1:
            with self._others():
                for tensor in tensors:
                    dist.all_reduce(tensor, group=self.mesh.get_group(0))

    def begin_sum(self, tensor: Tensor) -> Ending:
        """Begin to replace a tensor by its sum over all processes."""
        return self._begin(dist.all_reduce, tensor)

    def begin_exchange(self, into: Tensor, given: Tensor) -> Ending:
        """Begin to send each process its part of `given`, and to take what others send, in their order."""
        return self._begin(dist.all_to_all_single, into, given)

    def begin_gather(self, into: Tensor, own: Tensor) -> Ending:
        """Begin to put each process's `own` side by side, in their order."""
        return self._begin(_ALL_GATHER, into, own)

    def begin_scattered_sum(self, into: Tensor, given: Tensor) -> Ending:
        """Begin to sum this process's part of `given` over all processes."""
        return self._begin(_REDUCE_SCATTER, into, given)

    def _begin(self, collective: Callable[..., Any], *tensors: Tensor) -> Ending:
        """On a GPU, collectives are on the current stream, and there is nothing to wait for."""
        waits = not tensors[0].is_cuda
        with self._others(waits=False):
            begun = collective(*tensors, async_op=waits)
        if not waits:
            return lambda: None
        number = self.pulse.traffic.begin(begun)

        def end() -> None:
            with self._others():
                self.pulse.traffic.wait(begun, number)

        return end

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

    def end_orders(self) -> None:
        """Give no order from now on: nobody hears any more."""
        self._failed = True

    def check_lost(self, seconds: float) -> None:
        """Wait so long for word that another process is gone. Raises: RanksError."""
        if self.watch is not None and (lost := self.watch.verdict(seconds)) is not None:
            raise RanksError(str(lost), lost=lost.rank)

    def tell_last(self, order: int) -> None:
        """Give the last order, when all is done: nobody fails any more because another process is gone."""
        if self.watch is not None:
            self.watch.say_last(order)
        with suppress(RanksError):
            self.tell(order)

    @contextmanager
    def together(self, order: int, number: int = 0, *, agreed: bool = False) -> Iterator[None]:
        """Order work that all do, and do it within. Where it fails, the others are left in the midst of it.

        agreed: whether all fail at once where memory ran out and the state is what it was; then they hear on.
        """
        self.tell(order, number)
        try:
            yield
        except BaseException as error:
            if not (agreed and isinstance(error, MemoryFullError) and error.resumable):
                self._failed = True
            raise

    def spread(self, text: str = "") -> str:
        """Return the leader's `text` in all processes."""
        sent = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor(len(sent))
        with self._others():
            dist.broadcast(size, src=0)
            given = sent if self.leads else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(given, src=0)
        return bytes(given.tolist()).decode()

    def hear(self) -> tuple[int, int]:
        """Wait for the leader's next order."""
        told = torch.zeros(2, dtype=torch.int64)
        try:
            with self._others():
                dist.broadcast(told, src=0)
        except RanksError:
            if self.watch is None or (last := self.watch.read_last()) is None:
                raise
            return last, 0
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

    def new_warnings(self) -> list[str]:
        """Return what other processes have warned of since this was asked the last time."""
        said = [text for beat in self.watch.beats() for text in beat.warnings] if self.watch is not None else []
        new = [text for text in said if text not in self._warnings]
        self._warnings += new
        return new

    def beats(self) -> tuple[Beat, ...]:
        """Return a sign of life of each process, in their order: this one's of now, the others' last ones."""
        if self.watch is None:
            return ()
        return tuple(self.pulse.beat() if each.rank == self.rank else each for each in self.watch.beats())

    def send_beat(self) -> None:
        """Send the leader, which takes `beats_now`, a sign of life."""
        self._send_own_beat(0)

    def _send_own_beat(self, to: int) -> None:
        self.send(np.frombuffer(self.pulse.beat().to_json().encode(), dtype=np.uint8).copy(), to)

    def beats_now(self) -> tuple[Beat, ...]:
        """Wait for each of the others to `send_beat`; return a sign of life of all processes, in their order."""
        others = [Beat.from_json(self.receive(sender).tobytes()) for sender in range(1, self.count)]
        return (self.pulse.beat(), *others)

    def where(self, rank: int, why: str) -> Lost:
        """Have one process tell all others where it is, with what is known of it; all call this together."""
        if rank == self.rank:
            for other in range(self.count):
                if other != rank:
                    self._send_own_beat(other)
            beat = self.pulse.beat()
        else:
            beat = Beat.from_json(self.receive(rank).tobytes())
        return Lost.found(beat, self.count, why)

    @property
    def lost(self) -> Lost | None:
        """The process that is gone or stuck, once that is known."""
        return None if self.watch is None else self.watch.found

    @contextmanager
    def _others(self, *, waits: bool = True) -> Iterator[None]:
        try:
            with self.pulse.waiting() if waits else nullcontext():
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the other end of a connection is gone
            raise self._gone(error) from error

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within, another library sends to other processes, in the midst of its work. Raises: RanksError."""
        try:
            yield
        except RuntimeError as error:
            if not any(name in str(error) for name in _BACKENDS):
                raise
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> RanksError:
        """The error that ends this process.

        Nothing is told any more: others may wait for another message, and gloo ends a process that gets one of another
        size. They see connections end, as this one has.
        """
        self._failed = True
        lost = None if self.watch is None else self.watch.wait_for_verdict(_VERDICT_S)
        said = f"another process is gone ({first_line(error)})" if lost is None else str(lost)
        return RanksError(said, lost=None if lost is None else lost.rank)


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a number that is the same for tensors of the same bits. Waits for the device."""
    whole = {4: torch.int32, 8: torch.int64, 2: torch.int16}
    sums = [tensor.detach().view(whole[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return int(torch.stack(sums).mul(torch.arange(1, len(sums) + 1, device=sums[0].device)).sum())


#: Names by which errors of connections are known.
_BACKENDS = ("gloo", "NCCL", "TCPStore")
#: By the names of torch 2.13, or those of before.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_DTYPES = (torch.int64, torch.float32, torch.float64, torch.uint8)

#: One process by itself.
ALONE = Ranks()


@contextmanager
def joined(
    place: Place,
    device: torch.device,
    *,
    note: Callable[[str], None] = lambda _: None,
    asked: Mapping[str, str] | None = None,
    tensor_parallel: int = 1,
) -> Iterator[Ranks]:
    """Within, this process is one of those that a launcher has started; alone where there is one.

    note: takes word of processes that are long in coming. asked: of `asked_of`, the same in all. tensor_parallel:
    processes that have one model's weights together, neighbours by their numbers.
    Raises: DeviceError where they do not meet, or the process has a group of torch.distributed already; OptionError
    where one was asked something else.
    """
    if place.count == 1:
        yield ALONE
        return
    if dist.is_initialized():
        hint = "call it before init_process_group, in new processes after a run on GPUs that failed; for your own loop"
        hint += " there is brimful.Step"
        raise DeviceError("torch.distributed is in use in this process already", hint=hint)
    store, own = call(place)
    pulse = Pulse(place.rank, f"GPU {device.index or 0}" if device.type == "cuda" else "CPU")
    watch = Watch(pulse, own, place.count, own_store=not store_is_launchers())
    meet(own, watch, place, note, asked)
    watch.begin()
    failed = False
    try:
        yield Ranks(place, watch, _connected(store, watch, place, device, tensor_parallel))
    except BaseException as error:
        watch.fail(error)
        failed = True
        raise
    finally:
        watch.end()
        watch.wait_for_ends()
        if not (failed and device.type == "cuda"):  # NCCL would wait for graphs that the error's frames hold
            gc.collect()
            with suppress(Exception):
                dist.destroy_process_group()


def _connected(store: Any, watch: Watch, place: Place, device: torch.device, tensor_parallel: int) -> DeviceMesh | None:
    """Connect all processes with one another, in groups as `Ranks` has them. All do so at once."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.count, timeout=_WAITING)
        if tensor_parallel == 1:
            return None
        shape = (place.count // tensor_parallel, tensor_parallel)
        return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    except (RuntimeError, ValueError) as error:
        if (lost := watch.wait_for_verdict(_VERDICT_S)) is not None:
            raise RanksError(str(lost), lost=lost.rank) from error
        hint = "see that hosts reach one another on all ports; GLOO_SOCKET_IFNAME names the network that they share"
        said = f"the {place.count} processes do not reach one another: {first_line(error)}"
        raise DeviceError(said, hint=hint) from error
