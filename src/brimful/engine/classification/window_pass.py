"""One pass of windows through all stages: reading, tokenising, computing, writing; and its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core.callbacks import Callbacks
from brimful.core.classification import FEW_ERRORS, Classification, Counts, RowError
from brimful.core.errors import DataError, Interrupted, MemoryFullError, printable
from brimful.core.options.classify import ClassifyOptions
from brimful.data.writers.shards import LineOutput, ShardedOutput
from brimful.data.writers.table_output import TableOutput
from brimful.engine.classification.inputs import Given
from brimful.engine.classification.rank_windows import SharedStages
from brimful.engine.classification.ready import Ready
from brimful.engine.classification.request import Asked, Request
from brimful.engine.classification.runner import Runner
from brimful.engine.classification.stages import Stages, run_stages
from brimful.engine.classification.stopping import check_why, stopping
from brimful.engine.classification.windows import Window, WindowSize, answered
from brimful.hardware.probe import probe
from brimful.hardware.specs import datasheet_flops_per_s
from brimful.measurement.memory import Kept, MemoryWatch, PhaseMemory
from brimful.step.recovery import out_of_memory_text


def window_size(given: Given, request: Request, runner: Runner) -> WindowSize:
    """The size of a pass's windows, by its first rows and its model."""
    return WindowSize.on(
        given.precision.device.type,
        sequences_per_row=request.sequences_per_row,
        row_bytes=given.row_bytes,
        token_operations=runner.token_operations,
    )


class WorkLost(Exception):  # noqa: N818  (it is not an error)
    """A pass left undone, as another process does its work."""


class WindowPass:
    """One pass of all windows through all stages, and its counts. lost: whether its answers are of no use any more."""

    def __init__(
        self, options: ClassifyOptions, given: Given, request: Request, ready: Ready,
        output: ShardedOutput | LineOutput | TableOutput, callbacks: Callbacks,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._options, self._request, self._given, self._rows = options, request, given, given.rows
        self._ready, self._runner, self._gpu_workers = ready, ready.runner, ready.gpu_workers
        self._output, self._callbacks, self._lost = output, callbacks, lost
        self._out_of_memory, runner = ready.log.found, ready.runner
        self._stages, self._counts, self._operations, self._wall_s = Stages(), Counts(), 0.0, 0.0
        self._began = time.perf_counter()
        device, model = runner.precision.device, runner.model
        kept = PhaseMemory(lambda: Kept.of(device, [*model.parameters(), *model.buffers()]))
        self._memory = MemoryWatch(device, kept, limit=options.memory_limit)
        self._done = output.rows_done
        self._earlier = output.counts if isinstance(output, ShardedOutput) else Counts()

    def through(self, stage: str = "classifying") -> None:
        """Every window. Raises Interrupted when told to stop, once what was under way is written; WorkLost."""
        most = self._options.max_errors
        if most is not None and self._earlier.num_errors > most:
            raise DataError(
                f"{self._earlier.num_errors:,} rows of the run to resume have an error,"
                f" more than --max-errors {most:,}",
                hint="raise --max-errors, or mend the rows and begin anew",
            )
        if self._done:
            self._callbacks.note(f"going on after {self._done:,} rows")
        self._callbacks.stage(stage)
        self._began = time.perf_counter()
        self._gpu_workers.begin_pass()
        request, gpu_workers = self._request, self._gpu_workers
        given = self._given
        size = window_size(given, request, self._runner)
        ranks = self._ready.ranks
        shared = SharedStages(
            ranks,
            tokenise=lambda window: request.submit(window.texts, self._stages.tokenise),
            compute=lambda asked: gpu_workers.submit(asked.sequences),
            write=self._write,
            hear=self._ready.log,
            mark=lambda window: window.texts.mark(),
        )
        chunks = self._rows.chunks(self._done)
        with stopping(self._runner, ranks, self._tell_of_stop, self._lost) as stop, self._keeping(), shared.pieces():
            run_stages(
                given.reading.windows(chunks, size, as_they_come=self._options.data == "-"),
                tokenise=shared.tokenise,
                compute=shared.compute,
                write=shared.write,
                stages=self._stages,
                stop=lambda: stop.received is not None or self._lost(),
                devices=lambda: gpu_workers.num_ready + ranks.count - 1,
                most_devices=len(gpu_workers) + ranks.count - 1,
            )
        self._wall_s = time.perf_counter() - self._began
        if stop.received is not None:
            check_why(ranks)
            for note in self._rows.notes:
                self._callbacks.note(note)
            again = "" if self._options.claim else " with --resume"
            hint = f"the same command{again} goes on" if self._options.output else "start it again"
            done = self._done + self._counts.num_rows
            raise Interrupted(f"stopped after {done:,} rows", signal_number=stop.received, hint=hint)
        if self._lost():
            raise WorkLost
        if not self._done + self._counts.num_rows:
            self._write_nothing()

    def _write_nothing(self) -> None:
        """Tell the output the columns of answers, where there are no rows."""
        window = self._given.reading.no_rows(self._rows.schema)
        asked = self._request.submit(window.texts, self._stages.tokenise)()
        self._write(window, asked, np.zeros((0, self._given.checked.space.num_outputs), np.float32))

    def _tell_of_stop(self) -> None:
        self._callbacks.stage("stopping: what is answered is written")

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Within, memory that runs out for good costs no answer that was written."""
        try:
            yield
        except MemoryFullError as error:
            if self._options.output is None or self._options.data == "-":
                raise
            done = self._done + self._counts.num_rows
            again = "the same command" if self._options.claim else "--resume"
            hint = f"{error.hint}; {again} goes on after them"
            raise MemoryFullError(f"{error}; the answers of {done:,} rows are kept", hint=hint) from error

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

    def record(self, command: str, start_s: float | None) -> Classification:
        """Make the record of the pass."""
        options, recipe, counts = self._options, self._runner.recipe, self._counts
        everything = self._earlier + counts
        peak = datasheet_flops_per_s(recipe.device, self._runner.precision.value)
        wall_s = max(self._wall_s, 1e-9)
        slower, num_rows = [self._ready.fallback] if self._ready.fallback else [], everything.num_tokenizer_fallback
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
            equivalence=self._ready.equivalence,
            fallback="; ".join(slower) or None,
            out_of_memory=tuple(self._out_of_memory),
            max_length=self._given.checked.max_length,
            max_length_reason=self._given.checked.longest.reason,
            notes=self._notes(),
            start_s=start_s,
            wall_s=self._wall_s,
            texts_per_s=counts.num_rows / wall_s,
            tokens_per_s=counts.num_tokens / wall_s,
            mfu=self._operations / wall_s / (peak * (self._gpu_workers.num_used + self._ready.ranks.count - 1))
            if peak and self._operations
            else None,
            stages=self._stages.record(),
            gpus=self._gpu_workers.shares(self._began) if self._gpu_workers.num_used > 1 else (),
            limit=self._stages.limit(),
            peak_bytes=self._memory.peak(),
            resumed_rows=self._done,
        )
