"""Streams of a GPU that a CPU stands in for, and what operations of torch's do to memory, as `pretend_gpu` has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from races import Actor, Clock, Races, Work, join, lines_of_ours

GPU = torch.device("cuda", 0)
#: Operators whose outputs are not written, and those that change what a tensor is a view of.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWING = {"set_", "resize_", "detach_", "squeeze_", "unsqueeze_", "t_", "transpose_", "as_strided_"}
#: Operators that wait for a number, or for how many there are.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "equal",
    "bincount",
}  # fmt: skip
#: Operators of a GPU's tensors that take indices of the host.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Stream(Actor):
    """`torch.cuda.Stream`."""

    def __init__(self, gpu: PretendGpu, device: Any = None, priority: int = 0) -> None:
        self._gpu, self.cuda_stream = gpu, len(gpu.streams)
        super().__init__(f"stream {self.cuda_stream}" if gpu.streams else "the main stream")
        self.device, self.priority = GPU, priority
        gpu.streams.append(self)

    def begin(self) -> int:
        """Begin a piece of work, after all that the thread has done so far. Returns its number."""
        join(self.clock, self._gpu.thread.clock)
        return self.tick()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with self._gpu.races.lock:
            join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        """Say that there is work left: whoever asks learns nothing of its end."""
        return False

    def synchronize(self) -> None:
        with self._gpu.races.lock:
            join(self._gpu.thread.clock, self.clock)


class Event:
    """`torch.cuda.Event`. Nothing waits for one that was not recorded."""

    def __init__(self, gpu: PretendGpu, enable_timing: bool = False, blocking: bool = False) -> None:
        self._gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream | None = None) -> None:
        with self._gpu.races.lock:
            stream = stream or self._gpu.stream
            stream.begin()
            self.clock = dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        with self._gpu.races.lock:
            join(self._gpu.thread.clock, self.clock)

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class PretendGpu:
    """The GPU, and what was done on it. main: its default stream. streams: all, in the order of their making."""

    def __init__(self) -> None:
        self.races, self.streams = Races(), list[Stream]()
        self.main = Stream(self)
        self._local = threading.local()
        self._local.thread = Actor("the host")
        self._num_threads = 0

    @property
    def thread(self) -> Actor:
        """The thread of the host that asks."""
        if not hasattr(self._local, "thread"):
            with self.races.lock:
                self._num_threads += 1
                self._local.thread = Actor(f"thread {self._num_threads} of the host")
        found: Actor = self._local.thread
        return found

    @property
    def stream(self) -> Stream:
        """The current stream of the thread that asks."""
        return getattr(self._local, "stream", self.main)

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before = self.stream
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, _: Any = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    @contextmanager
    def placing(self, place: str, *, waits: bool) -> Iterator[None]:
        """Within, what is made is in a place, and is a copy if it was elsewhere. waits: whether the host does."""
        before, self._local.placing = self.placed, (place, waits)
        try:
            yield
        finally:
            self._local.placing = before

    @property
    def placed(self) -> tuple[str, bool] | None:
        """The place, and whether the host waits, of `placing`."""
        found: tuple[str, bool] | None = getattr(self._local, "placing", None)
        return found

    def place_of(self, tensor: Tensor) -> str:
        """The place of a tensor: "device", "pinned" or "host"."""
        memory = self.races.known(tensor)
        return "host" if memory is None else memory.place

    def put(self, tensor: Tensor, place: str = "device") -> Tensor:
        """Take a tensor, and what shares its memory, for one that was made in a place."""
        self.races.allocate(tensor, place, self.stream.name)
        return tensor

    # --- operations --------------------------------------------------------------------------------------------------

    def watch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of torch's, and take note of what it uses."""
        given = _Given.of(function)
        found = function(*args, **kwargs)
        if given.is_view:
            return found
        reads, writes = given.tensors(given.read, args, kwargs), given.tensors(given.written, args, kwargs)
        shared = {id(each) for each in writes}
        made = [each for each in _tensors(found) if id(each) not in shared]
        with self.races.lock:
            self._note(given.name, reads, writes, made, kwargs, args)
        return found

    def _note(
        self, name: str, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], kwargs: Any, args: Any
    ) -> None:
        others = [each for each in (*reads, *writes) if self.place_of(each) != "device"]
        is_here = len(others) < len(reads) + len(writes)
        place, waits = self.placed or ("device" if is_here else "host", name in _WAITING)
        for each in made:
            if self.races.known(each) is None:
                self.put(each, place)
        if name in _EMPTY:
            return
        writes = [*writes, *made]
        if name == "copy_" or (self.placed is not None and reads):
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._copy(reads[0], writes[0], waits=waits if name != "copy_" else not non_blocking)
            return
        if not (is_here or place == "device"):
            self.use(self.thread, reads, writes)
            return
        if others:  # numbers, which are arguments of a kernel's
            if name not in _INDEXING and any(each.ndim for each in others):
                raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
            self.use(self.thread, others, [])
            reads, writes = ([x for x in xs if self.place_of(x) == "device"] for xs in (reads, writes))
        self.use(self.stream, reads, writes)
        if waits:
            self.stream.synchronize()

    def _copy(self, source: Tensor, into: Tensor, *, waits: bool) -> None:
        places = {self.place_of(source), self.place_of(into)}
        if "device" not in places:
            self.use(self.thread, [source], [into])
            return
        if self.place_of(source) == "host" and not waits:  # staged: the host has read it when the call returns
            self.use(self.thread, [source], [])
            self.use(self.stream, [], [into])
            return
        self.use(self.stream, [source], [into])
        if places != {"device"} and (waits or "host" in places):
            self.stream.synchronize()

    def use(self, actor: Actor, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Take note of a piece of work of a stream, or of the host."""
        count = actor.begin() if isinstance(actor, Stream) else actor.tick()
        work = Work(actor.name, count, lines_of_ours())
        for tensor in reads:
            self.races.access(tensor, actor.clock, work, writes=False)
        for tensor in writes:
            self.races.access(tensor, actor.clock, work, writes=True)

    def use_on_host(self, tensor: Tensor, *, writes: bool = False) -> None:
        """Take note that the host's thread uses a tensor: what is on the device it waits for."""
        with self.races.lock:
            if self.place_of(tensor) == "device":
                self.use(self.stream, [tensor], [])
                self.stream.synchronize()
            else:
                self.use(self.thread, [] if writes else [tensor], [tensor] if writes else [])


class Watching(TorchDispatchMode):
    """Within, operations of this thread are noted."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is traced here; to guard each call takes longer than to note it

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _Given.of(function).is_composite:  # in inference mode these come as they are called
            with self:
                return function.decompose(*args, **kwargs or {})
        return self._gpu.watch(function, args, kwargs or {})


@dataclass(frozen=True)
class _Given:
    """Arguments of an operator that are tensors, by place and name. is_view: it uses no memory. is_composite: it is
    made of other operators."""

    name: str
    read: tuple[tuple[int, str], ...]
    written: tuple[tuple[int, str], ...]
    is_view: bool
    is_composite: bool

    @staticmethod
    @cache
    def of(function: Any) -> _Given:
        schema = function._schema
        name, read, written = schema.name.split("::")[-1], list[tuple[int, str]](), list[tuple[int, str]]()
        is_view = name in _VIEWING
        for place, argument in enumerate(schema.arguments):
            if "Tensor" not in str(argument.type):
                continue
            if argument.alias_info is None:
                read.append((place, argument.name))
            elif argument.alias_info.is_write:
                written.append((place, argument.name))
            else:
                is_view = True
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return _Given(name, tuple(read), tuple(written), is_view, function.has_kernel_for_dispatch_key(composite))

    @staticmethod
    def tensors(places: tuple[tuple[int, str], ...], args: Any, kwargs: Any) -> list[Tensor]:
        return [
            tensor
            for place, name in places
            for tensor in _tensors(args[place] if place < len(args) else kwargs.get(name))
        ]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in _tensors(part)]
    return []
