"""Classifying a file of any size: rows in, the same rows with their answers out, in constant memory.

    rows ─► windows ─► request: tokens ─► runner: logits ─► request: answers ─► output

What a run was asked, what it found and how fast it went stands in the output's manifest.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.classification import FEW_ERRORS, AnswerEquivalence, Classification, Counts, RowError
from brimful.core.cores import num_cores
from brimful.core.errors import DataError, Interrupted, MemoryFullError, OptionError, printable
from brimful.core.option_checks import flag
from brimful.core.options import ClassifyOptions
from brimful.core.records import OutOfMemory
from brimful.data.file_names import COMPRESSION
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.in_memory import Tables
from brimful.data.readers.sources import open_stream
from brimful.data.readers.stream import RowStream
from brimful.data.tokens.encoder import Tokens
from brimful.data.tokens.token_stream import TokenStream, choose_workers
from brimful.data.writers.output_path import check_output, check_replaced
from brimful.data.writers.shards import LineOutput, ShardedOutput
from brimful.data.writers.table_output import TableOutput
from brimful.engine.classification.gpu_workers import GpuWorkers, job_of, other_gpus
from brimful.engine.classification.request import (
    Asked,
    Request,
    TextRequest,
    Texts,
    make_zero_shot,
    zero_shot_encoder,
)
from brimful.engine.classification.runner import Checked, Runner, check_model
from brimful.engine.classification.stages import Busy, Stages, run_stages
from brimful.engine.classification.verify import rows_to_compare, verified_runner
from brimful.engine.classification.windows import Reading, Window, WindowSize, answered
from brimful.engine.prepare import report_columns
from brimful.engine.signals import StopSignals
from brimful.hardware.device_memory import device_memory
from brimful.hardware.probe import choose_device, num_gpus_of, probe
from brimful.hardware.specs import datasheet_flops_per_s
from brimful.levers.precision import choose_forward_precision
from brimful.measurement.memory import Kept, MemoryWatch, PhaseMemory
from brimful.models.model_stats import matmul_parameters
from brimful.reports.memory_text import limit_text
from brimful.step.precision import Precision
from brimful.step.recovery import OutOfMemoryLog, out_of_memory_text
from brimful.tasks.answers import answer_form
from brimful.tasks.zero_shot import zero_shot_form

#: Seconds of one GPU from which others help, and operations a second that it reaches, to guess them.
_LONG_S, _REACHED = 60.0, 300e12
#: How many times larger a compressed file is in memory, about.
_PACKED = 4
#: First texts, by whose lengths kernels are chosen and of which some are compared with the plain model; and the most
#: rows, and bytes of them, that are looked through for so many.
_SAMPLE_TEXTS, _SAMPLE_ROWS, _SAMPLE_BYTES = 2048, 1 << 14, 4 << 20
#: Rows that are looked at at a time.
_STEP = 256
#: Options that do not change an answer.
_NOT_OF_AN_ANSWER = frozenset(
    {"data", "output", "overwrite", "resume", "max_errors", "shard_rows", "report", "json", "num_workers", "num_gpus"}
    | {"allocator"}
)


def classify_file(
    options: ClassifyOptions,
    *,
    command: str,
    callbacks: Callbacks,
    output: LineOutput | TableOutput | None = None,
    tables: Tables | None = None,
) -> Classification:
    """Runs `options`, with the answers to `options.output`, or to `output` where that is None.

    Raises: InputError for what cannot be done as asked, before weights are read where that can be known; DataError for
    a damaged file, or for more rows than --max-errors that have an error. What was written before is kept.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        device = choose_device(options.device)
        stack.enter_context(device_memory(device, options.memory_limit, options.allocator))
        given = _look(options, callbacks, tables)
        request = _request(given, options, stack, callbacks)
        sample = request.submit(given.sample, Busy())()
        kept = _kept(options, given, output)
        stack.enter_context(kept)
        if kept.finished is not None:
            callbacks.note(f"{options.output} is finished: there is nothing to do")
            return kept.finished
        if kept.lost is not None:
            callbacks.warning(kept.lost)
        if kept.counts.num_tokenizer_fallback:
            request.drop_cache()
        callbacks.stage("loading the model, and checking that it runs packed")
        log = OutOfMemoryLog(warn=callbacks.warning)
        mean_tokens = float(sample.num_tokens_N.mean()) if len(sample.num_tokens_N) else 0.0
        num_tokens = int(_expected_rows(given) * mean_tokens)
        num_compared = rows_to_compare(options.verify, given.precision.device.type, num_tokens, mean_tokens)
        checked = verified_runner(
            *(given.checked, options, given.precision, request, given.sample),
            asked=sample,
            num_compared=num_compared,
            num_tokens=num_tokens,
            callbacks=callbacks,
            hear=log,
        )
        runner, equivalence = checked.runner, checked.equivalence
        if kept.counts.token_budget is not None:
            runner.forward.limit_to(kept.counts.token_budget)
        callbacks.recipe(runner.recipe)
        gpu_workers = stack.enter_context(_gpu_workers(options, runner, sample.sequences, num_tokens, callbacks, log))
        run = _Pass(options, given, request, runner, gpu_workers, kept, callbacks, log.found)
        start_s = time.perf_counter() - began
        run.through()
        record = replace(run.record(command, equivalence, checked.fallback, start_s), verify_s=checked.seconds)
        if (said := limit_text(record.peak_bytes, options.memory_limit)) is not None:
            callbacks.note(said)
        for path in kept.finish(record):
            callbacks.note(f"written: {path}")
        return record


