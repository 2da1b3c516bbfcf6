"""The step as CUDA graphs: what the host launches once, the device replays.

One graph per shape runs a whole step where the batch is a single micro-batch. Otherwise one graph per shape runs
`accumulate`, and one for all runs `update`; the number of micro-batches enters no graph. An update that the host
decides on runs eagerly after them.

Our kernels are compiled together before the first step, or read from where an earlier process left them: its gradient
is computed once for nothing.

Dropout: torch fills a graph's seed at each replay from the generator state that it was captured with, so masks are
drawn by (seed, batch, micro-batch) as in the eager step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from brimful.data.batches.batch import Batch, MicroBatch
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.graphs.cache import GraphCache, GraphPool
from brimful.step.state import StepState
from brimful.step.step import Outcome, Pending, Step
from brimful.step.updates.fused_adamw import MOST_GRAPHS


class CapturedStep(Step):
    """`Step` with the same results, launched as graphs, for batches that were sent to its device.

    most_tokens: of a micro-batch, padding counted. precompile: whether attention is ours, and compiles. note:
    called once with the reason if capture turns out to be impossible; the step then goes on eagerly.
    pool: the memory of its graphs, for others that run between steps.
    """

    def __init__(
        self, *arguments: Any, most_tokens: int, precompile: bool, note: Callable[[str], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._kernels_wait = precompile
        self.pool = GraphPool(self.device, most_tokens)
        # An update has tables of gradients' addresses for so many graphs, and a shape may have two.
        # It keeps nothing of the step itself: graphs are freed with their step, not when Python looks for cycles.
        self._graphs = GraphCache(self.pool, what="steps", note=note, most=MOST_GRAPHS // 2, keep=self.update.captured)

    @property
    def num_graphs(self) -> int:
        """As `Step` has it; those of before a checkpoint was loaded are gone."""
        return len(self._graphs)

    def run(self, batch: Batch) -> Pending:
        """One step, replayed where its shapes have been met before."""
        if self._kernels_wait:
            self._kernels_wait = False
            self.compile_kernels(batch)
        if not self._graphs.enabled:
            return super().run(batch)
        if not self._graphs.meet(micro.shape for micro in batch.micro_batches):
            with self.pool.measured(max(micro.inputs.num_tokens for micro in batch.micro_batches)):
                return super().run(batch)
        whole = len(batch.micro_batches) == 1 and self.update.on_device
        captured = self._whole(batch) if whole else self._pieces(batch)
        return captured or super().run(batch)

    def load_state(self, state: StepState) -> None:
        """As `Step` does. Graphs hold the addresses of what is replaced, and are captured anew."""
        self._graphs.clear()
        super().load_state(state)

    def _whole(self, batch: Batch) -> Pending | None:
        """The step as one graph; None if it must run eagerly, before anything of it was computed."""
        micro, memory = batch.micro_batches[0], batch.memories[0]

        def compute(static: Tensor) -> tuple[Tensor, Tensor]:
            rows_S = self.backward(micro.over(static))
            self.reduce()
            return rows_S, self.apply_update(gathered=False)

        with self.settings(batch, 0):
            graph = self._graphs.find(("whole", micro.shape), compute, memory)
            if graph is None:
                return None
            rows_S, readings = graph.replay(memory)
        return Pending(batch, readings, [rows_S.clone()], self.precision.scaled, self._again(batch))

    def _pieces(self, batch: Batch) -> Pending | None:
        """The step as a graph for each micro-batch, and one for the update; None as `_whole`."""
        self.update.prepare_gathering()
        micros = zip(batch.micro_batches, batch.memories, strict=True)
        with self.settings(batch, 0):
            graphs = [
                self._graphs.find(("accumulate", micro.shape), partial(self._accumulate, micro), memory)
                for micro, memory in micros
            ]
            on_device = self.update.on_device
            update = self._graphs.find(("update",), lambda _: self.apply_update(gathered=True)) if on_device else None
        if (update is None and on_device) or None in graphs:
            return None
        rows = []
        for index, graph in enumerate(graphs):
            assert graph is not None
            with self.settings(batch, index):
                rows.append(graph.replay(batch.memories[index]).clone())
        self.reduce()
        readings = self.apply_update(gathered=True) if update is None else update.replay()
        return Pending(batch, readings, rows, self.precision.scaled, self._again(batch))

    def _again(self, batch: Batch) -> Callable[[], Outcome] | None:
        """A way to run an eager step on the batch, where what a graph takes for granted may not be true of it."""
        taken_for_granted = isinstance(self.execution, PaddedModel) and self.execution.decisions is not None
        return partial(self._eagerly, batch) if taken_for_granted else None

    def _eagerly(self, batch: Batch) -> Outcome:
        """An eager step on a batch whose graph has changed nothing. It comes after those launched meanwhile."""
        sent = replace(batch, memories=())
        outcome = super().run(sent.sent(self.device) if batch.memories else sent).read()
        if outcome.applied:
            self._graphs.stop("what the model's code decides on the host is not the same for all batches of one shape")
        return outcome

    def _accumulate(self, micro: MicroBatch, static: Tensor) -> Tensor:
        rows_S = self.backward(micro.over(static))
        self.update.gather()
        return rows_S
