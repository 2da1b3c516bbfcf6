"""A GPU that a CPU stands in for: its memory is the host's, its streams are vector clocks, and races are found.

While it is there, `torch.cuda`'s streams and events are those of this file, tensors that were made on device `cuda` say
that they are there, and every operation of torch's is an access of the current stream, or of the host's thread, to the
memory of its tensors. Code does here what it does on a GPU, one operation after the other; what it has forgotten to
wait for is in `races.found`.

Of the host the detector knows torch's operations, and `numpy()`, which reads, and writes where memory is pinned.
Threads are put in order by their start and end, queues, futures and events, and not by locks. A copy between pageable
memory and the device, and all that needs a number on the host, waits for its stream. Memory that torch's allocator is
given back is taken for what the same stream is given next, whatever its size.

Not seen: Triton kernels, collectives (tests have stand-ins), replays of CUDA graphs, and what libraries do with memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # reads what there is of torch when it is imported, as optimizers do
from torch import Tensor

from brimful.hardware import streams
from brimful.kernels import side_stream
from pretend_streams import GPU, Event, PretendGpu, Stream, Watching
from races import Clock, join

__all__ = ["GPU", "PretendGpu", "pretended"]

_FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones", "ones_like",
    "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_OF_TENSORS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


@dataclass(frozen=True)
class _Carried:
    """An item of a queue, and the clock of whoever put it there."""

    item: Any
    clock: Clock


class _Generator:
    """A generator of the GPU's, that nothing draws from."""

    def __init__(self, _: Any = None) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_: self


def _factory(gpu: PretendGpu, plain: Callable[..., Any], *, of_tensor: bool) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        like = args[0] if args and isinstance(args[0], Tensor) else None
        if device is None and not pin_memory and not (of_tensor and like is not None):
            found: Tensor = plain(*args, **kwargs)
            return found
        place = "pinned" if pin_memory else gpu.place_of(like) if device is None and like is not None else "host"
        if device is not None and torch.device(device).type == "cuda":
            place = "device"
        elif device is not None and torch.device(device).type != "cpu":
            kwargs["device"] = device  # meta
        with gpu.placing(place, waits=False):
            found = plain(*args, **kwargs)
        if gpu.races.known(found) is None:  # made of numbers, by no operator
            gpu.put(found, place)
            if place == "device":
                gpu.use(gpu.stream, [], [found])
                gpu.stream.synchronize()
        return found

    return made