def _kept(
    options: ClassifyOptions, given: _Given, output: LineOutput | TableOutput | None
) -> ShardedOutput | LineOutput | TableOutput:
    """Return the place of answers: the files that options name, else in `output`."""
    if options.output is None:
        assert output is not None
        return output
    return ShardedOutput(
        Path(options.output),
        identity=_identity(options, given),
        resume=options.resume,
        shard_rows=options.shard_rows,
    )


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Checked inputs of a run; no weights are loaded yet.

    sample: texts of the first rows. row_bytes: bytes of such a row in memory.
    """

    precision: Precision
    checked: Checked
    rows: RowStream
    reading: Reading
    sample: Texts
    row_bytes: float
    limit: int | None


def _look(options: ClassifyOptions, callbacks: Callbacks, tables: Tables | None) -> _Given:
    if options.output is not None:
        check_output(Path(options.output), options.data)
        replaced = check_replaced(Path(options.output), overwrite=options.overwrite, resume=options.resume)
        if replaced is not None:
            callbacks.note(replaced)
    precision = choose_forward_precision(options.precision, choose_device(options.device))
    _check_num_gpus(options, precision)
    checked = check_model(options)
    callbacks.stage(f"reading {options.data}")
    stdin = sys.stdin.buffer if options.data == "-" else None
    rows = open_stream(options.data, stdin, FileFormat.of(options), options.limit, tables)
    for warning in rows.warnings:
        callbacks.warning(warning)
    for note in rows.notes:
        callbacks.note(note)
    if options.output is not None:
        check_output(Path(options.output), options.data, map(Path, rows.files))
    reading = Reading.of(rows.sample, options, checked.facts.inputs)
    report_columns(reading.columns, callbacks)
    if reading.doubt is not None:
        callbacks.warning(reading.doubt)
    sample, row_bytes = _first_texts(rows, reading, max(_SAMPLE_TEXTS, options.verify or 0))
    return _Given(
        precision=precision,
        checked=checked,
        rows=rows,
        reading=reading,
        sample=sample,
        row_bytes=row_bytes,
        limit=options.limit,
    )


def _first_texts(rows: RowStream, reading: Reading, wanted: int) -> tuple[Texts, float]:
    """Texts of an input's first rows, up to the one with the `wanted`th text, and bytes of such a row in memory."""
    tables, found, num_rows, num_bytes = list[pa.Table](), 0, 0, 0
    steps = (table.slice(row, _STEP) for table in rows.beginning() for row in range(0, table.num_rows, _STEP))
    for table in steps:
        places = np.flatnonzero(reading.texts(table).asked_N())[: wanted - found]
        is_last = found + len(places) >= wanted
        tables.append(reading.only(table.slice(0, places[-1] + 1) if is_last else table))
        found, num_rows, num_bytes = found + len(places), num_rows + table.num_rows, num_bytes + table.nbytes
        if is_last or num_rows >= _SAMPLE_ROWS or num_bytes >= _SAMPLE_BYTES:
            break
    first = pa.concat_tables(tables)
    first = first.take(np.arange(first.num_rows))  # a copy: all else that was read is let go
    del tables, steps
    pa.default_memory_pool().release_unused()
    return reading.texts(first), max(1.0, num_bytes / max(1, num_rows))


