"""The step as CUDA graphs: what the host launches once, the device replays.

One graph per shape runs a whole step where the batch is a single micro-batch. Otherwise one graph per shape runs
`accumulate`, and one for all runs `update`; the number of micro-batches enters no graph. A shape runs eagerly when it
is first met, which also warms up what capture must not (compilation, library handles, optimizer states), and is
captured when it comes again. Graphs share one memory pool. The first one takes as much as the largest shape will need,
to judge by what an eager step took, in one piece: blocks cut to one shape do not fit the next.

Kernels of fused layers are compiled together before the first step, whose gradient is computed once for nothing.

Dropout: torch fills a graph's seed from the generator at each replay, so masks are drawn by (seed, batch, micro-batch)
as in the eager step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brimful.data.batches.batch import Batch, MicroBatch, Shape
from brimful.hardware.capture import capture
from brimful.step.state import StepState
from brimful.step.step import Pending, Step
from brimful.step.updates.fused_adamw import MOST_GRAPHS

#: Graphs at most. A packed run has at most a dozen shapes.
_MOST_GRAPHS = MOST_GRAPHS // 2


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """A captured computation, and where it leaves what the host reads.

    memory: that of the micro-batch it works on, if it does on one. kept: what it reads besides.
    """

    graph: torch.cuda.CUDAGraph
    memory: Tensor | None
    rows_S: Tensor | None
    readings: Tensor | None
    kept: Any

    def replay(self, memory: Tensor | None = None) -> None:
        if self.memory is not None and memory is not None:
            self.memory.copy_(memory)
        self.graph.replay()


class CapturedStep(Step):
    """`Step` with the same results, launched as graphs, for batches that were sent to its device.

    most_tokens: of a micro-batch, padding counted. fused: whether layers are compiled, around our attention. note:
    called once with the reason if capture turns out to be impossible; the step then goes on eagerly.
    """

    def __init__(
        self, *arguments: Any, most_tokens: int, fused: bool, note: Callable[[str], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._most_tokens, self._kernels_wait, self._note = most_tokens, fused, note
        self._eager_tokens = self._eager_bytes = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._met: set[Shape] = set()
        self._graphs: dict[Shape, _Graph] = {}
        self._possible = True

    @property
    def num_graphs(self) -> int:
        """As `Step` has it; those of before a checkpoint was loaded are gone."""
        return len(self._graphs)

    def run(self, batch: Batch) -> Pending:
        """One step, replayed where its shapes have been met before."""
        shapes = [micro.shape for micro in batch.micro_batches]
        new = [shape for shape in dict.fromkeys(shapes) if shape not in self._met]
        if self._kernels_wait:
            self._kernels_wait = False
            self.compile_kernels(batch)
        self._met.update(new)
        if not self._possible:
            return super().run(batch)
        if new:
            return self._first(batch)
        try:
            return self._whole(batch, shapes[0]) if len(shapes) == 1 else self._pieces(batch, shapes)
        except _CannotCapture as refusal:  # before anything of this batch was computed
            self._possible = False
            self._graphs.clear()
            self._note(f"steps run eagerly: {refusal}")
            return super().run(batch)

    def load_state(self, state: StepState) -> None:
        """As `Step` does. Graphs hold the addresses of what is replaced, and are captured anew."""
        self._graphs.clear()
        self._met.clear()
        super().load_state(state)

    def _first(self, batch: Batch) -> Pending:
        """Runs a batch with a new shape eagerly; before there are graphs, sees how much memory the largest takes."""
        tokens = max(micro.inputs.num_tokens for micro in batch.micro_batches)
        torch.cuda.empty_cache()  # what the shape before has left does not fit this one
        if self._graphs or tokens <= self._eager_tokens:
            return super().run(batch)
        before = self._idle_bytes()
        pending = super().run(batch)
        self._eager_tokens, self._eager_bytes = tokens, max(self._idle_bytes() - before, 0)
        return pending

    def _idle_bytes(self) -> int:
        """What torch keeps and nothing uses: after a step, what was used on the way."""
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def _whole(self, batch: Batch, shape: Shape) -> Pending:
        graph = self._graphs.get(("whole", shape))
        if graph is None:
            memory, static = _copy(batch, 0)

            def compute() -> tuple[Tensor, Tensor]:
                rows_S = self.backward(static)
                self.reduce()
                return rows_S, self.apply_update(gathered=False)

            graph = self._capture(("whole", shape), compute, memory)
        self.draw_seed(batch, 0)
        graph.replay(batch.memories[0])
        assert graph.rows_S is not None
        assert graph.readings is not None
        return Pending(batch, graph.readings, [graph.rows_S.clone()], self.precision.scaled)

    def _pieces(self, batch: Batch, shapes: list[Shape]) -> Pending:
        self.update.prepare_gathering()
        for index, shape in enumerate(shapes):
            if ("accumulate", shape) not in self._graphs:
                memory, static = _copy(batch, index)
                self._capture(("accumulate", shape), partial(self._accumulate, static), memory)
        if ("update",) not in self._graphs:
            self._capture(("update",), lambda: (None, self.apply_update(gathered=True)))
        rows = []
        for index, shape in enumerate(shapes):
            graph = self._graphs["accumulate", shape]
            self.draw_seed(batch, index)
            graph.replay(batch.memories[index])
            assert graph.rows_S is not None
            rows.append(graph.rows_S.clone())
        self.reduce()
        update = self._graphs[("update",)]
        update.replay()
        assert update.readings is not None
        return Pending(batch, update.readings, rows, self.precision.scaled)

    def _accumulate(self, micro: MicroBatch) -> tuple[Tensor, None]:
        rows_S = self.backward(micro)
        self.update.gather()
        return rows_S, None

    def _capture(
        self,
        name: Shape,
        compute: Callable[[], tuple[Tensor | None, Tensor | None]],
        memory: Tensor | None = None,
    ) -> _Graph:
        """Records `compute`, which works on what is in `memory`. Nothing is computed: the first replay does that."""
        if len(self._graphs) >= _MOST_GRAPHS:
            raise _CannotCapture(f"there are more than {_MOST_GRAPHS} shapes")
        graph, room = torch.cuda.CUDAGraph(), self._room()
        try:
            with capture(graph, self._pool):
                torch.empty(room, dtype=torch.uint8, device=self.device)  # and gives it to the pool
                rows_S, readings = compute()
        except (RuntimeError, torch.AcceleratorError) as refusal:
            raise _CannotCapture(str(refusal).splitlines()[0][:200]) from refusal
        kept = self.update.captured()
        self._graphs[name] = _Graph(graph=graph, memory=memory, rows_S=rows_S, readings=readings, kept=kept)
        return self._graphs[name]

    def _room(self) -> int:
        """Bytes that the first graph takes for all; none where that is much of what there is, and might not fit."""
        if self._graphs or not self._eager_tokens:
            return 0
        room = self._eager_bytes * self._most_tokens // self._eager_tokens
        torch.cuda.empty_cache()
        return room if 2 * room < torch.cuda.mem_get_info(self.device)[0] else 0


class _CannotCapture(Exception):  # noqa: N818  (caught where it is raised)
    """The model does on the host, or waits for, what a graph cannot hold."""


def _copy(batch: Batch, index: int) -> tuple[Tensor, MicroBatch]:
    """A memory for a graph to read a micro-batch from, and that micro-batch."""
    memory = batch.memories[index].clone()
    return memory, batch.micro_batches[index].over(memory)
