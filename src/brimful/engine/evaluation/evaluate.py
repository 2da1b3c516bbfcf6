"""Evaluate a model on labelled rows: one pass of the rows through the stages of a classification.

rows ─► texts and targets ─► request: tokens ─► runner: logits ─► scorer, file of answers
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brimful.core.callbacks import Callbacks
from brimful.core.cores import num_cores
from brimful.core.errors import DataError, Interrupted, ModelError, RanksError, printable
from brimful.core.evaluation import Baseline, Evaluation, Mistake
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.place import find_place
from brimful.core.units import part_text
from brimful.data.labels.columns import Columns, check_exists, find_columns
from brimful.data.readers.fields import rows_with_fields
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.in_memory import Tables
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import read_rows
from brimful.data.tokens.token_stream import TokenStream, choose_workers
from brimful.data.writers.output_path import check_output
from brimful.engine.classification.gpu_process import GpuProcess
from brimful.engine.classification.gpu_workers import GpuWorkers, Job, check_gpus_there, job_of
from brimful.engine.classification.rank_windows import (
    Begin,
    End,
    SharedStages,
    awaited,
    begin,
    leading,
    runner_of,
    take_part,
)
from brimful.engine.classification.ready import begun_processes, gpu_workers
from brimful.engine.classification.request import Asked, TextRequest, Texts
from brimful.engine.classification.runner import Checked, Runner, check_model
from brimful.engine.classification.stages import Busy, Stages, run_stages
from brimful.engine.classification.stopping import check_why, stopping
from brimful.engine.classification.verify import Verified, rows_to_compare, verified_runner
from brimful.engine.classification.windows import Reading, WindowSize
from brimful.engine.evaluation.truth import Truth, read_truth
from brimful.engine.read_examples import report_columns
from brimful.engine.scoring import PredictionFile, evaluation_of, mistakes_of, prediction_form, truth_column
from brimful.engine.sequence_lengths import Longest
from brimful.engine.signals import passing_on
from brimful.hardware.asked import asked_of
from brimful.hardware.device_memory import device_memory
from brimful.hardware.meeting import coming, entered
from brimful.hardware.probe import choose_device, probe
from brimful.hardware.ranks import Ranks, joined
from brimful.levers.precision import choose_forward_precision
from brimful.step.precision import Precision
from brimful.step.recovery import OutOfMemoryLog, out_of_memory_text
from brimful.tasks.answers import answer_form
from brimful.tasks.label_rows import taken
from brimful.tasks.scoring.baselines import constant_baseline
from brimful.tasks.scoring.choose import make_scorer
from brimful.tasks.scoring.mistakes import MistakeFinder
from brimful.tasks.scoring.scorers import Scored

#: First texts, by whose lengths kernels are chosen.
_SAMPLE = 2048
#: Options that `classify` has too.
_SHARED = (
    *("text_column", "pair_column", "header", "column_names", "delimiter", "encoding", "sheet", "max_length"),
    *("threshold", "precision", "device", "verify", "packing", "token_budget", "execution", "num_workers"),
    *("trust_remote_code", "allow_pickle", "gpus", "stream_weights", "stream_folder", "memory_limit", "allocator"),
)

#: The columns that `classify` adds to rows without a label, in their order.
_ADDED = re.compile("(label,)?score,(scores,)?(logits,)?num_tokens,truncated,error")


def evaluate_model(
    options: EvaluateOptions, *, command: str, callbacks: Callbacks, tables: Tables | None = None,
    processes: Sequence[GpuProcess] = (),
) -> Evaluation:  # fmt: skip
    """Runs the model on the labelled rows of `options.data`. processes: as of `begun_processes`.

    Raises: InputError for what cannot be done as asked, before weights are read, and for a model without a finite
    answer; Interrupted after a signal.
    """
    assert options.data is not None
    began = time.perf_counter()
    shared = {name: getattr(options, name) for name in _SHARED}
    asked, place = ClassifyOptions(model=options.model, data=options.data, **shared), find_place()
    with coming(place):
        device = choose_device(options.device, place.local_rank)
        check_gpus_there(options, device)
        precision = choose_forward_precision(options.precision, device)
    with ExitStack() as stack:
        stack.enter_context(entered(place, device_memory(device, options.memory_limit, options.allocator)))
        ranks = stack.enter_context(joined(place, device, note=callbacks.warning, asked=asked_of(options, device)))
        if not ranks.leads:
            return _follow(options, asked, precision, ranks, stack, tables)
        records = stack.enter_context(leading(ranks))
        checked = check_model(asked)
        given = _read(options, asked, checked, callbacks, tables)
        request = _request(options, checked, given, precision, stack, callbacks)
        log, begun = OutOfMemoryLog(warn=callbacks.warning), begun_processes(options.gpus, device, stack, processes)
        verified, job = _loaded(checked, asked, precision, request, given.texts, callbacks, log)
        runner, fallback = verified.runner, verified.fallback
        callbacks.recipe(runner.recipe)
        workers = stack.enter_context(gpu_workers(runner, job, begun, callbacks, log))
        begin(ranks, Begin(job=job))
        if ranks.count > 1:
            callbacks.note(f"{ranks.count} processes share the rows")
        run = _Pass(options, given, request, runner, workers, ranks, log, callbacks, checked.longest)
        stack.callback(run.discard)
        callbacks.stage("evaluating")
        run.through()
        scored = run.scorer.result()
        _check_answers(options, scored, callbacks)
        run.finish()
        notes = (*given.notes, *([fallback] if fallback else []), *map(out_of_memory_text, log.found), *run.notes())
        record = evaluation_of(
            scored,
            model=options.model,
            data=options.data,
            command=command,
            labels=given.truth.space,
            left_out=given.truth.left_out,
            baselines=(_constant(given.truth),),
            notes=notes,
            predictions=options.output,
            mistakes=run.mistakes(),
            options={k: v for k, v in vars(options).items() if k not in ("model", "data")},
            recipe=runner.recipe,
            machine=probe(),
            wall_s=time.perf_counter() - began,
        )
        records.append(record)
        return record


def _loaded(
    checked: Checked, asked: ClassifyOptions, precision: Precision, request: TextRequest, texts: Texts,
    callbacks: Callbacks, log: OutOfMemoryLog,
) -> tuple[Verified, Job]:  # fmt: skip
    """The model, compared with the plain one on the first texts, and what other processes need to load it as well."""
    sample = texts.slice(0, max(_SAMPLE, asked.verify or 0))
    first = request.submit(sample, Busy())()
    num_tokens = (mean_tokens := float(first.num_tokens_N.mean())) * len(texts)
    num_compared = rows_to_compare(asked.verify, precision.device.type, num_tokens, mean_tokens)
    callbacks.stage("loading the model")
    verified = verified_runner(
        *(checked, asked, precision, request, sample),
        asked=first,
        num_compared=num_compared,
        num_tokens=int(num_tokens),
        callbacks=callbacks,
        hear=log,
    )
    return verified, job_of(verified.runner, asked, first.sequences, int(num_tokens))


def _check_answers(options: EvaluateOptions, scored: Scored, callbacks: Callbacks) -> None:
    """Warn of rows that count nowhere, since an output of theirs is not finite. Raises: ModelError where all are so."""
    count = scored.num_unanswered
    if count and not scored.num_rows:
        raise ModelError(
            f"{printable(options.model)}: its outputs are not finite for any of {count:,} rows",
            hint="its weights may not be finite; where products are in half precision, try --precision fp32",
        )
    if count:
        rows = f"{count:,} rows are" if count > 1 else "1 row is"
        callbacks.warning(f"{rows} left out: the model's outputs are not finite there")


def _request(
    options: EvaluateOptions, checked: Checked, given: _Given, precision: Precision, stack: ExitStack,
    callbacks: Callbacks,
) -> TextRequest:  # fmt: skip
    num_workers = options.num_workers
    if num_workers is None:
        num_workers = choose_workers(given.texts.num_bytes, precision.device.type, num_cores() or 1)
    tokens = stack.enter_context(TokenStream(checked.encoder, num_workers=num_workers, warn=callbacks.warning))
    return TextRequest(answer_form(checked.facts.config, threshold=options.threshold), tokens)


def _follow(
    options: EvaluateOptions, asked: ClassifyOptions, precision: Precision, ranks: Ranks, stack: ExitStack,
    tables: Tables | None,
) -> Evaluation:  # fmt: skip
    """Take part in the evaluation that another process leads; return its record."""
    silent = Callbacks()
    stack.enter_context(passing_on(ranks))
    checked = check_model(asked)
    given = _read(options, asked, checked, silent, tables)
    order = awaited(ranks)
    record = order.record if isinstance(order, End) else None
    if isinstance(order, Begin):
        request = _request(options, checked, given, precision, stack, silent)
        runner, heard = runner_of(order, checked, precision.device)
        record = take_part(
            ranks,
            _windows(given, runner),
            tokenise=lambda part: request.submit(part, Busy()),
            compute=lambda found: runner.submit(found.sequences),
            mark=lambda part: part.mark(),
            heard=heard,
        )
    if record is None:
        raise RanksError("the leading process has ended before all rows were evaluated")
    found: Evaluation = record
    return found


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Rows that are evaluated. texts: of the rows of `truth`, in their order."""

    rows: Rows
    texts: Texts
    truth: Truth
    notes: tuple[str, ...]