def _request(given: _Given, options: ClassifyOptions, stack: ExitStack, callbacks: Callbacks) -> Request:
    """Request of a run. stack: closes the tokenisers."""
    checked, num_workers = given.checked, options.num_workers
    if num_workers is None:
        num_rows, row_bytes = _expected_rows(given), given.sample.num_bytes / max(1, len(given.sample))
        text_bytes = num_rows * row_bytes if num_rows else None
        num_workers = choose_workers(text_bytes, given.precision.device.type, num_cores() or 1)
    settings: dict[str, Any] = {
        "top_k": options.top_k, "threshold": options.threshold, "logits": options.logits,
    }  # fmt: skip
    if options.labels is None:
        tokens = stack.enter_context(TokenStream(checked.encoder, num_workers=num_workers, warn=callbacks.warning))
        return TextRequest(answer_form(checked.facts.config, **settings), tokens)
    settings |= {"multi_label": options.multi_label, "template": options.hypothesis_template}
    zero_shot, encoder = zero_shot_form(checked.facts.config, **settings), zero_shot_encoder(checked)
    bare = encoder.without_special_tokens()
    tokens = stack.enter_context(TokenStream(bare, num_workers=num_workers, warn=callbacks.warning))
    return make_zero_shot(zero_shot, encoder, tokens, options.labels, given.sample, callbacks)


def _expected_rows(given: _Given) -> float:
    """Rows of the whole input, about; 0 where nothing is known of its length."""
    rows = given.rows
    if rows.num_rows is not None:
        return rows.num_rows
    sizes = {Path(file): Path(file).stat().st_size for file in rows.files if Path(file).is_file()}
    size_bytes = sum(size * (_PACKED if file.suffix in COMPRESSION else 1) for file, size in sizes.items())
    expected = size_bytes / given.row_bytes
    return expected if given.limit is None else min(given.limit, expected or given.limit)


def _check_num_gpus(options: ClassifyOptions, precision: Precision) -> None:
    there = num_gpus_of(precision.device)
    if options.num_gpus is None or options.num_gpus <= there:
        return
    if precision.device.type == "cpu":
        why = "--device is cpu" if options.device == "cpu" else "there is no GPU to run on"
        raise OptionError(f"--num-gpus is {options.num_gpus}, and {why}", hint="leave it out")
    raise OptionError(
        f"--num-gpus is {options.num_gpus}, and there {'is 1 GPU' if there == 1 else f'are {there} GPUs'} to run on",
        hint=f"use at most {there}",
    )


def _gpu_workers(
    options: ClassifyOptions, runner: Runner, sample: Tokens, num_tokens: int, callbacks: Callbacks, log: OutOfMemoryLog
) -> GpuWorkers:
    """As many GPUs as were asked for, else all where one would take long enough for the others to start."""
    seconds = 2.0 * matmul_parameters(runner.model) * num_tokens / _REACHED
    num_gpus = options.num_gpus or (num_gpus_of(runner.precision.device) if seconds > _LONG_S else 1)
    if num_gpus > 1:
        callbacks.note(f"{num_gpus} GPUs, a process each")
    return GpuWorkers(runner, job_of(runner, options, sample, num_tokens), other_gpus(num_gpus), log)


def _identity(options: ClassifyOptions, given: _Given) -> dict[str, Any]:
    """Everything the answers depend on, by displayed name."""
    precision = given.precision
    on_gpu = precision.device.type == "cuda"
    machine = probe()
    chosen = {
        flag(name): value for name, value in vars(options).items() if name not in {*_NOT_OF_AN_ANSWER, "precision"}
    }
    return {
        "the input": given.rows.fingerprint,
        "the model's files": _fingerprint(given.checked),
        **chosen,
        "--precision": precision.value,
        "the device": machine.gpus[0].name if on_gpu and machine.gpus else f"CPU, {torch.get_num_threads()} threads",
        "versions": dict(machine.versions),
    }


