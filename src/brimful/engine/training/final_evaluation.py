"""The evaluation that ends a training: of the saved weights, beside baselines, with what stands out about the run.

The scores are taken from the pass of the evaluation rows that the run makes anyway. Only where no evaluation of the
saved weights was made by this process, such as after a resume, one more pass is needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.core import atomic_files
from brimful.core.atomic_files import path_text
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DiskFullError, OutputError
from brimful.core.evaluation import Evaluation
from brimful.core.options.train import TrainOptions
from brimful.core.records import Run, to_json
from brimful.data.writers.sorted_rows import SortedRows
from brimful.diagnosis.learning import Losses, chance_loss, course_of, findings_of_learning
from brimful.diagnosis.rows import RowFacts
from brimful.engine.prepare import Part, Prepared
from brimful.engine.scoring import PredictionFile, evaluation_of, mistakes_of, truth_column
from brimful.engine.training.baselines import Baselines
from brimful.tasks.answers import AnswerForm
from brimful.tasks.label_rows import taken
from brimful.tasks.scoring.choose import make_scorer
from brimful.tasks.scoring.mistakes import MistakeFinder

RECORD, PREDICTIONS = "evaluation.json", "predictions.parquet"


class RowScores:
    """Scores and answers of the evaluation rows by the weights of one step, window by window in any order.

    folder: holds answers that are too many for memory, in a file without a name until `close`. leave_room: called with
    bytes of answers that are to be written next; it may raise.
    """

    def __init__(
        self, prepared: Prepared, seed: int, folder: Path, leave_room: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        assert prepared.evaluation is not None
        self._scorer = make_scorer(prepared.space, prepared.evaluation.targets_N, seed=seed)
        self._form, self._examples = AnswerForm(space=prepared.space), prepared.evaluation.examples
        self._mistakes = MistakeFinder(prepared.space, prepared.evaluation.targets_N)
        self._leave_room, most_values = leave_room, prepared.space.num_outputs
        self._answers: SortedRows | None = SortedRows(folder, most_values=most_values, leave_room=leave_room)
        self._why_lost = ""

    def add(self, rows_M: npt.NDArray[np.int64], logits_MC: npt.NDArray[np.float32]) -> None:
        """Take a window. A folder that cannot be written costs the answers: `write` raises why."""
        self._scorer.add(rows_M, logits_MC)
        self._mistakes.add(rows_M, logits_MC)
        if self._answers is not None:
            try:
                self._answers.add(rows_M, self._form.columns(logits_MC))
            except (OutputError, DiskFullError) as error:
                self._answers.close()
                self._answers, self._why_lost = None, str(error)

    def record(self, **fields: Any) -> Evaluation:
        """The record. fields: as of `evaluation_of`."""
        rows = self._examples
        mistakes = mistakes_of(self._mistakes.result(), rows.rows, rows.row_numbers, rows.texts, rows.pairs)
        return evaluation_of(self._scorer.result(), mistakes=mistakes, **fields)

    def write(self, path: Path, part: Part) -> None:
        """Write each row's answer, in the order of the rows. Raises: DiskFullError or OutputError."""
        if self._answers is None:
            raise OutputError(self._why_lost)
        if self._answers.file_bytes:  # what memory holds has room in that for records
            self._leave_room(self._answers.file_bytes)
        file = PredictionFile(path, part.examples.rows)
        try:
            for rows, answers in self._answers.blocks():
                truth = truth_column(self._form.space, taken(part.targets_N, rows))
                file.write(part.examples.row_numbers[rows], truth, {n: answers[n] for n in answers.column_names})
            file.finish()
        finally:
            file.discard()

    def close(self) -> None:
        """Let go of the answers."""
        if self._answers is not None:
            self._answers.close()


