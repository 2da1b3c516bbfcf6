"""The loop around the step, from its first batch, or the one after the newest checkpoint, to a saved model.

The host runs up to two steps ahead of the device. Where something must happen at an exact step (a checkpoint, an
evaluation, the end), it first waits for the steps in flight and counts those that were really applied.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from brimful.core.callbacks import Callbacks, Progress
from brimful.core.errors import (
    BrimfulError,
    CheckpointError,
    DataError,
    Interrupted,
    MemoryFullError,
    NonFiniteError,
    listed,
    printable,
)
from brimful.core.options import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import OutOfMemory, Run
from brimful.data.batches.batch import Batch
from brimful.data.batches.prefetch import Feed, Source
from brimful.engine.assemble import Built
from brimful.engine.clock import Clock
from brimful.engine.fitted_step import FittedStep
from brimful.engine.inference import evaluate_rows, evaluating, evaluation_forward, predict
from brimful.engine.learning import epochs_between
from brimful.engine.prepare import Prepared
from brimful.engine.signals import StopSignals
from brimful.engine.training.baselines import Baselines
from brimful.engine.training.checkpoint import (
    checkpoint_path,
    load_checkpoint,
    newest_whole,
    saved_steps,
)
from brimful.engine.training.checkpoint_writer import CheckpointWriter
from brimful.engine.training.events import EventLog
from brimful.engine.training.final_evaluation import RowScores, final_evaluation, learning_findings
from brimful.engine.training.loop_state import LoopState
from brimful.engine.training.orders import Order
from brimful.engine.training.resume import check_weights
from brimful.engine.training.run_folder import RunFolder
from brimful.engine.training.saved_model import save_trained
from brimful.hardware.ranks import digest
from brimful.measurement.memory import MemoryWatch
from brimful.reports.card import model_card
from brimful.reports.memory_text import limit_text
from brimful.step.recovery import out_of_memory_text
from brimful.step.step import Outcome, Pending
from brimful.tasks.task import LOWER_IS_BETTER

#: Steps that may be in flight while the host goes on.
_IN_FLIGHT = 2
#: Steps in a row without a finite loss and gradient after which training stops.
_MOST_NON_FINITE = 5


class _ToldToStopError(Exception):
    """A signal to stop has come while weights are read."""


class TrainingLoop:
    """One run from its first step, or the one after its newest checkpoint, to its saved model."""

    def __init__(
        self,
        options: TrainOptions,
        prepared: Prepared,
        built: Built,
        folder: RunFolder,
        events: EventLog,
        callbacks: Callbacks,
        run: Run,
        phases: Phases,
        baselines: Baselines,
    ) -> None:
        self._options, self._prepared, self._built, self._folder = options, prepared, built, folder
        self._events, self._callbacks, self._record = events, callbacks, run
        self._fitted = FittedStep(built, self._out_of_memory)
        #: Batches from one evaluation to the next, where no steps between them were asked for.
        self._batches_between = prepared.order.batches_per_epoch * epochs_between(options, prepared.learning)
        self._forward = evaluation_forward(built, most_rows=options.batch_size, note=callbacks.warning)
        self._forward.hear = self._out_of_memory
        self._state = LoopState()
        self._phases, self._baselines = phases, baselines
        self._writer = CheckpointWriter(folder.checkpoints, run.run, keep=options.save_total_limit)
        self._saved_step: int | None = None
        self._scores: dict[int, RowScores] = {}  # by step, of the last evaluation and of the best one
        self._took_best = False
        #: What to go back to should the checkpoint that is being written fail: the step saved before, and the best one.
        self._unsettled = False
        self._unless_saved: tuple[int | None, tuple[Any, ...] | None] = (None, None)
        self._passed_over: set[int] = set()  # steps whose checkpoints were found damaged
        self._signals = StopSignals(lambda: callbacks.stage("stopping after this step"))
        self._flying: deque[Pending] = deque()
        self._ranks, self._apart = built.step.ranks, False
        self._memory = MemoryWatch(built.step.device, built.step.memory, limit=options.memory_limit)
        self._compilations = built.compilations
        self._compilations.look(0)
        self._input_wait_s = 0.0
        self._clock = Clock()
        self._logged = (0.0, 0, 0)  # seconds, samples and tokens when progress was last told

    def run(self) -> Run:
        """Trains to the end and saves the model. Raises what `train` raises."""
        with self._signals, closing(self._built.source) as source, self._settling():
            self._take_up()
            self._events.write("resumed" if self._state.consumed else "started", step=self._state.applied)
            self._clock = Clock(self._state.train_s)
            self._logged = (self._clock.seconds, self._state.samples, self._state.tokens)
            try:
                return self._run(source)
            except MemoryFullError as error:
                raise self._kept(error) from error

    def _run(self, source: Source) -> Run:
        self._do_what_is_due()  # a signal to stop may have come before it was done
        self._ranks.tell(Order.BEGIN, self._state.consumed)
        if not self._ended():
            device, start, stop = self._built.step.device, self._state.consumed, self._prepared.num_batches
            with Feed(source, device, start=start, stop=stop, ahead=self._options.prefetch) as feed:
                try:
                    self._train(feed)
                except DataError:
                    self._stop_if_told()  # the workers of a transform may have ended of the same signal
                    raise
                finally:
                    self._input_wait_s = feed.wait_s
        self._state.train_s = self._clock.seconds
        with self._clock.paused():
            return self._finish()

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Whatever ends the block, what was begun to be saved is there after it, or said to be lost."""
        try:
            with closing(self._writer):
                yield
        finally:
            self._settle()

    def _take_up(self) -> None:
        """Continues from the newest whole checkpoint, if there is one; cuts the event log back to it."""
        checkpoint, passed_over = newest_whole(self._folder.checkpoints, self._record.run)
        for line in passed_over:
            self._callbacks.warning(f"passed over: {line}")
        whole_step = -1 if checkpoint is None else checkpoint.step
        self._passed_over = {step for step in saved_steps(self._folder.checkpoints) if step > whole_step}
        if checkpoint is not None:
            check_weights(self._built.step.state(), checkpoint, self._options.output)
            self._state = LoopState(**checkpoint.loop)
            asked = self._state.num_steps
            if asked is not None and asked < self._prepared.num_steps:  # it may have ended for want of improvement
                self._state.ended_early, self._state.without_improvement = False, 0
            self._built.step.load_state(checkpoint.state)
            self._ranks.tell(Order.LOAD, checkpoint.step)
            if self._state.token_budget is not None:
                self._fitted.limit_to(self._state.token_budget)
                self._built.source.layout = self._fitted.layout
            self._record = dataclasses.replace(self._record, out_of_memory=_records(self._state))
            self._saved_step = checkpoint.step
            self._callbacks.note(f"going on after step {checkpoint.step}")
        elif self._options.resume:
            self._callbacks.warning("--resume finds no checkpoint here: starting from the beginning")
        self._state.num_steps = self._prepared.num_steps
        self._events.cut(self._state.events_position)

    def _train(self, feed: Feed) -> None:
        self._phases.enter("capture")  # until the first step is launched
        for batch in feed:
            began = time.perf_counter()
            with self._ranks.together(Order.STEP, batch.number):
                self._flying.append(self._fitted.run(batch))
            if self._compilations.look(batch.number + 1):
                self._phases.move(time.perf_counter() - began, "capture")
            self._phases.enter("steps")
            if len(self._flying) > _IN_FLIGHT:
                self._land(self._flying.popleft())
            self._stop_if_told()
            if self._unsettled and self._writer.ended:
                self._settle()
            if self._may_be_due(batch):
                self._land_all()
                self._do_what_is_due()
                if self._ended():
                    return

    def _out_of_memory(self, found: OutOfMemory) -> None:
        """Says and writes down that memory ran out, and has batches to come made as the run goes on."""
        state = self._state
        self._built.source.layout, state.token_budget = self._fitted.layout, self._fitted.limit
        state.out_of_memory.append(dataclasses.asdict(found))
        self._events.write("out_of_memory", step=state.applied, **dataclasses.asdict(found))
        self._callbacks.warning(out_of_memory_text(found))
        self._record = dataclasses.replace(self._record, out_of_memory=_records(state))
        with suppress(BrimfulError):  # it is in the log as well
            self._folder.write(self._record)

    def _kept(self, error: MemoryFullError) -> MemoryFullError:
        """Saves a checkpoint before the run ends for want of memory, if weights are whole; the error that says so."""
        if not error.resumable:
            return error
        self._land_all()
        self._state.train_s = self._clock.seconds
        self._settle()
        if self._saved_step != self._state.applied:
            self._save()
            self._settle(must=True)
        self._events.write("stopped", step=self._state.applied, why=str(error))
        said, hint = f"{error}; all is saved after step {self._state.applied}", f"{error.hint}; --resume goes on"
        return MemoryFullError(said, hint=hint)

    def _land_all(self) -> None:
        while self._flying:
            self._land(self._flying.popleft())

    def _land(self, pending: Pending) -> None:
        """Takes account of one step that the device has done."""
        outcome, state = pending.read(), self._state
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
        if state.applied % self._options.logging_steps == 0:
            self._tell(outcome)

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
        return sorted(found) or self._prepared.order.samples(outcome.number).tolist()

    def _tell(self, outcome: Outcome) -> None:
        state, (seconds, samples, tokens) = self._state, self._logged
        now = self._clock.seconds
        passed = max(now - seconds, 1e-9)
        done = state.applied if self._prepared.num_batches is None else state.consumed
        steps_left = max(0, self._prepared.num_steps - done)
        progress = Progress(
            step=state.applied,
            num_steps=self._prepared.num_steps,
            epoch=state.consumed / self._prepared.order.batches_per_epoch,
            loss=state.window_loss / state.window_batches,
            learning_rate=outcome.learning_rate,
            grad_norm=outcome.grad_norm,
            tokens_per_s=(state.tokens - tokens) / passed,
            samples_per_s=(state.samples - samples) / passed,
            left_s=steps_left * now / state.applied if state.applied else None,
            memory_bytes=self._memory.now(),
        )
        self._events.write("step", **dataclasses.asdict(progress))
        self._callbacks.progress(progress)
        self._memory.look_beside()
        self._logged = (now, state.samples, state.tokens)
        state.window_loss, state.window_batches = 0.0, 0

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
                self._settle()
            best = (state.best_value, state.best_step, state.best_metrics)
            improved = is_new and self._prepared.evaluation is not None and self._evaluate()
            if (due(options.save_steps) or improved) and self._saved_step != state.applied:
                self._save(best if improved else None)

    def _evaluate(self) -> bool:
        """Evaluates, and says whether the metric that picks the model improved."""
        evaluation, task, state = self._prepared.evaluation, self._prepared.task, self._state
        assert evaluation is not None
        scores, reading = RowScores(self._prepared, self._options.seed), self._built.step.update.reading()
        memory = self._memory.phases.phase("evaluation")
        # Others are in the midst of an evaluation that all take part in: it is not left.
        leave = self._leave_if_told if self._ranks.count == 1 else lambda: None
        try:
            with (
                self._phases.during("evaluation"), memory, evaluating(self._built.model), reading,
                self._ranks.together(Order.EVALUATE),
            ):  # fmt: skip
                found = evaluate_rows(
                    self._forward, evaluation.tokens, evaluation.targets_N, task, progress=leave, also=scores.add,
                    ranks=self._ranks,
                )  # fmt: skip
                state.metrics = found.result()
        except _ToldToStopError:
            self._stop_if_told()
            raise
        for note in found.accumulator.notes:
            self._callbacks.note(note)
        state.metrics_step = state.applied
        self._events.write("evaluated", step=state.applied, metrics=state.metrics)
        self._callbacks.evaluated(state.applied, state.metrics)
        improved = self._is_best()
        self._scores = {step: each for step, each in self._scores.items() if step == state.best_step}
        self._scores[state.applied] = scores
        return improved

    def _scores_of_saved(self, step: int) -> RowScores:
        """Scores by the weights that are in place, those after `step`: of the pass that was made, or of another one."""
        evaluation = self._prepared.evaluation
        assert evaluation is not None
        if step not in self._scores:
            scores = RowScores(self._prepared, self._options.seed)
            with evaluating(self._built.model), self._built.step.update.reading():
                for rows, logits_MC in predict(self._forward, evaluation.tokens):
                    scores.add(rows, self._prepared.task.answers(logits_MC))
            self._scores[step] = scores
        return self._scores[step]

    def _final_evaluation(self, run: Run) -> Run:
        """Evaluate the weights in place, tell of it, and add what stands out to the record."""
        state, options, path = self._state, self._options, self._folder.path
        if self._prepared.evaluation is None:
            for finding in (findings := learning_findings(options, path)):
                self._callbacks.warning(finding)
            return dataclasses.replace(run, findings=tuple(findings))
        with self._phases.during("evaluation"):
            step = state.best_step if self._took_best and state.best_step is not None else state.applied
            scores = self._scores_of_saved(step)
            found = final_evaluation(scores, self._prepared, options, run, path, self._callbacks, self._baselines)
        self._callbacks.evaluation(found)
        baselines = {each.name: each.metrics for each in found.baselines}
        return dataclasses.replace(run, baselines=baselines, findings=found.findings)

    def _is_best(self) -> bool:
        name, state = self._options.metric_for_best_model, self._state
        if name is None:
            return False
        name = name.removeprefix("eval_")
        value, best = state.metrics.get(name, math.nan), state.best_value  # some are not defined for every prediction
        better = math.isfinite(value) and (best is None or (value < best if name in LOWER_IS_BETTER else value > best))
        if better:
            state.best_value, state.best_step, state.best_metrics = value, state.applied, state.metrics
            state.without_improvement = 0
        else:
            state.without_improvement += 1
        patience = self._options.early_stopping_patience
        if patience is not None and state.without_improvement >= patience:
            state.ended_early = True
            self._callbacks.note(f"{name} has not improved for {patience} evaluations: training ends")
        return better

    def _save(self, best: tuple[Any, ...] | None = None) -> None:
        """Begin to save a checkpoint. best: what was best before, where this one is better."""
        self._settle()
        state = self._state
        self._compare_weights()
        with self._phases.during("saving"):
            self._events.write("saving", step=state.applied)
            state.events_position = self._events.position()
            self._unless_saved, self._saved_step = (self._saved_step, best), state.applied
            self._writer.begin(
                state.applied,
                state=self._built.step.state(),
                loop=dataclasses.asdict(state),
                protect={state.best_step} if state.best_step is not None else set(),
                passed_over=self._passed_over - {state.applied},
            )
            self._unsettled = True

    def _compare_weights(self) -> None:
        """Say so, once, if processes that made the same updates have other weights."""
        if not self._ranks.reachable or self._apart:
            return
        with self._ranks.together(Order.COMPARE):
            own = digest(self._built.step.update.weights().values())
            others = [int(self._ranks.receive(sender)[0]) for sender in range(1, self._ranks.count)]
        self._apart = any(each != own for each in others)
        if self._apart:
            apart = listed([str(rank) for rank, each in enumerate(others, 1) if each != own])
            self._callbacks.warning(f"weights of processes {apart} are not those of process 0, which are saved")

    def _settle(self, *, must: bool = False) -> None:
        """Wait for the checkpoint that is being written. A full disk costs it, not the run, unless it `must` be there.

        What is not there cannot be kept: the best one is then the one before.
        """
        if not self._unsettled:
            return
        self._unsettled, state = False, self._state
        with self._phases.during("saving"):
            saved = self._writer.settle()
        if saved is None or saved.failure is None:
            self._passed_over.discard(-1 if saved is None else saved.step)
            return
        self._saved_step, best = self._unless_saved
        if best is not None:
            state.best_value, state.best_step, state.best_metrics = best
        self._events.write("checkpoint_failed", step=saved.step, why=str(saved.failure))
        if must:
            raise saved.failure
        said = f"no checkpoint after step {saved.step}: {saved.failure}"
        self._callbacks.warning(f"{said}; training goes on")

    def _ended(self) -> bool:
        state, most_steps, most_batches = self._state, self._options.max_steps, self._prepared.num_batches
        if most_steps is not None and state.applied >= most_steps:
            return True
        return state.ended_early or (most_batches is not None and state.consumed >= most_batches)

    def _leave_if_told(self) -> None:
        """Raises: _ToldToStopError if a signal to stop has come: weights that are read are not those to be saved."""
        if self._signals.received is not None:
            raise _ToldToStopError

    def _stop_if_told(self) -> None:
        """Raises: Interrupted if a signal to stop has come, when all is saved."""
        number = self._signals.received
        if number is None:
            return
        self._land_all()
        self._state.train_s = self._clock.seconds
        self._settle()
        if self._saved_step != self._state.applied:
            self._save()
            self._settle(must=True)
        self._events.write("stopped", step=self._state.applied, signal=number)
        raise Interrupted(
            f"stopped by a signal after step {self._state.applied}; all is saved",
            signal_number=number,
            hint="go on with the same command and --resume",
        )

    def _finish(self) -> Run:
        """Evaluates and saves what is to be kept, and closes the record."""
        state = self._state
        peak = self._memory.peak()
        if (said := limit_text(peak, self._options.memory_limit)) is not None:
            self._callbacks.note(said)
        if self._prepared.evaluation is not None and state.metrics_step != state.applied:
            self._settle()
            self._evaluate()
        if self._saved_step != state.applied:
            self._save()
        with self._phases.during("export"):
            metrics = self._take_best()
        run = dataclasses.replace(
            self._record,
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
        )
        run = self._final_evaluation(run)
        self._built.step.release()
        self._built.model.eval()
        card = model_card(run, self._prepared.inputs)
        with self._phases.during("export"):  # beside the last checkpoint
            save_trained(self._built, self._prepared, self._options, self._folder.model, card)
        self._settle(must=True)
        run = dataclasses.replace(run, phases_s=self._phases.seconds)
        self._events.write("finished", step=state.applied, metrics=metrics, phases_s=run.phases_s)
        self._folder.write(run)
        self._callbacks.finished(run, str(self._folder.path))
        return run

    def _take_best(self) -> Mapping[str, float]:
        """Put the best model's weights in place, if another than the last was best; return its metrics."""
        state = self._state
        if state.best_step is None or state.best_step == state.applied:
            return state.metrics
        self._settle(must=True)  # with the last weights: after the best ones it could not be tried again
        try:
            best = load_checkpoint(checkpoint_path(self._folder.checkpoints, state.best_step))
        except CheckpointError as error:
            self._events.write("best_lost", step=state.best_step, why=str(error))
            self._callbacks.warning(f"the best model is lost, the last one is kept: {error}")
            return state.metrics
        self._built.step.load_state(best.state)
        self._took_best = True
        self._callbacks.note(f"the model after step {best.step} was best, and is kept")
        return state.best_metrics


def _records(state: LoopState) -> tuple[OutOfMemory, ...]:
    return tuple(OutOfMemory(**found) for found in state.out_of_memory)
