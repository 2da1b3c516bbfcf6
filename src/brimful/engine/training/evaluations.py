"""Evaluations of a run: at steps, of the model that is kept, and which step was best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from brimful.core.records import OutOfMemory, Run
from brimful.engine.inference import evaluate_rows, evaluating, evaluation_forward, predict, timed
from brimful.engine.training.final_evaluation import RowScores, final_evaluation, learning_findings
from brimful.engine.training.orders import Order
from brimful.engine.training.run_context import RunContext
from brimful.engine.training.run_folder import bytes_to_save, leave_room
from brimful.hardware.ranks import ALONE
from brimful.levers.optimizer import asked_optimizer
from brimful.measurement.memory import MemoryWatch
from brimful.tasks.task import LOWER_IS_BETTER


class Evaluations:
    """Evaluations of one run's weights on its evaluation rows. hear: called each time that memory runs out."""

    def __init__(self, context: RunContext, memory: MemoryWatch, hear: Callable[[OutOfMemory], None]) -> None:
        self._run, self._memory = context, memory
        self._forward = evaluation_forward(
            context.built, most_rows=context.options.batch_size, note=context.callbacks.warning
        )
        self._forward.hear = hear
        self._scores: dict[int, RowScores] = {}  # by step, of the last evaluation and of the best one

    def evaluate(self, progress: Callable[[], None]) -> bool:
        """Evaluate, and return whether the metric that picks the model improved.

        progress: called between batches; it may raise. No process leaves an evaluation in which several take part.
        """
        run, state, ranks = self._run, self._run.state, self._run.built.step.ranks
        evaluation = run.prepared.evaluation
        assert evaluation is not None
        self._keep_only(state.best_step)  # those of the last evaluation are not needed any more
        scores, reading = self._new_scores(state.applied), run.built.step.update.reading()
        memory = self._memory.phases.phase("evaluation")
        of_all = run.built.step.update.gathers_weights  # each pass, and the leader's windows are all there are
        with (
            memory,
            evaluating(run.built.model),
            reading,
            ranks.together(Order.EVALUATE),
            run.built.step.with_others(),
            ranks.pulse.pieces() if of_all else nullcontext(),
        ):
            run.built.step.keep_room()
            found = evaluate_rows(
                self._forward,
                evaluation.tokens,
                evaluation.targets_N,
                run.prepared.task,
                progress=progress if ranks.count == 1 else ranks.pulse.end_piece if of_all else lambda: None,
                also=scores.add,
                ranks=ALONE if of_all else ranks,
            )
            state.metrics = found.result()
        for note in found.accumulator.notes:
            run.callbacks.note(note)
        state.metrics_step = state.applied
        run.events.write("evaluated", step=state.applied, metrics=state.metrics)
        run.callbacks.evaluated(state.applied, state.metrics)
        improved = self._is_best()
        self._keep_only(state.best_step, state.applied)
        return improved

    def final(self, run: Run, *, step: int) -> Run:
        """Evaluate the weights in place, those after `step`; tell of it, and add what stands out to the record."""
        context, path = self._run, self._run.folder.path
        if context.prepared.evaluation is None:
            findings = learning_findings(context.prepared, context.options, path, context.callbacks)
            for finding in findings:
                context.callbacks.finding(finding)
            return dataclasses.replace(run, findings=tuple(findings))
        with context.phases.during("evaluation"):
            scores = self._scores_after(step)
            found = final_evaluation(
                scores, context.prepared, context.options, run, path, context.callbacks, context.baselines
            )
            self.close()  # before the model is saved
        context.callbacks.evaluation(found)
        baselines = {each.name: each.metrics for each in found.baselines}
        return dataclasses.replace(run, baselines=baselines, findings=found.findings)

    def _scores_after(self, step: int) -> RowScores:
        """Scores by the weights that are in place, those after `step`: of the pass that was made, or of another one."""
        run, evaluation = self._run, self._run.prepared.evaluation
        assert evaluation is not None
        if step not in self._scores:
            scores = self._new_scores(step)
            step_of_all, ranks = run.built.step.update.gathers_weights, run.built.step.ranks
            together = ranks.together(Order.EVALUATE) if step_of_all else nullcontext()
            with evaluating(run.built.model), run.built.step.update.reading(), together, run.built.step.with_others():
                if step_of_all:
                    run.built.step.keep_room()
                for rows, logits_MC in timed(predict(self._forward, evaluation.tokens), ranks):
                    scores.add(rows, run.prepared.task.answers(logits_MC))
        return self._scores[step]

    def close(self) -> None:
        """Let go of the answers to rows, and of the files that hold them."""
        self._keep_only()

    def _keep_only(self, *steps: int | None) -> None:
        for step in self._scores.keys() - set(steps):
            self._scores.pop(step).close()

    def _new_scores(self, step: int) -> RowScores:
        """Scores by the weights after `step`, of no row yet. A pass that does not end, ends the run."""
        options, prepared, path = self._run.options, self._run.prepared, self._run.folder.path
        needed = bytes_to_save(options, prepared.facts.num_parameters, asked_optimizer(options).state_bytes)
        self._scores[step] = RowScores(prepared, options.seed, path, partial(leave_room, path, needed))
        return self._scores[step]

    def _is_best(self) -> bool:
        options, state = self._run.options, self._run.state
        if options.metric_for_best_model is None:
            return False
        name = options.metric_for_best_model.removeprefix("eval_")
        value, best = state.metrics.get(name, math.nan), state.best_value  # some are not defined for every prediction
        better = math.isfinite(value) and (best is None or (value < best if name in LOWER_IS_BETTER else value > best))
        if better:
            state.best_value, state.best_step, state.best_metrics = value, state.applied, state.metrics
            state.without_improvement = 0
        else:
            state.without_improvement += 1
        patience = options.early_stopping_patience
        if patience is not None and state.without_improvement >= patience:
            state.ended_early = True
            self._run.callbacks.note(f"{name} has not improved for {patience} evaluations: training ends")
        return better
