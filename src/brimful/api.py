"""The Python interface: what the command line calls, for programs. Wires the parts; computes nothing itself."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from brimful.core.errors import OptionError
from brimful.core.listener import Listener
from brimful.core.options import ClassifyOptions, TrainOptions
from brimful.core.records import Run
from brimful.data.columns import find_columns
from brimful.data.sources import read_rows
from brimful.data.writing import write_table
from brimful.engine.classify import Answers, classify_texts
from brimful.engine.train import train as _train
from brimful.integrations.fanout import Fanout


def train(
    data: str | Path, *, model: str | Path, output: str | Path, listener: Listener | None = None, **options: Any
) -> Run:
    """Fine-tunes a classifier on a file of texts and saves it under `output`/model.

    options: the fields of TrainOptions, e.g. `learning_rate=2e-5, num_train_epochs=3`.
    listener: hears what is inferred and how training goes. Default: nobody.
    Raises: BrimfulError, of the kind that `core.errors` draws; OptionError for an option there is not.
    """
    known = {field.name for field in dataclasses.fields(TrainOptions)}
    if unknown := sorted(set(options) - known):
        raise OptionError(f"train has no option {unknown[0]!r}", hint="the options are " + ", ".join(sorted(known)))
    asked = TrainOptions(data=str(data), model=str(model), output=str(output), **options)
    return run_training(asked, listener or Listener())


def run_training(options: TrainOptions, listener: Listener) -> Run:
    """Runs `options`; what `train` and the command line share."""
    if options.report_to == "tensorboard" and not options.dry_run:
        from brimful.integrations.tensorboard import TensorBoard

        listener = Fanout(listener, TensorBoard(Path(options.output) / "tensorboard"))
    return _train(options, command=command_of(options), listener=listener)


def classify(
    model: str | Path, texts: Sequence[str], pairs: Sequence[str] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Label and score of each text (or text pair), in order, named as transformers' pipeline names them.

    options: the fields of ClassifyOptions, e.g. `max_length=256, precision="bf16"`.
    Raises: BrimfulError.
    """
    asked = ClassifyOptions(model=str(model), data="", **options)
    if not texts:
        return []
    second = None if pairs is None else pa.chunked_array([pa.array(pairs, pa.large_string())])
    answers = classify_texts(asked, pa.chunked_array([pa.array(texts, pa.large_string())]), second, Listener())
    return [answers.best(row, asked.threshold) for row in range(len(texts))]


def run_classification(options: ClassifyOptions, listener: Listener) -> tuple[pa.Table, Answers]:
    """The rows of a file with `label` and `score` beside their columns, written to `options.output` if it is given."""
    listener.stage(f"reading {options.data}")
    rows = read_rows(options.data)
    columns = find_columns(rows, text=options.text_column, pair=options.pair_column, label=None, need_labels=False)
    for field, reason in columns.reasons.items():
        listener.note(f"{field}: {reason}")
    pairs = None if columns.pair is None else rows.table[columns.pair]
    answers = classify_texts(
        options, _text(rows.table[columns.text]), None if pairs is None else _text(pairs), listener
    )
    found = [answers.best(row, options.threshold) for row in range(rows.num_rows)]
    table = rows.table
    for name in found[0]:
        taken = name if name not in table.column_names else f"predicted_{name}"
        table = table.append_column(taken, pa.array([answer[name] for answer in found]))
    if options.output is not None:
        write_table(table, Path(options.output))
    return table, answers


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as text, with nothing in place of null."""
    return column.cast(pa.large_string()).fill_null("")


def command_of(options: TrainOptions) -> str:
    """The command line that asks for `options`."""
    words = ["brimful", "train", options.data]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "data" or (value == field.default and field.name not in ("model", "output")):
            continue
        name = "--" + field.name.replace("_", "-")
        words += [name] if value is True else [name, str(value)]
    return shlex.join(words)


def summary_json(run: Run) -> str:
    """The one JSON document of `--json`: where the run and its model are, and what came of it."""
    folder = Path(str(run.options["output"]))
    document = {
        "run": str(folder),
        "model": str(folder / "model"),
        "status": run.status,
        "metrics": dict(run.metrics),
        "steps": run.steps,
        "skipped_steps": run.skipped_steps,
        "train_s": run.train_s,
        "samples_per_s": run.samples_per_s,
        "tokens_per_s": run.tokens_per_s,
        "peak_bytes": dataclasses.asdict(run.peak_bytes),
        "packed": run.packed,
        "packed_reason": run.packed_reason,
        "recipe": dataclasses.asdict(run.recipe),
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False)