def final_evaluation(
    scores: RowScores, prepared: Prepared, options: TrainOptions, run: Run, folder: Path, callbacks: Callbacks,
    baselines: Baselines,
) -> Evaluation:  # fmt: skip
    """Make the record of the run's evaluation, write it into the run's folder with each row's answer, and return it.

    A folder that cannot be written costs these two files, not the run; one that could not be for a time, the answers.
    """
    evaluation = prepared.evaluation
    assert evaluation is not None
    training, evaluated = losses_in(folder / "events.jsonl", callbacks)
    given = _given(prepared, options)
    record = scores.record(
        model=str(folder / "model"),
        data=options.eval_data or f"{options.eval_split:g} of {options.data}",
        command=run.command,
        labels=prepared.space,
        baselines=baselines.result(callbacks),
        findings=findings_of_learning(
            training, evaluated, picks_best=options.metric_for_best_model is not None, **given
        ),
        course=course_of(training, **given),
        rows=_row_facts(prepared),
        predictions=str(folder / PREDICTIONS),
        options={"seed": options.seed},
        recipe=run.recipe,
        machine=run.machine,
    )
    try:
        scores.write(folder / PREDICTIONS, evaluation)
    except (OutputError, DiskFullError) as error:
        said = f"the answers to its {len(evaluation.examples):,} rows are not saved: {error}"
        callbacks.warning(said)
        with suppress(OSError):  # those of an evaluation before this one
            (folder / PREDICTIONS).unlink(missing_ok=True)
        record = replace(record, predictions=None, notes=(*record.notes, said))
    try:
        atomic_files.write_bytes(folder / RECORD, to_json(record).encode())
    except (OutputError, DiskFullError) as error:
        callbacks.warning(f"the evaluation is not saved: {error}")
    return record


def learning_findings(prepared: Prepared, options: TrainOptions, folder: Path, callbacks: Callbacks) -> list[str]:
    """Findings about a training without rows to evaluate on."""
    training, evaluated = losses_in(folder / "events.jsonl", callbacks)
    picks_best = options.metric_for_best_model is not None
    return findings_of_learning(training, evaluated, picks_best=picks_best, **_given(prepared, options))


def _row_facts(prepared: Prepared) -> RowFacts:
    report = prepared.report
    return RowFacts(
        cut_share=report["truncated_share"],
        max_length=prepared.max_length,
        max_positions=prepared.facts.max_positions,
        num_trained_on=report["eval_texts_in_train"] or 0,
        num_evaluated=report["eval_rows"] or 0,
    )


def _given(prepared: Prepared, options: TrainOptions) -> dict[str, float | None]:
    """Measures that losses are held to. Steps of Adam are as long as the rate says."""
    scaled, weighted = prepared.target_scale is not None, options.class_weights is not None
    rate = prepared.learning.learning_rate if "adam" in options.optim else None
    return {"chance": chance_loss(prepared.space, scaled=scaled, weighted=weighted), "rate": rate}


def losses_in(events: Path, callbacks: Callbacks) -> tuple[Losses, Losses]:
    """Logged losses of training and of evaluations. Those that are not finite are left out.

    A log that is lost or damaged costs what would be found in it, with a warning, and nothing else.
    """
    training, evaluated = list[tuple[int, float]](), list[tuple[int, float]]()
    num_damaged = 0
    try:
        lines = events.read_bytes().splitlines()
    except OSError as error:
        callbacks.warning(f"{path_text(events)} cannot be read ({error.strerror}): nothing is said of its losses")
        return [], []
    for line in lines:
        try:
            event = json.loads(line)
            if event["kind"] == "step":
                training.append((int(event["step"]), float(event["loss"])))
            elif event["kind"] == "evaluated":
                evaluated.append((int(event["step"]), float(event["metrics"]["loss"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            num_damaged += 1
    if num_damaged:
        said = f"{num_damaged:,} of its {len(lines):,} lines cannot be read, and are left out of what is said of losses"
        callbacks.warning(f"{path_text(events)} is damaged: {said}")
    finite = [[each for each in losses if np.isfinite(each[1])] for losses in (_of_whole_lines(training), evaluated)]
    return finite[0], finite[1]


def _of_whole_lines(training: Losses) -> Losses:
    """Losses without those of the first and the last step where their lines are of fewer steps than the others."""
    steps = [0, *(step for step, _ in training)]
    counts = [step - before for before, step in itertools.pairwise(steps)]
    return [each for each, count in zip(training, counts, strict=True) if count >= max(counts) - 1]
