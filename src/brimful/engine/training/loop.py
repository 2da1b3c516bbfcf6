"""The loop around the step, from its first batch, or the one after the newest checkpoint, to a saved model.

The host runs up to two steps ahead of the device. Where something must happen at an exact step (a checkpoint, an
evaluation, the end), it first waits for the steps in flight and counts those that were really applied.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Any

from brimful.core.errors import (
    BrimfulError,
    DataError,
    Interrupted,
    MemoryFullError,
    NonFiniteError,
    RanksError,
    listed,
    printable,
)
from brimful.core.records import OutOfMemory, Processes, Run
from brimful.data.batches.batch import Batch
from brimful.data.batches.prefetch import Feed, Source
from brimful.engine.clock import Clock, Launched, StepClock
from brimful.engine.fitted_step import FittedStep
from brimful.engine.learning import epochs_between
from brimful.engine.signals import StopSignals
from brimful.engine.training.evaluations import Evaluations
from brimful.engine.training.loop_state import LoopState
from brimful.engine.training.orders import Order, own_work
from brimful.engine.training.progress import progress_of, steps_done
from brimful.engine.training.resume import check_weights
from brimful.engine.training.run_context import RunContext
from brimful.engine.training.saved_model import save_trained
from brimful.engine.training.saving import Saving
from brimful.engine.training.shared_work import SharedWork
from brimful.hardware.pulse import Lost
from brimful.measurement.memory import MemoryWatch
from brimful.reports.card import model_card
from brimful.reports.memory_text import limit_text
from brimful.step.recovery import out_of_memory_text
from brimful.step.step import Outcome, Pending

#: Steps that may be in flight while the host goes on.
_IN_FLIGHT = 2
#: Steps in a row without a finite loss and gradient after which training stops.
_MOST_NON_FINITE = 5
#: Most seconds for a checkpoint that is being written when another process is lost.
_LAST_CHECKPOINT_S = 20.0
#: Seconds that a step on a CPU has to end after a signal to stop; a longer one is left undone.
_FINISH_S = 1.0
#: Seconds between lines of the log that say where the time went.
_TIME_EVERY_S = 10.0
#: Seconds without a logged line after which steps are told of, and between two times.
_STEPS_EVERY_S = 5.0
_STOPPING = "told to stop: a checkpoint is saved first; Ctrl-C leaves at once"
_ENDING = "told to stop: all steps are done, and the run ends once its model is saved; Ctrl-C leaves at once"


class _ToldToStopError(Exception):
    """A signal to stop has come while weights are read, or within a step."""


class TrainingLoop:
    """One run from its first step, or the one after its newest checkpoint, to its saved model."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._options, self._prepared, self._built = context.options, context.prepared, context.built
        self._events, self._callbacks, self._phases = context.events, context.callbacks, context.phases
        #: Batches from one evaluation to the next, where no steps between them were asked for.
        self._batches_between = self._prepared.order.batches_per_epoch * epochs_between(
            self._options, self._prepared.learning
        )
        self._ranks, self._fitted = self._built.step.ranks, FittedStep(self._built, self._out_of_memory)
        self._memory = MemoryWatch(self._built.step.device, self._built.step.memory, limit=self._options.memory_limit)
        self._saving = Saving(context)
        self._evaluations = Evaluations(context, self._memory, self._out_of_memory)
        self._signals = StopSignals(self._answer_signal, ranks=self._ranks)
        self._ending = False
        self._leave_at = math.inf
        self._flying: deque[tuple[Pending, Launched]] = deque()
        self._compilations = self._built.compilations
        self._compilations.look(0)
        self._input_wait_s = 0.0
        self._clock = Clock()
        self._steps = StepClock(self._clock, self._built.step.device)
        self._done_s = 0.0  # when the last step that landed was done
        self._work = SharedWork(self._ranks)
        self._logged = (0.0, 0, 0)  # seconds, samples and tokens when progress was last told
        self._time_told, self._steps_told = -math.inf, 0.0

    @property
    def _state(self) -> LoopState:
        return self._context.state

    def run(self) -> Run:
        """Trains to the end and saves the model. Raises what `train` raises."""
        if self._ranks.watch is not None:
            self._ranks.watch.on_loss = self._leave
        with self._signals, closing(self._built.source) as source, self._saving.settling(), closing(self._evaluations):
            self._take_up()
            state = self._state
            self._events.write("resumed" if state.consumed else "started", step=state.applied)
            self._clock = Clock(state.train_s)
            self._steps = StepClock(self._clock, self._built.step.device)
            self._done_s, self._logged = self._clock.seconds, (self._clock.seconds, state.samples, state.tokens)
            self._steps_told = self._clock.seconds
            try:
                return self._run(source)
            except MemoryFullError as error:
                raise self._kept(error) from error
            except RanksError:
                if self._ranks.lost is not None:
                    self._write_lost(self._ranks.lost)
                raise

    def _answer_signal(self) -> None:
        self._callbacks.stage(_ENDING if self._ending else _STOPPING)

    def _leave(self, lost: Lost) -> None:
        """Write down who is lost, and let the checkpoint that is being written be whole, where the loop cannot."""
        self._write_lost(lost)
        self._saving.wait(_LAST_CHECKPOINT_S)

    def _write_lost(self, lost: Lost) -> None:
        self._events.write("process_lost", **dataclasses.asdict(lost))

    def _run(self, source: Source) -> Run:
        self._do_what_is_due()  # a signal to stop may have come before it was done
        self._ranks.tell(Order.BEGIN, self._state.consumed)
        if not self._ended():
            device, start, stop = self._built.step.device, self._state.consumed, self._prepared.num_batches
            with Feed(source, device, start=start, stop=stop, ahead=self._built.ahead) as feed:
                try:
                    with self._interruptible():
                        self._train(feed)
                except DataError:
                    self._stop_if_told()  # the workers of a transform may have ended of the same signal
                    raise
                finally:
                    self._input_wait_s = feed.wait_s
        self._state.train_s = self._clock.seconds
        with self._clock.paused():
            return self._finish()

    def _take_up(self) -> None:
        """Continues from the newest whole checkpoint, if there is one; cuts the event log back to it."""
        checkpoint = self._saving.newest()
        if checkpoint is not None:
            check_weights(self._built.step.tensors(), checkpoint, self._options.output)
            self._context.state = LoopState(**checkpoint.loop)
            asked = self._state.num_steps
            if asked is not None and asked < self._prepared.num_steps:  # it may have ended for want of improvement
                self._state.ended_early, self._state.without_improvement = False, 0
            self._built.step.load_state(checkpoint.state)
            self._ranks.tell(Order.LOAD, checkpoint.step)
            self._saving.remove_surplus()
            if self._state.token_budget is not None:
                self._fitted.limit_to(self._state.token_budget)
                self._built.source.layout = self._fitted.layout
            self._record_out_of_memory()
            self._callbacks.note(f"going on after step {checkpoint.step}")
        elif self._options.resume:
            self._callbacks.warning("--resume finds no checkpoint here: starting from the beginning")
        self._state.num_steps = self._prepared.num_steps
        self._events.cut(self._state.events_position)

    def _train(self, feed: Feed) -> None:
        self._phases.enter("capture")  # until the first step is launched
        for batch in feed:
            began = time.perf_counter()
            if not self._flying:
                self._steps.begin()
            with self._ranks.together(Order.STEP, batch.number, agreed=True):
                self._ranks.pulse.begin(batch.number + 1, **own_work(batch))
                self._work.add(batch)
                self._flying.append((self._begun(batch), self._steps.launched()))
            if self._compilations.look(batch.number + 1):
                self._phases.move(time.perf_counter() - began, "capture")
            self._phases.enter("steps")
            if len(self._flying) > _IN_FLIGHT:
                self._land(*self._flying.popleft())
            self._tell_steps()
            self._stop_if_told()
            self._saving.settle_if_written()
            if self._may_be_due(batch):
                self._land_all()
                self._do_what_is_due()
                if self._ended():
                    return
            self._ranks.pulse.await_input()

    def _interruptible(self) -> AbstractContextManager[None]:
        """The context of steps that a signal to stop may leave undone: on a CPU, where one may take half a minute."""
        step = self._built.step
        if step.device.type != "cpu" or self._ranks.count > 1:
            return nullcontext()
        return step.interruptible(self._leave_if_long)

    def _begun(self, batch: Batch) -> Pending:
        """One more step under way. Raises: Interrupted where it is left undone, as a signal to stop has come."""
        try:
            return self._fitted.run(batch)
        except _ToldToStopError:
            self._built.step.abandon()
            self._stop_if_told()
            raise

    def _out_of_memory(self, found: OutOfMemory) -> None:
        """Says and writes down that memory ran out, and has batches to come made as the run goes on."""
        state = self._state
        self._built.source.layout, state.token_budget = self._fitted.layout, self._fitted.limit
        state.out_of_memory.append(dataclasses.asdict(found))
        self._built.step.full = None
        self._events.write("out_of_memory", step=state.applied, **dataclasses.asdict(found))
        self._callbacks.warning(out_of_memory_text(found))
        self._record_out_of_memory()
        with suppress(BrimfulError):  # it is in the log as well
            self._context.folder.write(self._context.record)

    def _record_out_of_memory(self) -> None:
        found = tuple(OutOfMemory(**each) for each in self._state.out_of_memory)
        self._context.record = dataclasses.replace(self._context.record, out_of_memory=found)

    def _kept(self, error: MemoryFullError) -> MemoryFullError:
        """Saves a checkpoint before the run ends for want of memory, if weights are whole; the error that says so."""
        if not error.resumable or not self._saving.can_save:
            return error
        self._land_all()
        self._evaluations.close()  # a checkpoint may need their room
        self._state.train_s = self._clock.seconds
        self._saving.save_now()
        self._stopped(why=str(error))
        said, full = str(error), self._built.step.full
        if full is not None:
            if full.rank != self._ranks.rank:
                self._write_lost(full)
            said += "" if str(full) in said else f"; {full}"
        said += f"; all is saved after step {self._state.applied}"
        may = "--resume goes on, with another --gradient-checkpointing, --gpus or --sharding, too"
        return MemoryFullError(said, hint=f"{error.hint}; {may}")

    def _land_all(self) -> None:
        while self._flying:
            self._land(*self._flying.popleft())

    def _land(self, pending: Pending, launched: Launched) -> None:
        """Takes account of one step that the device has done."""
        with self._ranks.pulse.reading():
            outcome, state = pending.read(), self._state
            self._done_s = self._steps.done(launched)
        state.consumed += 1
        if not outcome.applied:
            self._skipped(outcome)
            return
        state.applied += 1
        state.skipped_in_a_row = 0
        state.samples += outcome.num_samples
        state.tokens += outcome.num_tokens
        state.window_loss += outcome.loss
        state.window_batches += 1
        state.learning_rate, state.grad_norm = outcome.learning_rate, outcome.grad_norm
        if state.applied == 1 or state.applied % self._options.logging_steps == 0 or self._ended():
            self._tell()

    def _tell_of_others(self) -> None:
        """Say what other processes have warned of since."""
        for warning in self._ranks.new_warnings():
            self._events.write("warning", step=self._state.applied, text=warning)
            self._callbacks.warning(warning)

    def _skipped(self, outcome: Outcome) -> None:
        self._state.skipped += 1
        if outcome.overflow:
            self._events.write("overflow", step=self._state.applied, scale=outcome.scale)
            return
        self._state.skipped_in_a_row += 1
        places = [self._prepared.training.examples.place(i) for i in self._bad_samples(outcome)]
        named = listed([f"{printable(file, 80)} row {row}" for file, row in places], 5)
        what = "gradient" if math.isfinite(outcome.loss) else "loss"
        self._events.write(
            "skipped", step=self._state.applied, batch=outcome.number, what=what, rows=[list(p) for p in places]
        )
        said = f"batch {outcome.number + 1} skipped: its {what} is not finite; samples: {named}"
        self._callbacks.warning(said)
        if self._state.skipped_in_a_row >= _MOST_NON_FINITE:
            self._stopped(why=f"{_MOST_NON_FINITE} steps in a row were not finite")
            raise NonFiniteError(
                f"{_MOST_NON_FINITE} steps in a row were not finite, after {self._state.applied} applied ones; {said}",
                hint="lower --learning-rate, use --precision fp32 or bf16, or look at the rows named",
            )

    def _bad_samples(self, outcome: Outcome) -> Sequence[int]:
        """Rows whose loss was not finite, of all processes; all rows of the batch where each of them was."""
        if not self._ranks.reachable:
            return outcome.bad_samples
        found = list(outcome.bad_samples)
        with self._ranks.together(Order.ROWS, outcome.number):
            for sender in range(1, self._ranks.count):
                found += self._ranks.receive(sender).tolist()
        return sorted(set(found)) or self._prepared.order.samples(outcome.number).tolist()

    def _stopped(self, **why: Any) -> None:
        """Write down that the training stops before its end, and what was not yet said: its last step, and its time."""
        self._tell_time()
        self._tell_last()
        self._events.write("stopped", step=self._state.applied, **why)

    def _tell_last(self) -> None:
        """Tell of the last step that was applied, if it is not yet."""
        if self._state.window_batches and self._state.learning_rate is not None:  # None: a checkpoint of older code
            self._tell()

    def _tell(self) -> None:
        state, now = self._state, self._done_s
        progress = progress_of(state, self._prepared, now=now, since=self._logged, memory_bytes=self._memory.now())
        self._events.write("step", **dataclasses.asdict(progress))
        self._ranks.pulse.enter("logging")
        self._tell_of_others()
        self._callbacks.progress(progress)
        self._ranks.pulse.enter("steps")
        self._memory.look_beside()
        self._logged = (now, state.samples, state.tokens)
        self._steps_told = self._clock.seconds
        self._tell_time(every_s=_TIME_EVERY_S)
        state.window_loss, state.window_batches = 0.0, 0

    def _tell_steps(self) -> None:
        """Tell of the steps that are done, where nothing was told for some time."""
        now = self._clock.seconds
        if now - self._steps_told < _STEPS_EVERY_S:
            return
        self._steps_told = now
        # On a CPU a step is computed before the next one begins.
        ahead = len(self._flying) if self._built.step.device.type == "cpu" else 0
        if (steps := steps_done(self._state, self._prepared, now=now, ahead=ahead)).done:
            self._callbacks.stepped(steps)

    def _tell_time(self, every_s: float = 0.0) -> None:
        """Write down the seconds by phase so far, where the last line of them is older than `every_s`."""
        now = time.monotonic()
        if now >= self._time_told + every_s:
            self._time_told = now
            self._events.write("time", step=self._state.applied, phases_s=self._phases.seconds)
            self._write_work()

    def _may_be_due(self, batch: Batch) -> bool:
        """True if evaluation, a save or a log line is due after this batch, should all steps in flight be applied."""
        applied = self._state.applied + len(self._flying)
        every = [n for n in (self._options.eval_steps, self._options.save_steps) if n]
        return (
            (batch.number + 1) % self._batches_between == 0
            or any(applied % n == 0 for n in every)
            or batch.number + 1 == self._prepared.num_batches
            or (self._options.max_steps is not None and applied >= self._options.max_steps)
        )

    def _do_what_is_due(self) -> None:
        """Evaluates and saves if it is time to, by the state alone: a run stopped just before does it on resume."""
        state, options = self._state, self._options
        epoch_ends = state.consumed > 0 and state.consumed % self._batches_between == 0

        def due(every: int | None) -> bool:
            return epoch_ends if every is None else state.applied > 0 and state.applied % every == 0

        state.train_s = self._clock.seconds
        is_new = due(options.eval_steps) and state.metrics_step != state.applied
        with self._clock.paused():
            if is_new:
                self._saving.settle()
            if is_new or due(options.save_steps):  # before the place in the log that a checkpoint keeps
                self._write_work()
            best = (state.best_value, state.best_step, state.best_metrics)
            improved = is_new and self._prepared.evaluation is not None and self._evaluate()
            if self._ended():  # it may have ended for want of improvement
                self._tell_last()
            if (due(options.save_steps) or improved) and self._saving.saved_step != state.applied:
                self._saving.save(best if improved else None)

    def _write_work(self, *, asks: bool = False) -> Processes | None:
        """Write down what each process has done; nothing for one alone. asks: each, in place of what it said last."""
        if asks and self._ranks.reachable:
            with self._ranks.together(Order.WORK):
                beats = self._ranks.beats_now()
        else:
            beats = self._ranks.beats()
        if (found := self._work.found(beats)) is not None:
            self._events.write("processes", step=self._state.applied, **dataclasses.asdict(found))
        return found

    def _evaluate(self) -> bool:
        """Evaluate, and return whether the metric that picks the model improved."""
        try:
            with self._phases.during("evaluation"):  # what is told of it, too: callbacks are the user's own code
                return self._evaluations.evaluate(self._leave_if_told)
        except _ToldToStopError:
            self._stop_if_told()
            raise

    def _ended(self) -> bool:
        state, most_steps, most_batches = self._state, self._options.max_steps, self._prepared.num_batches
        if most_steps is not None and state.applied >= most_steps:
            return True
        return state.ended_early or (most_batches is not None and state.consumed >= most_batches)

    def _leave_if_told(self) -> None:
        """Raises: _ToldToStopError if a signal to stop has come: what is under way is not to be saved."""
        if self._signals.received is not None:
            raise _ToldToStopError

    def _leave_if_long(self) -> None:
        """Raises: _ToldToStopError if the step has not ended some time after a signal to stop."""
        if self._signals.received is not None:
            self._leave_at = min(self._leave_at, time.monotonic() + _FINISH_S)
            if time.monotonic() >= self._leave_at:
                raise _ToldToStopError

    def _stop_if_told(self) -> None:
        """Raises: Interrupted if a signal to stop has come, when all is saved."""
        number = self._signals.received
        if number is None:
            return
        self._land_all()
        self._evaluations.close()  # a checkpoint may need their room
        self._state.train_s = self._clock.seconds
        self._saving.save_now()
        self._stopped(signal=number)
        raise Interrupted(
            f"stopped by a signal after step {self._state.applied}; all is saved",
            signal_number=number,
            hint="go on with the same command and --resume",
        )

    def _finish(self) -> Run:
        """Evaluates and saves what is to be kept, and closes the record."""
        state = self._state
        self._tell_of_others()
        peak = self._memory.peak()
        self._ranks.pulse.peak_bytes, self._ranks.pulse.limit_bytes = peak, self._memory.limit_bytes
        processes = self._write_work(asks=True)
        if (said := limit_text(peak, self._options.memory_limit)) is not None:
            self._callbacks.note(said)
        if self._prepared.evaluation is not None and state.metrics_step != state.applied:
            self._saving.settle()
            self._evaluate()
        if self._saving.saved_step != state.applied:
            self._saving.save()
        self._ending = True
        with self._phases.during("export"):
            took_best = self._saving.take_best()
        metrics = state.best_metrics if took_best else state.metrics
        run = dataclasses.replace(
            self._context.record,
            status="finished",
            metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
            steps=state.applied,
            skipped_steps=state.skipped,
            train_s=state.train_s,
            samples_per_s=state.samples / state.train_s if state.train_s else None,
            tokens_per_s=state.tokens / state.train_s if state.train_s else None,
            peak_bytes=peak,
            compilations=self._compilations.found,
            input_wait_s=self._input_wait_s,
            processes=processes,
        )
        best_step = state.best_step if took_best and state.best_step is not None else state.applied
        run = self._evaluations.final(run, step=best_step)
        if self._built.step.update.releases_together:
            self._ranks.tell(Order.RELEASE)
        self._built.step.release()
        self._built.model.eval()
        card = model_card(run, self._prepared.inputs)
        with self._phases.during("export"):  # beside the last checkpoint
            save_trained(self._built, self._prepared, self._options, self._context.folder.model, card)
        self._saving.settle(must=True)
        run = dataclasses.replace(run, phases_s=self._phases.seconds, peak_bytes=self._memory.with_what_came(peak))
        self._events.write("finished", step=state.applied, metrics=metrics, phases_s=run.phases_s)
        self._context.folder.write(run)
        self._callbacks.finished(run, str(self._context.folder.path))
        return run