def _read(
    options: EvaluateOptions, asked: ClassifyOptions, checked: Checked, callbacks: Callbacks, tables: Tables | None
) -> _Given:
    assert options.data is not None
    if options.output is not None:
        prediction_form(Path(options.output))
        check_output(Path(options.output), options.data)
    callbacks.stage(f"reading {options.data}")
    rows = read_rows(options.data, FileFormat.of(options), tables)
    if options.output is not None:
        check_output(Path(options.output), options.data, map(Path, rows.files))
    for note in rows.notes:
        callbacks.note(note)
    for warning in rows.warnings:
        callbacks.warning(warning)
    inputs = checked.facts.inputs
    trained = () if inputs is None else inputs.label_columns
    rows = rows_with_fields(rows, options.label_column, *trained)
    reading = Reading.of(rows, asked, inputs)
    labels, reason = label_columns(rows, options.label_column, trained, reading.columns)
    reasons = {**reading.columns.reasons, "label": reason}
    columns = Columns(text=reading.columns.text, pair=reading.columns.pair, labels=labels, reasons=reasons)
    report_columns(columns, callbacks)
    if reading.doubt is not None:
        callbacks.warning(reading.doubt)
    texts = reading.texts(rows.table)
    truth = read_truth(rows, labels, checked.space, options, texts.asked_N()).drawn(options.limit, options.seed)
    for note in truth.notes:
        callbacks.note(note)
    for doubt in truth.doubts:
        callbacks.warning(doubt)
    for reason, count in truth.left_out.items():
        callbacks.warning(f"{count:,} row{'s are' if count > 1 else ' is'} left out: {reason}")
    said = filter(None, (reading.doubt, *rows.warnings, *truth.doubts, *rows.notes, *truth.notes))
    return _Given(rows=rows, texts=texts.take(truth.rows), truth=truth, notes=tuple(said))


