"""The step of a run, on batches that are laid out again in smaller micro-batches whenever memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from brimful.core.records import OutOfMemory, Work
from brimful.data.batches.batch import Batch, Layout
from brimful.engine.assemble import Assembled
from brimful.step.recovery import until_it_fits
from brimful.step.step import Pending

T = TypeVar("T")


class FittedStep:
    """A step and the layout of its batches. A batch of an older layout is laid out anew before it is run.

    A batch that memory ran out in is begun again: its gradients are dropped, weights and random numbers are as they
    were before it, and so it has the gradient, and the dropout masks, of a run that had the smaller budget already.

    layout: of batches to be made. limit: most tokens of a micro-batch since memory ran out, None if it never did.
    hear: called with each time that it did, once the run goes on.
    Raises, where a batch is run: MemoryFullError.
    """

    def __init__(self, built: Assembled, hear: Callable[[OutOfMemory], None]) -> None:
        self.layout: Layout = built.layout
        self.limit: int | None = None
        self._step, self._built, self._hear = built.step, built, hear
        self._batch: Batch | None = None
        self._most_fitted = 0  # tokens of the largest micro-batch that was run
        self._before_captures: tuple[Layout, int | None] | None = None

    def run(self, batch: Batch) -> Pending:
        """Run one optimizer step. Return at once; the outcome is read later."""
        pending = self.attempt(batch, self._step.run, where="step")
        if (again := pending.again) is not None:
            pending.again = lambda batch: self.attempt(batch, again, where="step")
        return pending

    def attempt(self, batch: Batch, work: Callable[[Batch], T], *, where: Work) -> T:
        """Do `work` on a batch, which may be given to it more than once, in ever smaller micro-batches."""
        self._batch = batch
        try:
            done = until_it_fits(
                lambda: work(self._ready_batch()),
                self,
                self._step.device,
                self._hear,
                where=where,
                batch=batch.number + 1,
                remedy=self._built.remedy,
            )
            self._most_fitted = max(self._most_fitted, self.most_tokens)  # the same in all processes
            return done
        finally:
            self._batch = None

    def limit_to(self, num_tokens: int) -> None:
        """Lay batches out with at most so many tokens in a micro-batch, as a run did that is gone on with."""
        self.limit, self.layout = num_tokens, self._limited(num_tokens)

    @property
    def most_tokens(self) -> int:
        """Of a micro-batch of the batch that is run."""
        return self._most_tokens(self.layout)

    @property
    def has_fitted(self) -> bool:
        """True if a larger micro-batch was run before."""
        return self.most_tokens < self._most_fitted

    @property
    def captures(self) -> bool:
        """True while steps are captured."""
        return self._step.captures

    def abandon(self) -> bool:
        """Drop what the step has left; False if weights were changed."""
        return self._step.abandon()

    def halve(self, *, in_capture: bool) -> bool:
        """Lay batches out in smaller micro-batches.

        Where no graph fits, however small, steps are launched eagerly, on batches as they were before captures failed:
        each shape has run eagerly before it was captured.
        """
        if in_capture and self._before_captures is None:
            self._before_captures = (self.layout, self.limit)
        before = self._most_tokens(self.layout)
        limit = before // 2
        while limit:
            layout = self._limited(limit)
            if self._most_tokens(layout) < before:
                self.layout, self.limit = layout, limit
                return True
            limit //= 2
        if self._before_captures is None or not self.captures:
            return False
        self._step.stop_capturing()
        self.layout, self.limit = self._before_captures
        return True

    def _most_tokens(self, layout: Layout) -> int:
        assert self._batch is not None
        if self._batch.rows is None:  # made by hand: there is one way to lay it out
            return max(micro.inputs.num_tokens for micro in self._batch.micro_batches)
        rows = self._batch.rows
        whole = () if rows.whole is None else rows.whole.shares
        shares = [each.tolist() for each in whole] or [[len(row) for row in rows.ids]]
        return max((layout.largest(lengths) for lengths in shares if lengths), default=0)

    def _limited(self, num_tokens: int) -> Layout:
        return self._built.layout.limited(num_tokens, self._built.longest, self._built.lengths)

    def _ready_batch(self) -> Batch:
        assert self._batch is not None
        was_sent, self._batch = bool(self._batch.memories), self._batch.laid_out(self.layout)
        if (was_sent or self._step.device.type == "cuda") and not self._batch.memories:
            self._batch = self._batch.sent(self._step.device)
        return self._batch