def _to(gpu: PretendGpu, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        given: dict[str, Any] = {"dtype": dtype or tensor.dtype, "copy": copy}
        if form is not None:
            given["memory_format"] = form
        is_there = gpu.place_of(tensor) == "device"
        if device is None or device.type == "meta" or (device.type == "cuda") == is_there:
            if device is not None and device.type == "meta":
                given["device"] = device
            return plain(tensor, **given)
        place = "device" if device.type == "cuda" else "pinned" if non_blocking else "host"
        with gpu.placing(place, waits=not non_blocking):
            return plain(tensor, **given | {"copy": True})

    return to


def _pinned(gpu: PretendGpu) -> Callable[..., Tensor]:
    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        if gpu.place_of(tensor) == "pinned":
            return tensor
        with gpu.placing("pinned", waits=True):
            return tensor.clone()

    return pin_memory


def _read(gpu: PretendGpu, plain: Callable[..., Any], *, shares: bool) -> Callable[..., Any]:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = gpu.place_of(tensor)
        if shares and place == "device":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        gpu.use_on_host(tensor, writes=shares and place == "pinned")
        return plain(tensor, *args, **kwargs)

    return read


def _patch_tensors(gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
    for name in _FACTORIES:
        patch.setattr(torch, name, _factory(gpu, getattr(torch, name), of_tensor=name.endswith("_like")))
    for name in _OF_TENSORS:
        patch.setattr(Tensor, name, _factory(gpu, getattr(Tensor, name), of_tensor=True))
    device: Any = Tensor.device
    patch.setattr(
        Tensor, "device", property(lambda x: GPU if gpu.place_of(x) == "device" else device.__get__(x, type(x)))
    )
    patch.setattr(Tensor, "is_cuda", property(lambda x: gpu.place_of(x) == "device"))
    to = _to(gpu, Tensor.to)
    patch.setattr(Tensor, "to", to)
    patch.setattr(Tensor, "cpu", lambda x, *_, **__: to(x, "cpu"))
    patch.setattr(Tensor, "cuda", lambda x, device=None, non_blocking=False: to(x, GPU, non_blocking=non_blocking))
    patch.setattr(Tensor, "pin_memory", _pinned(gpu))
    patch.setattr(Tensor, "is_pinned", lambda x, *_: gpu.place_of(x) == "pinned")
    patch.setattr(Tensor, "numpy", _read(gpu, Tensor.numpy, shares=True))
    patch.setattr(Tensor, "tolist", _read(gpu, Tensor.tolist, shares=False))
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(tensors: Any, with_indices: bool = False) -> Any:
        """As torch's optimizers ask for them: C code would say `cpu`."""
        found = group(tensors, with_indices)
        return {(given[0][0][0].device, dtype): given for (_, dtype), given in found.items()}

    patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", grouped)
    patch.setattr(Tensor, "record_stream", lambda x, stream: gpu.races.memory(x).recorded.add(stream.name))


def _patch_cuda(gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
    def device(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    patch.setattr(torch, "Generator", _Generator)
    for name, value in {
        "Stream": partial(Stream, gpu), "Event": partial(Event, gpu), "stream": gpu.on, "set_stream": gpu.set_stream,
        "current_stream": lambda _=None: gpu.stream, "default_stream": lambda _=None: gpu.main,
        "synchronize": gpu.synchronize, "device": device, "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False, "empty_cache": lambda: None, "default_generators": [_Generator()],
        "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda state, *_: torch.set_rng_state(state)
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)


def _patch_threads(gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
    start, join_thread = threading.Thread.start, threading.Thread.join
    ends: dict[threading.Thread, Clock] = {}

    def started(thread: threading.Thread) -> None:
        clock, run = dict(gpu.thread.clock), thread.run

        def watched() -> None:
            join(gpu.thread.clock, clock)
            try:
                with Watching(gpu):
                    run()
            finally:
                ends[thread] = dict(gpu.thread.clock)

        thread.run = watched  # type: ignore[method-assign]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join_thread(thread, timeout)
        join(gpu.thread.clock, ends.get(thread, {}))

    patch.setattr(threading.Thread, "start", started)
    patch.setattr(threading.Thread, "join", joined)
    patch.setattr(queue, "SimpleQueue", _carrying(gpu, queue._PySimpleQueue))  # type: ignore[attr-defined]
    patch.setattr(queue, "Queue", _carrying(gpu, queue.Queue))
    for owner, name in ((Future, "set_result"), (Future, "set_exception"), (threading.Event, "set")):
        patch.setattr(owner, name, _told(gpu, getattr(owner, name)))
    for owner, name in ((Future, "result"), (threading.Event, "wait"), (threading.Event, "is_set")):
        patch.setattr(owner, name, _heard(gpu, getattr(owner, name)))


def _carrying(gpu: PretendGpu, kind: Any) -> Any:
    """A kind of queue whose items know what was done before they were put there."""

    class Carrying(kind):  # type: ignore[misc]
        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            super().put(_Carried(item, dict(gpu.thread.clock)), *args, **kwargs)

        def get(self, *args: Any, **kwargs: Any) -> Any:
            carried = super().get(*args, **kwargs)
            join(gpu.thread.clock, carried.clock)
            return carried.item

    return Carrying


def _told(gpu: PretendGpu, plain: Callable[..., Any]) -> Callable[..., Any]:
    def told(self: Any, *args: Any) -> Any:
        self.told = dict(gpu.thread.clock)
        return plain(self, *args)

    return told


def _heard(gpu: PretendGpu, plain: Callable[..., Any]) -> Callable[..., Any]:
    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        if found is not False:
            join(gpu.thread.clock, getattr(self, "told", {}))
        return found

    return heard


@contextmanager
def pretended() -> Iterator[PretendGpu]:
    """Within, there is a GPU. Streams that the process has for uses are made anew, and forgotten at the end."""
    gpu, kept = PretendGpu(), (streams.stream_for, side_stream._side_stream)
    with pytest.MonkeyPatch.context() as patch:
        _patch_tensors(gpu, patch)
        _patch_cuda(gpu, patch)
        _patch_threads(gpu, patch)
        for each in kept:
            each.cache_clear()
        try:
            with Watching(gpu):
                yield gpu
        finally:
            for each in kept:
                each.cache_clear()
