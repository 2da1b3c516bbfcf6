"""Evaluation by options: of a model, or, without loading torch, of answers that were given before; and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.command_line import command_of
from brimful.core.errors import OptionError, printable
from brimful.core.evaluation import Evaluation
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.place import check_launched, find_place
from brimful.data.readers.in_memory import Tables
from brimful.data.writers.output_path import check_new
from brimful.engine.classification.gpu_process import GpuProcess
from brimful.engine.evaluation.answers import evaluate_answers
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.svg import check_charts
from brimful.reports.write import check_page


def run_evaluation(
    options: EvaluateOptions, callbacks: Callbacks, tables: Tables | None = None, processes: Sequence[GpuProcess] = ()
) -> Evaluation:
    """Evaluate with `options`, for `evaluate` and the command line. tables: data in memory, by the names that options
    have for them. processes: of GPUs beside the first, where the caller has begun them, and ends them."""
    if options.report is not None:
        check_charts()
        check_page(Path(options.report), "--report")
    if options.output is not None:
        check_new(Path(options.output), overwrite=options.overwrite)
    check_launched(options.launcher)
    command = command_of("evaluate", options)
    if options.data is None:
        _check_one_input(options)
        record = evaluate_answers(options, command=command, callbacks=callbacks)
    else:
        from brimful.engine.evaluation.evaluate import evaluate_model  # loads torch

        record = evaluate_model(options, command=command, callbacks=callbacks, tables=tables, processes=processes)
    if options.report is not None and find_place().leads:
        atomic_files.write_bytes(Path(options.report), evaluation_page(record).encode())
        callbacks.note(f"report: {options.report}")
    return record


def _check_one_input(options: EvaluateOptions) -> None:
    """Check that MODEL alone is a file of answers. Raises: OptionError for a model."""
    path = Path(options.model).expanduser()
    if (path / "config.json").is_file() or not path.exists():
        raise OptionError(
            f"{printable(options.model)} is evaluated on rows, and none are given",
            hint=f"brimful evaluate {printable(options.model)} test.csv; alone, a file that brimful classify wrote",
        )