def label_columns(
    rows: Rows, asked: str | None, trained: tuple[str, ...], read: Columns
) -> tuple[tuple[str, ...], str]:
    """The columns with the true labels and the reason: those that are named, else those of training, else by name."""
    names = rows.table.column_names
    if asked is None and trained and all(name in names for name in trained):
        _check_not_answers(rows, trained)
        return trained, "as in training"
    try:
        found = find_columns(rows, text=read.text, pair=read.pair, label=asked)
    except DataError as error:
        if asked is not None or "label" not in str(error):
            raise
        raise DataError(
            f"no column with the true labels was found ({printable(error.message, 200)})",
            file=rows.name,
            hint=f"name it by --label-column; columns: {', '.join(printable(name, 40) for name in names[:20])}",
        ) from error
    for name in found.labels:
        check_exists(rows, name, "--label-column")
    if asked is None:
        _check_not_answers(rows, found.labels)
    return found.labels, found.reasons["label"] if asked is None else "given"


def _check_not_answers(rows: Rows, labels: tuple[str, ...]) -> None:
    """Raises: DataError for a column that `classify` added, found as the true labels: a model agrees with itself."""
    names = rows.table.column_names
    for name in labels:
        if _ADDED.match(",".join(names[names.index(name) :])):
            raise DataError(
                f"column '{name}' holds the answers of a model, which `classify` added: no true labels",
                file=rows.name,
                hint=f"name the true labels by --label-column (or {name}, to compare with these answers)",
            )


