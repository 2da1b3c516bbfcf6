"""CUDA graphs by key: captured once, replayed from then on, all in one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from brimful.hardware.capture import capture
from brimful.hardware.memory import CaptureMemoryError, device_free_bytes, is_out_of_memory, release_workspaces

Outputs = TypeVar("Outputs")

#: Words of a refusal where autograd's graph of an earlier pass is alive, on the stream of that pass.
_ALIVE = "legacy stream"
_ALIVE_HINT = (
    "a loss or a copy that was made of the model's weights outside the step is alive with its graph;"
    " hint: detach() what is kept"
)
#: Graphs of one cache. A packed training run has at most a dozen shapes; classification has a handful of length
#: classes, and of budgets in each.
MOST_GRAPHS = 64


class Recorder(Protocol):
    """Records computations of one device: `GraphPool`. caches: all whose graphs share its memory."""

    device: torch.device
    caches: WeakSet[GraphCache]

    def record(self, compute: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """The recorded computation, and the tensors that its `replay` writes."""
        ...

    def measured(self, num_tokens: int) -> AbstractContextManager[None]:
        """Within, a shape is met for the first time, and runs eagerly."""
        ...

    def renew(self) -> None:
        """Begin with memory of its own again, once all graphs are gone."""
        ...


class GraphPool:
    """Memory that graphs share, whatever their shapes. They are replayed one after another, on one stream. After a
    capture that was refused, later ones share another memory.

    most_tokens: of the largest shape. The first graph takes as much as that one will need, to judge by what eager
    passes took (`measured`), in one piece: blocks cut to one shape do not fit the next.
    """

    def __init__(self, device: torch.device, most_tokens: int = 0) -> None:
        self.device, self._most_tokens = device, most_tokens
        self._measured_tokens = self._measured_bytes = self._workspace_bytes = 0
        self._pass_tokens = self._pass_bytes = 0  # of the largest eager pass
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self.caches: WeakSet[GraphCache] = WeakSet()
        self.handle = torch.cuda.graph_pool_handle()

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        """As `Recorder` has it."""
        release_workspaces()
        torch.cuda.empty_cache()  # what the shape before has left does not fit this one
        is_first = not self._graphs and num_tokens > self._measured_tokens
        before = self._idle_bytes() if is_first else 0
        yield
        if is_first:
            used = self._idle_bytes()
            release_workspaces()  # a graph has its own, whatever its shape
            self._measured_tokens, self._measured_bytes = num_tokens, max(used - before, 0)
            self._workspace_bytes = self._idle_bytes() - used

    def record(self, compute: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """As `Recorder` has it. Nothing is computed: the first replay does that."""
        release_workspaces()
        graph, room_bytes = torch.cuda.CUDAGraph(), self._room_bytes()
        try:
            with capture(graph, self.handle):
                torch.empty(room_bytes, dtype=torch.uint8, device=self.device)  # and gives it to the pool
                outputs = compute()
        except (RuntimeError, torch.AcceleratorError):
            self.handle = torch.cuda.graph_pool_handle()  # torch may still take that one to be captured into
            raise
        finally:
            release_workspaces()  # torch would keep them, and with them the pool, when its graphs are gone
        self._graphs.add(graph)
        return graph, outputs

    def remember_pass(self, num_tokens: int) -> None:
        """Take note of what the eager pass that was just made took of the device's memory, for `lacks_room`."""
        if num_tokens >= self._pass_tokens:
            self._pass_tokens, self._pass_bytes = num_tokens, self._idle_bytes(everywhere=True)

    def lacks_room(self, num_tokens: int = 0) -> bool:
        """Return whether less is free beside the graphs than the largest eager pass took, or one of so many tokens."""
        torch.cuda.empty_cache()
        more = max(1.0, num_tokens / max(1, self._pass_tokens))
        return device_free_bytes(self.device) < more * self._pass_bytes

    def renew(self) -> None:
        """As `Recorder` has it: torch gives the memory of a pool back when nothing is left in it."""
        self._measured_tokens = self._measured_bytes = self._workspace_bytes = 0
        self.handle = torch.cuda.graph_pool_handle()

    def _idle_bytes(self, *, everywhere: bool = False) -> int:
        """Bytes that torch keeps for this stream and nothing uses: after a pass, what was used on the way. everywhere:
        for any stream, outside of graphs."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        place = (index, torch.cuda.current_stream(self.device).cuda_stream)
        segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
        if everywhere:
            segments = [each for each in segments if tuple(each["segment_pool_id"]) == (0, 0)]
        else:
            segments = [each for each in segments if (each["device"], each["stream"]) == place]
        return sum(each["total_size"] - each["allocated_size"] for each in segments)

    def _room_bytes(self) -> int:
        """Bytes that the first graph takes for all; none where that is much of what is free, and might not fit."""
        if self._graphs or not self._measured_tokens:
            return 0
        room_bytes = self._measured_bytes * self._most_tokens // self._measured_tokens + self._workspace_bytes
        torch.cuda.empty_cache()
        return room_bytes if 2 * room_bytes < device_free_bytes(self.device) else 0


class Graph(Generic[Outputs]):
    """A recorded computation, and the memory that it reads its inputs from. kept: what else must live as long."""

    def __init__(
        self, recorded: torch.cuda.CUDAGraph, outputs: Outputs, static_inputs: Tensor | None, kept: object
    ) -> None:
        self._recorded, self._outputs, self._static_inputs, self._kept = recorded, outputs, static_inputs, kept

    def replay(self, inputs: Tensor | None = None) -> Outputs:
        """Computes it on a copy of `inputs`. The outputs are there until another graph of the pool is replayed."""
        if self._static_inputs is not None and inputs is not None:
            self._static_inputs.copy_(inputs, non_blocking=True)
        self._recorded.replay()
        return self._outputs


class GraphCache:
    """Graphs of the shapes that come again.

    A shape runs eagerly when it is first met, which also warms up what capture must not (compilation, library handles,
    optimizer states). When it comes again it is captured, and replayed from then on. If a capture is refused, all
    graphs are dropped and everything runs eagerly, but where autograd's graph of an earlier pass may be one that Python
    had not collected: then it is tried when the shape comes again, once. If memory runs out, whoever runs the step may
    try smaller shapes.

    recorder: None to capture nothing. what: the computations, as the user knows them. note: called once with the reason
    if capture turns out to be impossible, and once if there are more graphs than `most`: further shapes run eagerly.
    keep: called after each capture; what it returns lives as long as the graph.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        *,
        what: str,
        note: Callable[[str], None],
        most: int = MOST_GRAPHS,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self._recorder, self._what, self._note, self._most, self._keep = recorder, what, note, most, keep
        self._graphs: dict[Hashable, Graph[Any]] = {}
        self._met: set[Hashable] = set()
        self._is_full = self._has_collected = False
        if recorder is not None:
            recorder.caches.add(self)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def enabled(self) -> bool:
        """True if shapes that come again are captured."""
        return self._recorder is not None

    def meet(self, shapes: Iterable[Hashable]) -> bool:
        """Remembers shapes. True if all were met before."""
        new = set(shapes) - self._met
        self._met |= new
        return not new

    def find(
        self, key: Hashable, compute: Callable[[Any], Outputs], inputs: Tensor | None = None
    ) -> Graph[Outputs] | None:
        """The graph of a key, captured if there is none yet; None if it must run eagerly.

        compute: works on a tensor such as `inputs`, and changes nothing on the host that matters if it is refused.
        Raises: CaptureMemoryError, with nothing computed.
        """
        if self._recorder is None or key in self._graphs:
            return self._graphs.get(key)
        if len(self._graphs) == self._most:
            if not self._is_full:
                self._note(f"{self._what} of some shapes run eagerly: there are more than {self._most}")
            self._is_full = True
            return None
        try:
            static = None if inputs is None else inputs.to(self._recorder.device, copy=True)
            recorded, outputs = self._recorder.record(partial(compute, static))
        except (RuntimeError, torch.AcceleratorError) as refusal:
            if is_out_of_memory(refusal):
                raise CaptureMemoryError(str(refusal)) from refusal
            said = str(_first(refusal)).splitlines()[0][:200]
        else:
            self._graphs[key] = graph = Graph(recorded, outputs, static, self._keep())
            return graph
        if _ALIVE in said and not self._has_collected:
            self.collect()
        else:
            self.stop(f"{said}; {_ALIVE_HINT}" if _ALIVE in said else said)
        return None

    def collect(self) -> None:
        """Have Python let go of autograd's graphs of earlier passes that only cycles hold, once."""
        if not self._has_collected:
            self._has_collected = True
            gc.collect()

    def free(self) -> None:
        """Drop all graphs that share the memory of these, and the memory. They are captured anew."""
        self.clear()
        if self._recorder is not None:
            for cache in self._recorder.caches:
                cache.clear()
            self._recorder.renew()

    def stop(self, because: str | None = None) -> None:
        """Drops all graphs; everything runs eagerly from now on. Notes the reason, once, if one is given."""
        if self._recorder is not None and because is not None:
            self._note(f"{self._what} run eagerly: {because}")
        self._recorder = None
        self._graphs.clear()

    def clear(self) -> None:
        """Drops all graphs, whose addresses may be of what has been replaced, and meets all shapes anew."""
        self._graphs.clear()
        self._met.clear()


def _first(refusal: BaseException) -> BaseException:
    """The error that a capture met first: its end has another one of its own."""
    first = refusal
    while isinstance(first.__context__, RuntimeError | torch.AcceleratorError):
        first = first.__context__
    return first