def _fingerprint(checked: Checked) -> str:
    """Of names, sizes and times of change of the weights, and of all that the small files beside them hold."""
    digest = hashlib.sha256()
    weights = set(checked.facts.weight_files)
    adapter = checked.facts.adapter
    folders = {checked.facts.folder} if adapter is None else {checked.facts.folder, adapter.folder}
    beside = {path for folder in folders for path in folder.iterdir() if path.is_file()}
    for path in sorted(beside if adapter is None else beside | weights):
        facts = path.stat()
        digest.update(f"{path.name}\0{facts.st_size}\0".encode(errors="surrogateescape"))
        digest.update(
            str(facts.st_mtime_ns).encode() if path in weights or facts.st_size > 1 << 24 else path.read_bytes()
        )
    return digest.hexdigest()


class _Stopped(Exception):  # noqa: N818  (it is not an error)
    """A window left undone, as a signal to stop has come."""


class _Pass:
    """One pass of all windows through all stages, and its counts."""

    def __init__(
        self, options: ClassifyOptions, given: _Given, request: Request, runner: Runner, gpu_workers: GpuWorkers,
        output: ShardedOutput | LineOutput | TableOutput, callbacks: Callbacks, out_of_memory: list[OutOfMemory],
    ) -> None:  # fmt: skip
        self._options, self._request, self._given, self._rows = options, request, given, given.rows
        self._runner, self._gpu_workers, self._output, self._callbacks = runner, gpu_workers, output, callbacks
        self._out_of_memory = out_of_memory
        self._stages, self._counts, self._operations, self._wall_s = Stages(), Counts(), 0.0, 0.0
        device, model = runner.precision.device, runner.model
        kept = PhaseMemory(lambda: Kept.of(device, [*model.parameters(), *model.buffers()]))
        self._memory = MemoryWatch(device, kept, limit=options.memory_limit)
        self._done = output.rows_done
        self._earlier = output.counts if isinstance(output, ShardedOutput) else Counts()

    def through(self) -> None:
        """Every window. Raises Interrupted when told to stop, once what was under way is written."""
        most = self._options.max_errors
        if most is not None and self._earlier.num_errors > most:
            raise DataError(
                f"{self._earlier.num_errors:,} rows of the run to resume have an error,"
                f" more than --max-errors {most:,}",
                hint="raise --max-errors, or mend the rows and begin anew",
            )
        if self._done:
            self._callbacks.note(f"going on after {self._done:,} rows")
        self._callbacks.stage("classifying")
        began = time.perf_counter()
        request, gpu_workers = self._request, self._gpu_workers
        given, per_row = self._given, request.sequences_per_row
        size = WindowSize.on(
            given.precision.device.type,
            sequences_per_row=per_row,
            row_bytes=given.row_bytes,
            token_operations=2.0 * matmul_parameters(self._runner.model),
        )
        chunks = self._rows.chunks(self._done)
        with self._stop_signals() as stop, suppress(_Stopped), self._keeping():
            run_stages(
                given.reading.windows(chunks, size, as_they_come=self._options.data == "-"),
                tokenise=lambda window: request.submit(window.texts, self._stages.tokenise),
                compute=lambda asked: gpu_workers.submit(asked.sequences),
                write=self._write,
                stages=self._stages,
                stop=lambda: stop.received is not None,
                devices=lambda: gpu_workers.num_ready,
                most_devices=len(gpu_workers),
            )
        self._wall_s = time.perf_counter() - began
        if stop.received is not None:
            for note in self._rows.notes:
                self._callbacks.note(note)
            hint = "the same command with --resume goes on" if self._options.output else "start it again"
            done = self._done + self._counts.num_rows
            raise Interrupted(f"stopped after {done:,} rows", signal_number=stop.received, hint=hint)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Within, memory that runs out for good costs no answer that was written."""
        try:
            yield
        except MemoryFullError as error:
            if self._options.output is None or self._options.data == "-":
                raise
            done = self._done + self._counts.num_rows
            hint = f"{error.hint}; --resume goes on after them"
            raise MemoryFullError(f"{error}; the answers of {done:,} rows are kept", hint=hint) from error

    def _stop_signals(self) -> StopSignals:
        """Signals to stop, answered at once; on a CPU the window that is computed is left undone."""
        stop = StopSignals(lambda: self._callbacks.stage("stopping: what is answered is written"))

        def leave() -> None:
            if stop.received is not None:
                raise _Stopped

        if self._runner.precision.device.type == "cpu":
            self._runner.forward.after_pass = leave
        return stop

    def _write(self, window: Window, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> None:
        table, counts = answered(window, self._request, asked, logits_PC)
        if counts.num_errors:
            counts = replace(counts, first_errors=self._first_errors(table))
        budgets = [found.tokens_after for found in self._out_of_memory if found.where != "check"]
        counts = replace(counts, token_budget=min(budgets, default=None))
        self._output.write(table, counts)
        self._counts += counts
        self._operations += self._runner.operations(asked.sequences.lengths)
        self._memory.look_beside()
        done = self._done + self._counts.num_rows
        self._callbacks.count(done, self._rows.num_rows, self._rows.progress(done))
        most, found = self._options.max_errors, self._earlier.num_errors + self._counts.num_errors
        if most is not None and found > most:
            one = counts.first_errors[0]
            raise DataError(
                f"{found:,} rows have an error, more than --max-errors {most:,}; one of them: {one.error}",
                file=one.file,
                row=one.row,
                hint="mend the rows and begin anew, or go on with --resume and a higher --max-errors"
                if self._options.output is not None and self._options.data != "-"
                else "mend the rows, or raise --max-errors",
            )

    def _first_errors(self, table: pa.Table) -> tuple[RowError, ...]:
        """Of the rows that come next."""
        errors = table.column(table.num_columns - 1)
        rows = np.flatnonzero(errors.is_valid().to_numpy())[:FEW_ERRORS]
        places = [self._rows.place(self._done + self._counts.num_rows + int(row)) for row in rows]
        texts = [printable(error, 200) for error in errors.take(rows).to_pylist()]
        return tuple(RowError(file=file, row=row, error=text) for (file, row), text in zip(places, texts, strict=True))

    def _notes(self) -> tuple[str, ...]:
        """Guesses, likely mistakes, and what was decided about files."""
        guessed = (self._request.form.guess, self._given.reading.doubt)
        return tuple(filter(None, (*guessed, *self._rows.warnings, *self._rows.notes)))

    def record(
        self, command: str, equivalence: AnswerEquivalence | None, fallback: str | None, start_s: float
    ) -> Classification:
        """Make the record of the pass."""
        options, recipe, counts = self._options, self._runner.recipe, self._counts
        everything = self._earlier + counts
        peak = datasheet_flops_per_s(recipe.device, self._runner.precision.value)
        wall_s = max(self._wall_s, 1e-9)
        slower, num_rows = [fallback] if fallback else [], everything.num_tokenizer_fallback
        slower += map(out_of_memory_text, self._out_of_memory)
        if num_rows:
            slower.append(f"`tokenizers` made all ids of {num_rows:,} rows: words looked up had given others")
        return Classification(
            model=options.model,
            data=options.data,
            output=options.output,
            command=command,
            options={k: v for k, v in vars(options).items() if k not in ("model", "data", "output")},
            labels=self._request.labels(everything),
            recipe=recipe,
            machine=probe(),
            counts=everything,
            equivalence=equivalence,
            fallback="; ".join(slower) or None,
            out_of_memory=tuple(self._out_of_memory),
            max_length=self._given.checked.max_length,
            max_length_reason=self._given.checked.longest.reason,
            notes=self._notes(),
            start_s=start_s,
            wall_s=self._wall_s,
            texts_per_s=counts.num_rows / wall_s,
            tokens_per_s=counts.num_tokens / wall_s,
            mfu=self._operations / wall_s / (peak * max(1, self._gpu_workers.num_used))
            if peak and self._operations
            else None,
            stages=self._stages.record(),
            limit=self._stages.limit(),
            peak_bytes=self._memory.peak(),
            resumed_rows=self._done,
        )
