"""The Python interface: what the command line calls, for programs. Wires the parts; computes nothing itself."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from brimful.core.errors import OptionError, printable
from brimful.core.listener import Listener
from brimful.core.options import ClassifyOptions, ProfileOptions, TrainOptions, flag, flags_of
from brimful.core.profile import Profile
from brimful.core.records import Run, json_text
from brimful.core.units import count_text, seconds_text
from brimful.data.columns import find_columns
from brimful.data.place import check_output, place_of
from brimful.data.sources import read_rows
from brimful.data.writing import write_table
from brimful.engine.classify import Answers, classify_texts
from brimful.engine.prepare import tell_columns
from brimful.engine.profile import profile as _profile
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
    _check_known("train", TrainOptions, options)
    asked = TrainOptions(data=_path(data), model=_path(model), output=_path(output), **options)
    return run_training(asked, listener or Listener())


def run_training(options: TrainOptions, listener: Listener) -> Run:
    """Runs `options`; what `train` and the command line share."""
    if options.report_to == "tensorboard" and not options.dry_run:
        from brimful.integrations.tensorboard import TensorBoard

        listener = Fanout(listener, TensorBoard(Path(options.output) / "tensorboard"))
    run = _train(options, command=command_of(options), listener=listener)
    if options.dry_run:
        listener.stage("this was a dry run: nothing was trained, nothing was written")
    return run


def profile(data: str | Path, *, model: str | Path, listener: Listener | None = None, **options: Any) -> Profile:
    """Says where the time of one training step goes, on these data. Nothing is saved but the trace asked for.

    options: the fields of TrainOptions that a step depends on, and `steps` and `trace`.
    Raises: BrimfulError, as `train` does.
    """
    _check_known("profile", ProfileOptions, options)
    asked = {name: _path(value) if name == "trace" else value for name, value in options.items()}
    return run_profile(ProfileOptions(data=_path(data), model=_path(model), **asked), listener or Listener())


def run_profile(options: ProfileOptions, listener: Listener) -> Profile:
    """Profiles what `options` ask for; what `profile` and the command line share."""
    return _profile(options, listener)


def classify(
    model: str | Path,
    texts: Sequence[str | None],
    pairs: Sequence[str | None] | None = None,
    *,
    listener: Listener | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Label and score of each text (or text pair), in order, named as transformers' pipeline names them.

    A text that is None or blank has neither: both are None. A multi-label model gives lists, a regression a score only.
    options: the fields of ClassifyOptions but `data` and `output`, e.g. `max_length=256, precision="bf16"`.
    Raises: BrimfulError; OptionError for an option there is not, and for texts that are none.
    """
    _check_known("classify", ClassifyOptions, options, without=("data", "output"))
    asked = ClassifyOptions(model=_path(model), data="", **options)
    first = _texts("texts", texts)
    second = None if pairs is None else _texts("pairs", pairs)
    if second is not None and len(first) != len(second):
        raise OptionError(
            f"there are {len(first):,} texts and {len(second):,} pairs",
            hint="give each text its pair, in the same order",
        )
    if not len(first):
        return []
    answers = classify_texts(asked, first, second, listener or Listener())
    return cast(list[dict[str, Any]], answers.table(asked.threshold or 0.5).to_pylist())


def run_classification(options: ClassifyOptions, listener: Listener) -> pa.Table:
    """The rows of a file with `label` and `score` beside their columns, written to `options.output` if it is given.

    Every row keeps its place; one without text has null for both. A column of the file that has one of these names
    keeps it, and the answer is called `predicted_label` or `predicted_score`.
    """
    if options.output is not None:
        check_output(Path(options.output), options.data)
        if not place_of(Path(options.output)).single:
            raise OptionError(f"--output {printable(options.output)} is a folder", hint="give the name of a file")
    listener.stage(f"reading {options.data}")
    rows = read_rows(options.data)
    columns = find_columns(rows, text=options.text_column, pair=options.pair_column, label=None, need_labels=False)
    tell_columns(columns, listener)
    began = time.perf_counter()
    answers = classify_texts(
        options,
        rows.table[columns.text].cast(pa.large_string()),
        None if columns.pair is None else rows.table[columns.pair].cast(pa.large_string()),
        listener,
    )
    _tell(answers, rows.num_rows, time.perf_counter() - began, listener)
    table = rows.table
    found = answers.table(options.threshold or 0.5)
    for name in found.column_names:
        table = table.append_column(_free_name(name, table.column_names), found[name])
    if options.output is not None:
        write_table(table, Path(options.output))
        listener.note(f"written to {options.output}")
    return table


def _tell(answers: Answers, num_rows: int, seconds: float, listener: Listener) -> None:
    how = "packed, without padding" if answers.packed else f"on padded rows: {answers.reason}"
    speed = f"{count_text(num_rows / seconds)} texts/s, loading included"
    listener.note(f"{num_rows:,} texts in {seconds_text(seconds)} ({speed}); {how}")
    for count, what in (
        (answers.num_empty, "had no text, and have no label"),
        (answers.num_truncated, "were longer than the longest sequence, and were cut (--max-length)"),
        (answers.num_not_finite, "have no label: the model gave no number for them"),
    ):
        if count:
            listener.warning(f"{count:,} of {num_rows:,} rows {what}")


def _free_name(name: str, taken: Sequence[str]) -> str:
    """`label`, or `predicted_label`, `predicted_label_2`, ... if it is taken."""
    names = itertools.chain((name, f"predicted_{name}"), (f"predicted_{name}_{i}" for i in itertools.count(2)))
    return next(each for each in names if each not in taken)


def _check_known(function: str, kind: type[Any], options: Mapping[str, Any], without: Sequence[str] = ()) -> None:
    known = sorted({field.name for field in flags_of(kind)} - set(without))
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise OptionError(
                f"{function} has no option '{printable(name)}'",
                hint=f"did you mean {near[0]}?" if near else "the options are " + ", ".join(known),
            )


def _path(given: object) -> Any:
    """A path as text; anything that is none is left for the options to refuse."""
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def _texts(name: str, texts: Sequence[str | None]) -> pa.ChunkedArray:
    if isinstance(texts, str | bytes | Mapping):
        raise OptionError(
            f"{name} is {type(texts).__name__}: it must be a list of texts", hint="classify(model, [text])"
        )
    try:
        return pa.chunked_array([pa.array(list(texts), pa.large_string())])
    except (TypeError, ValueError, pa.ArrowException) as error:
        wrong = next((i for i, text in enumerate(texts) if not isinstance(text, str | None)), None)
        said = f"{name} must be a list of texts" if wrong is None else f"{name}[{wrong}] is no text"
        raise OptionError(f"{said}: {printable(error)}", hint="each is a str, or None for no text") from error


def command_of(options: TrainOptions) -> str:
    """The command line that asks for `options`."""
    words = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "data" or (value == field.default and field.name not in ("model", "output")):
            continue
        text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
        if value is True:
            words += [flag(field.name)]
        elif text.startswith("-"):
            words += [f"{flag(field.name)}={text}"]
        else:
            words += [flag(field.name), text]
    data = ["--", options.data] if options.data.startswith("-") else [options.data]
    return shlex.join(["brimful", "train", *(words + data if len(data) > 1 else data + words)])


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
    return json_text(document)