def _windows(given: _Given, runner: Runner) -> Iterator[Texts]:
    """The texts in windows, the same in every process."""
    operations = runner.token_operations
    return WindowSize.on(runner.precision.device.type, sequences_per_row=1, token_operations=operations).cut(
        given.texts
    )


class _Pass:
    """All windows through all stages, into the scorer and the file of answers."""

    def __init__(
        self, options: EvaluateOptions, given: _Given, request: TextRequest, runner: Runner, workers: GpuWorkers,
        ranks: Ranks, log: OutOfMemoryLog, callbacks: Callbacks, longest: Longest,
    ) -> None:  # fmt: skip
        self._options, self._given, self._request, self._runner = options, given, request, runner
        self._workers, self._ranks, self._log, self._callbacks = workers, ranks, log, callbacks
        self._longest = longest
        truth = given.truth
        named = {"seed": options.seed, "resamples": options.resamples, "threshold": options.threshold}
        self.scorer = make_scorer(truth.space, truth.targets_N, **named)  # type: ignore[arg-type]
        self.finder = MistakeFinder(truth.space, truth.targets_N)
        self._file = None if options.output is None else PredictionFile(Path(options.output), given.rows)
        self._done = self._num_truncated = 0

    def through(self) -> None:
        """Every window. Raises: Interrupted when told to stop."""
        stages, request, others = Stages(), self._request, self._ranks.count - 1
        shared = SharedStages(
            self._ranks,
            tokenise=lambda part: request.submit(part, stages.tokenise),
            compute=lambda asked: self._workers.submit(asked.sequences),
            write=self._write,
            hear=self._log,
            mark=lambda part: part.mark(),
        )
        with stopping(self._runner, self._ranks, lambda: self._callbacks.stage("stopping")) as stop, shared.pieces():
            run_stages(
                _windows(self._given, self._runner),
                tokenise=shared.tokenise,
                compute=shared.compute,
                write=shared.write,
                stages=stages,
                stop=lambda: stop.received is not None,
                devices=lambda: self._workers.num_ready + others,
                most_devices=len(self._workers) + others,
            )
        if stop.received is not None:
            check_why(self._ranks)
            raise Interrupted(
                f"stopped after {self._done:,} of {len(self._given.texts):,} rows",
                signal_number=stop.received,
                hint="start it again",
            )

    def _write(self, part: Texts, asked: Asked, logits_SC: npt.NDArray[np.float32]) -> None:
        truth, places_S = self._given.truth, np.arange(self._done, self._done + len(part))
        shown_SC = logits_SC if truth.outputs is None else logits_SC[:, truth.outputs]
        self.scorer.add(places_S, shown_SC)
        self.finder.add(places_S, shown_SC)
        if self._file is not None:
            answers = self._request.form.columns(logits_SC)
            self._file.write(truth.rows[places_S], truth_column(truth.space, taken(truth.targets_N, places_S)), answers)
        self._done += len(part)
        self._num_truncated += int(asked.truncated_N.sum())
        self._callbacks.count(self._done, len(self._given.texts))

    def mistakes(self) -> tuple[Mistake, ...]:
        """The most confident ones."""
        given = self._given
        return mistakes_of(self.finder.result(), given.rows, given.truth.rows, given.texts.texts, given.texts.pairs)

    def notes(self) -> list[str]:
        """Rows that were cut."""
        if not self._num_truncated:
            return []
        count, of, were = self._num_truncated, self._done, "was" if self._num_truncated == 1 else "were"
        than = f"{self._longest.tokens:,} tokens ({self._longest.reason})"
        return [f"{part_text(count, of)} of {of:,} rows {were} longer than {than}, and {were} cut (--max-length)"]

    def finish(self) -> None:
        """Say how many rows were cut, a note where the length was asked for, and give the file of answers its name."""
        for said in self.notes():
            (self._callbacks.note if self._longest.asked else self._callbacks.warning)(said)
        if self._file is not None:
            self._file.finish()
            self._callbacks.note(f"written: {self._options.output}")

    def discard(self) -> None:
        """Remove an unfinished file of answers."""
        if self._file is not None:
            self._file.discard()


def _constant(truth: Truth) -> Baseline:
    """The most frequent label of these very rows: the training rows are not known here."""
    return constant_baseline(truth.space, truth.targets_N, truth.targets_N)
