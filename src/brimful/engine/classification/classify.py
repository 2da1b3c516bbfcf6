"""Classifying a file of any size: rows in, the same rows with their answers out, in constant memory.

    rows ─► windows ─► request: tokens ─► runner: logits ─► request: answers ─► output

What a run was asked, what it found and how fast it went stands in the output's manifest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from brimful.core.callbacks import Callbacks
from brimful.core.classification import Classification
from brimful.core.errors import OptionError, RanksError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.place import Place, find_place
from brimful.data.readers.in_memory import Tables
from brimful.data.writers.shards import LineOutput, ShardedOutput
from brimful.data.writers.table_output import TableOutput
from brimful.engine.classification.gpu_process import GpuProcess
from brimful.engine.classification.identity import identity_of
from brimful.engine.classification.inputs import Given, look, make_request
from brimful.engine.classification.rank_windows import Begin, End, awaited, begin, leading, runner_of, take_part
from brimful.engine.classification.ready import make_ready
from brimful.engine.classification.stages import Busy
from brimful.engine.classification.window_pass import WindowPass, window_size
from brimful.engine.signals import passing_on
from brimful.hardware.asked import asked_of
from brimful.hardware.device_memory import device_memory
from brimful.hardware.meeting import coming, entered
from brimful.hardware.probe import choose_device
from brimful.hardware.ranks import Ranks, joined
from brimful.reports.memory_text import limit_text


def classify_file(
    options: ClassifyOptions,
    *,
    command: str,
    callbacks: Callbacks,
    output: LineOutput | TableOutput | None = None,
    tables: Tables | None = None,
    processes: Sequence[GpuProcess] = (),
) -> Classification:
    """Runs `options`, with the answers to `options.output`, or to `output` where that is None.

    processes: of GPUs beside the first, where the caller has begun them, and ends them.

    Where a launcher has started several processes, they share the rows, and the first writes.

    Raises: InputError for what cannot be done as asked, before weights are read where that can be known; DataError for
    a damaged file, or for more rows than --max-errors that have an error. What was written before is kept.
    """
    began, place = time.perf_counter(), find_place()
    _check_shared(options, place, output)
    with coming(place):
        device = choose_device(options.device, place.local_rank)
    with ExitStack() as stack:
        stack.enter_context(entered(place, device_memory(device, options.memory_limit, options.allocator)))
        ranks = stack.enter_context(joined(place, device, note=callbacks.warning, asked=asked_of(options, device)))
        if not ranks.leads:
            return _follow(options, ranks, stack, tables)
        records = stack.enter_context(leading(ranks))
        given = look(options, callbacks, tables)
        request = make_request(given, options, stack, callbacks)
        sample = request.submit(given.sample, Busy())()
        kept = _kept(options, given, output)
        stack.enter_context(kept)
        if kept.finished is not None:
            callbacks.note(f"{options.output} is finished: there is nothing to do")
            records.append(kept.finished)
            return kept.finished
        if kept.lost is not None:
            callbacks.warning(kept.lost)
        if kept.counts.num_tokenizer_fallback:
            request.drop_cache()
        ready = make_ready(options, given, request, sample, stack, callbacks, ranks, processes)
        if kept.counts.token_budget is not None:
            ready.runner.forward.limit_to(kept.counts.token_budget)
        use_cache, budget = not kept.counts.num_tokenizer_fallback, kept.counts.token_budget
        begin(ranks, Begin(job=ready.job, rows_done=kept.rows_done, use_cache=use_cache, token_budget=budget))
        run = WindowPass(options, given, request, ready, kept, callbacks)
        start_s = time.perf_counter() - began
        run.through()
        record = replace(run.record(command, start_s), verify_s=ready.verify_s)
        if (said := limit_text(record.peak_bytes, options.memory_limit)) is not None:
            callbacks.note(said)
        for path in kept.finish(record):
            callbacks.note(f"written: {path}")
        records.append(record)
        return record


def _check_shared(options: ClassifyOptions, place: Place, output: LineOutput | TableOutput | None) -> None:
    """Check that several processes can read the rows, and one write the answers. Raises: OptionError."""
    if place.count > 1 and options.data == "-":
        raise OptionError(f"INPUT is -, and {place.count} processes are to read it", hint="save the rows in a file")
    if place.count > 1 and isinstance(output, TableOutput):
        raise OptionError(f"{place.count} processes share the rows, and no output is named", hint="name an output")


def _follow(options: ClassifyOptions, ranks: Ranks, stack: ExitStack, tables: Tables | None) -> Classification:
    """Take part in the pass that another process leads; return its record."""
    silent = Callbacks()
    stack.enter_context(passing_on(ranks))
    given = look(options, silent, tables)
    order = awaited(ranks)
    record = order.record if isinstance(order, End) else None
    if isinstance(order, Begin):
        request = make_request(given, options, stack, silent)
        if not order.use_cache:
            request.drop_cache()
        runner, heard = runner_of(order, given.checked, given.precision.device)
        record = take_part(
            ranks,
            given.reading.windows(given.rows.chunks(order.rows_done), window_size(given, request, runner)),
            tokenise=lambda window: request.submit(window.texts, Busy()),
            compute=lambda asked: runner.submit(asked.sequences),
            mark=lambda window: window.texts.mark(),
            heard=heard,
        )
    if record is None:
        raise RanksError("the leading process has ended before all rows were classified")
    found: Classification = record
    return found


def _kept(
    options: ClassifyOptions, given: Given, output: LineOutput | TableOutput | None
) -> ShardedOutput | LineOutput | TableOutput:
    """Return the place of answers: the files that options name, else in `output`."""
    if options.output is None:
        assert output is not None
        return output
    return ShardedOutput(
        Path(options.output),
        identity=identity_of(options, given),
        resume=options.resume,
        shard_rows=options.shard_rows,
    )
