"""Checkpoints of a run: begun at a step, written beside those that follow, settled before the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from brimful.core.errors import CheckpointError, DiskFullError, OutputError, listed
from brimful.engine.training.checkpoint import (
    Checkpoint,
    begin_checkpoint,
    checkpoint_path,
    load_checkpoint,
    newest_whole,
    rotate,
    saved_steps,
)
from brimful.engine.training.checkpoint_writer import CheckpointWriter, OthersParts
from brimful.engine.training.orders import Order
from brimful.engine.training.run_context import RunContext
from brimful.hardware.ranks import digest


class Saving:
    """Checkpoints of one run.

    saved_step: applied steps at the newest checkpoint, the one that is being written included; None before the first.
    """

    def __init__(self, context: RunContext) -> None:
        self._run, self._ranks = context, context.built.step.ranks
        self._writer = CheckpointWriter(
            context.folder.checkpoints,
            context.record.run,
            keep=context.options.save_total_limit,
            processes=self._ranks.count if context.built.step.update.gathers_state else 1,
            pulse=self._ranks.pulse,
        )
        self.saved_step: int | None = None
        #: What to go back to should the checkpoint that is being written fail: the step saved before, and the best one.
        self._unsettled = False
        self._unless_saved: tuple[int | None, tuple[Any, ...] | None] = (None, None)
        self._passed_over: set[int] = set()  # steps whose checkpoints were found damaged
        watch = self._ranks.watch
        self._others: OthersParts | None = None
        if watch is not None and context.built.step.update.gathers_state:
            self._others = OthersParts(self._ranks.count, watch.board(), lambda: watch.found)
        self._apart = False

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Whatever ends the block, what was begun to be saved is there after it, or said to be lost."""
        try:
            yield
        finally:
            with self._run.phases.during("saving"):  # it takes its time, and other processes theirs
                self._writer.close()
            self.settle()

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, and tell of damaged ones that are newer."""
        folder = self._run.folder.checkpoints
        checkpoint, passed_over = newest_whole(folder, self._run.record.run)
        for line in passed_over:
            self._run.callbacks.warning(f"passed over: {line}")
        whole_step = -1 if checkpoint is None else checkpoint.step
        self._passed_over = {step for step in saved_steps(folder) if step > whole_step}
        self.saved_step = None if checkpoint is None else checkpoint.step
        return checkpoint

    def remove_surplus(self) -> None:
        """Remove the old checkpoints that a process killed between its last save and their removal has left."""
        if self.saved_step is not None:
            run, keep = self._run, self._run.options.save_total_limit
            step, apart = self.saved_step, self._passed_over
            rotate(run.folder.checkpoints, keep, self._protected(), run=run.record.run, newest=step, passed_over=apart)

    def _protected(self) -> set[int]:
        best_step = self._run.state.best_step
        return set() if best_step is None else {best_step}

    def save(self, best: tuple[Any, ...] | None = None) -> None:
        """Begin to save a checkpoint. best: what was best before, where this one is better."""
        self.settle()
        run, state = self._run, self._run.state
        self._compare_weights()
        with run.phases.during("saving"):
            run.events.write("saving", step=state.applied)
            state.events_position = run.events.position()
            self._unless_saved, self.saved_step = (self.saved_step, best), state.applied
            self._unsettled = True
            try:
                states = self._states(state.applied)
            except (DiskFullError, OutputError) as error:  # what others have written of it is no checkpoint
                self._writer.fail(state.applied, error)
                return
            self._writer.begin(
                state.applied,
                loop=dataclasses.asdict(state),
                protect=self._protected(),
                passed_over=self._passed_over - {state.applied},
                **states,
            )

    @property
    def can_save(self) -> bool:
        """False once parts of the state are in processes that wait for no order any more."""
        return self._ranks.reachable or not self._run.built.step.update.gathers_state

    def _states(self, number: int) -> dict[str, Any]:
        """The step's state as the writer takes it; where each process has a part, others begin to write theirs.

        Raises: DiskFullError, OutputError.
        """
        step = self._run.built.step
        if self._others is None:
            return {"state": step.state()}
        second = begin_checkpoint(self._run.folder.checkpoints, number)
        failure: DiskFullError | OutputError | None = None
        with self._ranks.together(Order.STATE, number * 2 + second):
            others = self._others.coming()
            try:
                state = step.state()
            except (DiskFullError, OutputError) as error:  # of another disk; others hear on
                failure = error
        if failure is not None:
            raise failure
        return {"state": state, "second": second, "others": others}

    def save_now(self) -> None:
        """Save the steps applied by now, if they are not yet, and wait until they are.

        Raises: CheckpointError if they cannot be.
        """
        self.settle()
        if self.saved_step != self._run.state.applied:
            self.save()
            self.settle(must=True)

    def _compare_weights(self) -> None:
        """Say so, once, if processes that made the same updates have other weights."""
        if not self._ranks.reachable or self._apart or self._run.built.step.update.gathers_weights:
            return
        with self._ranks.together(Order.COMPARE):
            own = digest(self._run.built.step.update.alike())
            others = [int(self._ranks.receive(sender)[0]) for sender in range(1, self._ranks.count)]
        self._apart = any(each != own for each in others)
        if self._apart:
            apart = listed([str(rank) for rank, each in enumerate(others, 1) if each != own])
            self._run.callbacks.warning(f"weights of processes {apart} are not those of process 0, which are saved")

    def wait(self, seconds: float) -> None:
        """Wait for the checkpoint that is being written, from another thread, but no longer."""
        self._writer.wait(seconds)

    def settle_if_written(self) -> None:
        """Take account of a checkpoint that has been written in the meantime, without waiting for one."""
        if self._unsettled and self._writer.ended:
            self.settle()

    def settle(self, *, must: bool = False) -> None:
        """Wait for the checkpoint that is being written. A full disk costs it, not the run, unless it `must` be there.

        What is not there cannot be kept: the best one is then the one before.
        """
        if not self._unsettled:
            return
        self._unsettled, run = False, self._run
        with run.phases.during("saving"):
            saved = self._writer.settle()
        if saved is None or saved.failure is None:
            self._passed_over.discard(-1 if saved is None else saved.step)
            return
        self.saved_step, best = self._unless_saved
        if best is not None:
            run.state.best_value, run.state.best_step, run.state.best_metrics = best
        run.events.write("checkpoint_failed", step=saved.step, why=str(saved.failure))
        if must:
            raise saved.failure
        said = f"no checkpoint after step {saved.step}: {saved.failure}"
        run.callbacks.warning(f"{said}; training goes on")

    def take_best(self) -> bool:
        """Put the best model's weights in place, if another than the last was best; whether that was done."""
        run, state = self._run, self._run.state
        if state.best_step is None or state.best_step == state.applied:
            return False
        self.settle(must=True)  # with the last weights: after the best ones it could not be tried again
        try:
            best = load_checkpoint(checkpoint_path(run.folder.checkpoints, state.best_step))
        except CheckpointError as error:
            run.events.write("best_lost", step=state.best_step, why=str(error))
            run.callbacks.warning(f"the best model is lost, the last one is kept: {error}")
            return False
        if run.built.step.update.releases_together:
            self._ranks.tell(Order.LOAD, best.step)
        run.built.step.load_state(best.state)
        run.callbacks.note(f"the model after step {best.step} was best, and is kept")
        return True
