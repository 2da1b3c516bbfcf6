"""The step as CUDA graphs: what the host launches once, the device replays.

One graph per shape runs a whole step where the batch is a single micro-batch. Otherwise one graph per shape runs
`accumulate`, and one for all runs `update`; the number of micro-batches enters no graph. An update that the host
decides on runs eagerly after them.

Our kernels are compiled together before the first step, or read from where an earlier process left them: its gradient
is computed once for nothing.

Several processes capture the same graphs at the same steps, with the sums of gradients as branches of the last backward
pass; each shape ran eagerly before, by which they were connected.

Dropout: masks are those of the eager step. Our kernels read the batch's seed from a tensor of the step's and places
from the micro-batch; torch fills a graph's seed at each replay from the generator state that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brimful.data.batches.batch import Batch, MicroBatch
from brimful.hardware.memory import CaptureMemoryError
from brimful.kernels.precompile import Compiling
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.graphs.cache import Graph, GraphCache, GraphPool
from brimful.step.kept_buffers import buffers_of, put_back
from brimful.step.state import StepState
from brimful.step.step import Outcome, Pending, Step
from brimful.step.updates.fused_adamw import MOST_GRAPHS

#: How often graphs are made anew with what a model's code decides by now, before its steps run eagerly; within how many
#: steps two batches with other decisions say that they must be.
_MOST_RENEWED, _CLOSE = 3, 8


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
        self._kernels_wait, self._probing = precompile, False
        self._renewed, self._last_other = 0, -_CLOSE - 1  # graphs made anew; the last step with other decisions
        self._compiling: Compiling | None = None
        self._kept: Callable[[], list[Tensor]] = list
        self._room_for: tuple[int, int] | None = None  # graphs, and tokens of a pass, that there was room for
        self.pool = GraphPool(self.device, most_tokens)
        # An update has tables of gradients' addresses for so many graphs, and a shape may have two.
        # It keeps nothing of the step itself: graphs are freed with their step, not when Python looks for cycles.
        self._graphs = GraphCache(self.pool, what="steps", note=note, most=MOST_GRAPHS // 2, keep=self.update.captured)
        # In a memory of their own: the first graph of the other takes room for a whole step.
        optimizers = GraphPool(self.device, 0)
        self.update.record_with(GraphCache(optimizers, what="the optimizer's steps", note=note))

    @property
    def num_graphs(self) -> int:
        """As `Step` has it; those of before a checkpoint was loaded are gone."""
        return len(self._graphs)

    def run(self, batch: Batch) -> Pending:
        """One step, replayed where its shapes have been met before."""
        self._prepare(batch)
        if not self._graphs.enabled:
            return super().run(batch)
        is_new = not self._graphs.meet(micro.shape for micro in batch.micro_batches)
        num_tokens = max(micro.inputs.num_tokens for micro in batch.micro_batches)
        if is_new or (len(batch.micro_batches) > 1 and not self.update.captures_several):
            self.keep_room(num_tokens)
        if is_new:
            with self.pool.measured(num_tokens):
                pending = super().run(batch)
            if self.update.gathers_weights:
                self.pool.remember_pass(num_tokens)
            return pending
        return self._replayed(batch) or super().run(batch)

    def keep_room(self, num_tokens: int = 0) -> None:
        """As `Step` has it: capture no more, in all processes, where one has no memory for a pass beside graphs.

        Asked once for each number of graphs, and of tokens where these are more than before.
        """
        if not (self.is_shared and self.update.gathers_weights and len(self._graphs)):
            return
        asked = (len(self._graphs), num_tokens)
        if self._room_for is not None and asked[0] == self._room_for[0] and num_tokens <= self._room_for[1]:
            return
        self._room_for = asked
        if any(self.ranks.any([self.pool.lacks_room(num_tokens)])):
            self._wait()  # replays may be under way
            self._graphs.free()
            self._graphs.stop("there is no memory for other passes beside graphs")

    def _prepare(self, batch: Batch) -> None:
        """Compile kernels together, before the first pass."""
        self.begin_compiling(batch)
        if self._compiling is not None:
            self._compiling.wait()
            self._compiling = None

    def begin_compiling(self, batch: Batch) -> None:
        """As `Step` has it."""
        if self._kernels_wait:
            self._kernels_wait = False
            self._compiling = self.compile_kernels(batch, wait=False)

    def cancel_compiling(self) -> None:
        """As `Step` has it."""
        if self._compiling is not None:
            self._compiling.cancel()
            self._compiling = None

    def _replayed(self, batch: Batch) -> Pending | None:
        self.update.begin()
        single = len(batch.micro_batches) == 1
        whole = single and self.update.on_device
        self.tell_update(whole=whole, single=single)
        if whole:
            return self._whole(batch)
        return self._pieces(batch) if self.update.captures_several else None

    def _probed(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """As `Step` has it, replayed: from graphs that are recorded for it, and dropped with what dropout they have."""
        if not self._graphs.enabled:
            return super()._probed(batch)
        self._graphs.clear()
        self._probing = True
        try:
            self.update.hold_back()
            model, measured = self.execution.model, max(micro.inputs.num_tokens for micro in batch.micro_batches)
            with self.pool.measured(measured), put_back(buffers_of(model)):
                super().run(batch)  # as a shape that is met first: it warms up what capture must not
            self.update.hold_back()
            self._hold_scale()
            with put_back(buffers_of(model)):
                pending = self._replayed(batch)
                self._wait()
            if pending is not None and self._other_decisions(pending):
                self.update.abandon()  # gradients that are not numbers
                pending = None
            if pending is None:
                return super()._probed(batch)
            return list(pending.rows), [gradient.clone() for gradient in self._kept()]
        finally:
            self._probing, self._kept = False, list
            self._graphs.free()

    def load_state(self, state: StepState) -> None:
        """As `Step` does. Graphs hold the addresses of what is replaced, and are captured anew."""
        self._graphs.clear()
        self.update.abandon()
        super().load_state(state)

    def meet(self) -> str:
        """As `Step` does. None captures where one was refused before, as the leader may be on the first batch."""
        warning = super().meet()
        if any(self.ranks.any([not self._graphs.enabled])) and self._graphs.enabled:
            self._graphs.stop("a graph was refused in another process")
        return warning

    def abandon(self) -> bool:
        """As `Step` does. Graphs are dropped with their memory, and captured anew."""
        self._graphs.free()
        return super().abandon()

    @property
    def captures(self) -> bool:
        """As `Step` has it."""
        return self._graphs.enabled

    def stop_capturing(self) -> None:
        """As `Step` has it."""
        self._graphs.free()
        self._graphs.stop()
        self.update.record_with(None)

    def _whole(self, batch: Batch) -> Pending | None:
        """The step as one graph; None if it must run eagerly, before anything of it was computed."""
        micro, memory = batch.micro_batches[0], batch.memories[0]

        def compute(static: Tensor) -> tuple[Tensor, Tensor]:
            rows_S = self._last(micro, static)
            if self._probing:
                self._kept = self.update.gradients_later()
            return rows_S, self.apply_update(gathered=self.is_shared)

        room, rows_S, failure = Pending.room(self.device), None, None
        try:
            rows_S = self._rows_room(micro)
        except torch.OutOfMemoryError as error:  # others may be at the capture already, and do as where that fails
            failure = CaptureMemoryError(str(error)) if self.is_shared else error
        key = ("whole", micro.shape, self.update.graph_kind())
        with self.settings(batch, 0):
            with self._changing_nothing(), self.update.recording(key):
                graph = self._find(key, compute, memory, failure)
            if graph is None:
                return None
            assert rows_S is not None
            self.update.committed = True
            written_S, readings = graph.replay(memory)
            if not self._probing:
                self.update.replayed(key)
            rows_S.copy_(written_S)
        return self._pending(batch, readings, [rows_S], room, self._again())

    def _rows_room(self, micro: MicroBatch) -> Tensor:
        """(S,) memory for the losses of its rows, which a graph writes where the next one does."""
        dtype = torch.float64 if self.update.loss.dtype == torch.float64 else torch.float32
        return torch.empty(micro.valid_S.shape, dtype=dtype, device=self.device)

    @contextmanager
    def _changing_nothing(self) -> Iterator[None]:
        """Within, steps are recorded, and what they say to have changed is not."""
        try:
            yield
        finally:
            self.update.committed = False

    def _pieces(self, batch: Batch) -> Pending | None:
        """The step as a graph for each micro-batch, and one for the update; None as `_whole`."""
        self.update.prepare_gathering()
        room, last = Pending.room(self.device), len(batch.micro_batches) - 1
        with self.settings(batch, 0), self._changing_nothing():
            graphs = []
            for index, (micro, memory) in enumerate(zip(batch.micro_batches, batch.memories, strict=True)):
                ends = self.is_shared and index == last
                kind, compute = ("last", self._last) if ends else ("accumulate", self._accumulate)
                graphs.append(self._find((kind, micro.shape), partial(compute, micro), memory))
            on_device = self.update.on_device
            update = self._find(("update",), lambda _: self.apply_update(gathered=True)) if on_device else None
        if (update is None and on_device) or None in graphs:
            return None
        rows = []
        for index, graph in enumerate(graphs):
            assert graph is not None
            with self.settings(batch, index):
                rows.append(graph.replay(batch.memories[index]).clone())
        if self._probing:
            gradients = self.update.gradients(gathered=True)
            self._kept = lambda: gradients
        if update is None:
            readings = self.apply_update(gathered=True)
        else:
            self.update.committed = True
            readings = update.replay()
        return self._pending(batch, readings, rows, room, self._again())

    def _again(self) -> Callable[[Batch], Outcome] | None:
        """A way to run an eager step on a batch, where what a graph takes for granted may not be true of it."""
        if isinstance(self.execution, PaddedModel) and self.execution.decisions is not None:
            decisions = self.execution.decisions
            return partial(self._eagerly, decisions, self._renewed) if decisions.grants else None
        return None

    def _other_decisions(self, pending: Pending) -> bool:
        """Return whether rows of a replay may have no loss because decisions would be other ones. Waits for them."""
        return pending.again is not None and not all(bool(rows_S.isfinite().all()) for rows_S in pending.rows)

    def _eagerly(self, decisions: HostDecisions, renewed: int, batch: Batch) -> Outcome:
        """An eager step on a batch whose graph has not changed the weights. It comes after those launched meanwhile.

        What the model's code decides may change in the course of a run, as where it takes first batches otherwise: two
        such steps close to one another, and graphs are made anew, a few times. Buffers that other micro-batches of the
        step have written are written once more. renewed: how often graphs had been when this one was launched.
        """
        sent = replace(batch, memories=())
        outcome = super().run(sent.sent(self.device) if batch.memories else sent).read()
        if renewed < self._renewed or not (outcome.applied and self._graphs.enabled):
            return outcome
        is_close, self._last_other = batch.number - self._last_other <= _CLOSE, batch.number
        if is_close and self._renewed == _MOST_RENEWED:
            self._graphs.stop("what the model's code decides on the host is not the same for all batches of one shape")
        elif is_close:
            self._renewed += 1
            self._graphs.free()
            decisions.forget()
        return outcome

    def _find(
        self, key: Hashable, compute: Callable[[Tensor], Any], memory: Tensor | None = None,
        failure: Exception | None = None,
    ) -> Graph[Any] | None:  # fmt: skip
        """As `GraphCache.find`, with one outcome in all processes: a replay without others waits for them for ever.

        Sums are recorded, and wait for nobody: a process comes to the end of a capture whatever others do.
        failure: for want of memory, before this.
        Raises: CaptureMemoryError in all processes where it was raised in one; `failure`.
        """
        if not self.is_shared or key in self._graphs:
            if failure is not None:
                raise failure
            return self._graphs.find(key, compute, memory)
        graph = None
        self._graphs.collect()  # a refusal is one for all, and for good
        try:
            graph = None if failure is not None else self._graphs.find(key, compute, memory)
        except CaptureMemoryError as error:
            failure = error
        self.agree(failure, CaptureMemoryError)
        if any(self.ranks.any([graph is None])):
            if graph is not None:
                self._graphs.stop("a graph was refused in another process")
            self.update.abandon()  # gradients that were never computed
            return None
        return graph

    def _last(self, micro: MicroBatch, static: Tensor) -> Tensor:
        """The last micro-batch of a batch, whose backward pass sends gradients to other processes, if there are any."""
        sums = self.update.reduction if self.is_shared else None
        if sums is not None:
            sums.arm()
        try:
            rows_S = self.backward(micro.over(static))
            self.reduce()
        except BaseException:  # other processes may have come to the end of theirs, and none has sent anything
            if sums is not None:
                sums.disarm()
            raise
        return rows_S

    def release(self, *, together: bool = True) -> None:
        """As `Step` does. Graphs hold the connection to other processes, which cannot end before them."""
        self.cancel_compiling()
        self._graphs.free()
        super().release(together=together)

    def _accumulate(self, micro: MicroBatch, static: Tensor) -> Tensor:
        rows_S = self.backward(micro.over(static))
        self.update.gather()
        return rows_S
