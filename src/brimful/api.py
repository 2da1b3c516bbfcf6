"""The Python interface, which the command line calls too. Wires the parts; computes nothing itself."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar, get_args

from brimful.benchmarking.folder import rows_file, save_rows
from brimful.benchmarking.run import run_bench
from brimful.core import atomic_files
from brimful.core.bench import Bench
from brimful.core.callbacks import Callbacks, PythonWarnings, warn_caller
from brimful.core.classification import Classification
from brimful.core.command_line import command_of, launched
from brimful.core.errors import DataError, DiskFullError, OptionError, OutputError, did_you_mean, printable
from brimful.core.evaluation import Evaluation
from brimful.core.options.bench import BenchOptions
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.options.export import ExportOptions
from brimful.core.options.profile import ProfileOptions, flags_of
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.place import check_launched, find_local_count, find_place
from brimful.core.profile import Profile
from brimful.core.records import Run, json_text
from brimful.core.trackers import check_trackers
from brimful.data.readers.in_memory import Kind, Tables, as_kind, in_memory, is_in_memory
from brimful.data.writers.shards import LineOutput
from brimful.data.writers.table_output import TableOutput
from brimful.engine.classification.claimed import classify_claimed
from brimful.engine.classification.classifier import ModelClassifier
from brimful.engine.classification.classify import classify_file
from brimful.engine.classification.gpu_process import GpuProcess
from brimful.engine.evaluation.run import run_evaluation
from brimful.engine.profiling.profile import profile as _profile
from brimful.engine.training.export import export as _export
from brimful.engine.training.train import train as _train
from brimful.given import Data, Given, as_pairs, listening, training_data
from brimful.integrations.trackers.reporting import TrackerProcesses
from brimful.models.hub.push import check_push, push_model
from brimful.reports.classification_page import classification_page
from brimful.reports.classification_text import classification_text, concerns
from brimful.reports.svg import check_charts
from brimful.reports.terminal import Terminal
from brimful.reports.write import check_page, report

T = TypeVar("T")

#: Fields of a run that `--json` shows.
_RESULTS = (
    *("status", "metrics", "steps", "skipped_steps", "train_s", "samples_per_s", "tokens_per_s", "peak_bytes"),
    *("phases_s", "input_wait_s", "baselines", "findings", "compilations", "packed", "packed_reason", "recipe"),
    "learning",
)
#: Fields of ClassifyOptions that describe a file, or that a Classifier takes per call.
_OF_A_FILE = (
    *("model", "data", "header", "column_names", "delimiter", "encoding", "sheet", "limit", "output", "text_column"),
    *("pair_column", "labels"),
    *("hypothesis_template", "multi_label", "top_k", "threshold", "logits", "resume", "max_errors", "shard_rows"),
    *(
        "overwrite",
        "report",
        "json",
        "gpus",
        "memory_limit",
        "allocator",
        "claim",
        "lease",
        "launcher",
        "num_processes",
    ),
)


def train(
    data: Data,
    *,
    model: str | Path,
    output: str | Path,
    labels: Any = None,
    eval_data: Data = None,
    callbacks: Callbacks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Run:
    """Fine-tune a classifier on a file of texts, or on data in memory, and save it under `output`/model.

    data, eval_data: a file or a folder; a DataFrame of pandas or polars, a Dataset, an Arrow table, a list of rows, or
    texts with `labels` (of eval_data: as a pair of both). A DatasetDict is its splits.
    options: the fields of TrainOptions, e.g. `learning_rate=2e-5, num_train_epochs=3`; lists of column names may be
    lists. callbacks: receives what is inferred and the progress. progress: print these; default: in notebooks and
    terminals, and warnings alone, as Python's, elsewhere.
    Raises: BrimfulError, see `core.errors`; OptionError for an unknown option.
    """
    data, eval_data, tables = training_data(data, labels, eval_data)
    given = options if eval_data is None else options | {"eval_data": eval_data}
    asked = _options("train", TrainOptions, given, data=data, model=model, output=output)
    with listening(callbacks, False if asked.quiet else progress) as listener:
        return run_training(asked, listener, tables=tables)


def run_training(
    options: TrainOptions, callbacks: Callbacks, phases: Phases | None = None, tables: Tables | None = None
) -> Run:
    """Train with `options`, for `train` and the command line. phases: of this process, if it began before. tables: data
    in memory, by the names that options have for them."""
    check_launched(options.launcher)
    if not find_place().leads:  # it takes part, and says and writes nothing
        return _train(options, command="", callbacks=Callbacks(), tables=tables)
    check_trackers(options.report_to)
    if options.report is not None and not options.dry_run:
        check_charts()
        check_page(Path(options.report), "--report", made=Path(options.output))
    if options.push_to_hub is not None:
        check_push(options.push_to_hub)
    trackers = TrackerProcesses(options.report_to, stage=callbacks.stage)
    given: Any = {"callbacks": callbacks, "phases": phases, "tables": tables, "trackers": trackers}
    command = command_of("train", options)
    if options.gpus is None and options.launcher == "none":
        command = launched(command, find_place().count, find_local_count())
    run = _train(options, command=command, **given)
    for name, url in trackers.pages().items():
        callbacks.note(f"{name}: {url}")
    if options.dry_run:
        callbacks.stage("this was a dry run: nothing was trained, nothing was written")
    elif options.report is not None:
        callbacks.note(f"report: {report(options.output, options.report)}")
    if options.push_to_hub is not None and not options.dry_run:
        callbacks.stage(f"pushing the model to {options.push_to_hub}")
        callbacks.note(f"pushed: {push_model(Path(options.output) / 'model', options.push_to_hub)}")
    return run


def profile(
    data: Data,
    *,
    model: str | Path,
    labels: Any = None,
    callbacks: Callbacks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Profile:
    """Measure where the time of one training step goes, on these data. Saves nothing but the trace, if asked for.

    data, labels, callbacks, progress: as of `train`. options: the fields of TrainOptions that a step depends on, and
    `steps` and `trace`.
    Raises: BrimfulError, as `train` does.
    """
    name, _, tables = training_data(data, labels, None)
    asked = _options("profile", ProfileOptions, options, data=name, model=model)
    with listening(callbacks or (Callbacks() if not progress else None), progress) as listener:
        return _profile(asked, listener, tables)


def bench(
    model: str | Path,
    data: Data = None,
    *,
    labels: Any = None,
    callbacks: Callbacks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Bench:
    """Measure ways to train a model on this machine, ours and transformers' Trainer's, each in a process of its own.

    data, labels, callbacks, progress: as of `train`; without data, random tokens of `shape`. Rows in memory are saved
    in the output folder, where the processes read them. options: other fields of BenchOptions, e.g.
    `rows="levers", budget_s=1200`.
    Raises: BrimfulError; OptionError for an unknown option.
    """
    given = Given()
    name = given.name(data, labels)
    table = next(iter(given.tables.values()), None)
    if table is not None:
        name = str(rows_file(Path(options.get("output", BenchOptions.output))))
    asked = _options("bench", BenchOptions, options, without=("model", "data"), model=model, data=name)
    with listening(callbacks, False if asked.quiet else progress) as listener:
        return run_bench(asked, listener, command=command_of("bench", asked), table=table)


def classify(
    model: str | Path,
    data: Data,
    output: str | Path | None = None,
    *,
    frame: Kind | None = None,
    callbacks: Callbacks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """Label every row of a file of texts, into another file or a folder, in constant memory; return the record.

    Of data in memory (see `train`), or with `frame`, without an output: return the rows with their answers, as what was
    given, or as `frame` says: pandas, polars, datasets, arrow or list. For single texts there is `Classifier`.
    callbacks, progress: as of `train`. options: other fields of ClassifyOptions, e.g. `max_length=256`; lists may be
    lists.
    Raises: BrimfulError; OptionError for an unknown option.
    """
    if frame is not None and frame not in get_args(Kind):
        raise OptionError(f"frame is {printable(repr(frame))}", hint=f"it can be {', '.join(get_args(Kind))}")
    given = Given()
    name = given.name(data)
    if output == "-" or (output is None and frame is None and given.first is None):
        raise OptionError("classify needs an output", hint="or frame='pandas'; for texts in memory there is Classifier")
    fixed = {"model": model, "data": name, "output": output}
    asked = as_pairs(_options("classify", ClassifyOptions, options, without=tuple(fixed), **fixed), given.first)
    rows = TableOutput() if output is None else None
    with listening(callbacks, False if asked.quiet else progress) as listener:
        record = run_classification(asked, listener, tables=given.tables, rows=rows)
        told = listener.told if isinstance(listener, Terminal) else ()
        if isinstance(listener, Terminal):
            listener.text(classification_text(record, told))
    for text in concerns(record) if isinstance(listener, PythonWarnings) else []:
        warn_caller(text)
    if rows is None:
        return record
    kind = frame or (given.first.kind if given.first is not None else "arrow")
    return as_kind(rows.table, kind, like=data)


def evaluate(
    model: str | Path | Data,
    data: Data = None,
    *,
    labels: Any = None,
    callbacks: Callbacks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Evaluation:
    """Score a classifier on labelled rows; without `data`, the answers that `classify` wrote into a file or returned.

    data, labels, callbacks, progress: as of `train`. options: other fields of EvaluateOptions, e.g.
    `output="answers.parquet"` for each row's answer, `label_column="topic"`; `column_names` may be a list.
    Raises: BrimfulError; OptionError for an unknown option.
    """
    if data is None and is_in_memory(model):
        return _evaluate_answers(model, labels=labels, callbacks=callbacks, progress=progress, **options)
    given = Given()
    name = given.name(data, labels)
    asked = _options("evaluate", EvaluateOptions, options, without=("model", "data"), model=model, data=name)
    asked = as_pairs(asked, given.first)
    with listening(callbacks, False if asked.quiet else progress) as listener:
        return run_evaluation(asked, listener, given.tables)


def _evaluate_answers(answers: Data, **given: Any) -> Evaluation:
    """Score answers in memory, in a file for as long as that takes."""
    rows = in_memory(answers)
    with tempfile.TemporaryDirectory() as folder:
        file = str(save_rows(Path(folder), rows.table))
        try:
            found = evaluate(file, **given)
        except DataError as error:
            at = error.file and error.file.replace(file, rows.name)
            raise DataError(error.message, file=at, row=error.row, value=error.value, hint=error.hint) from error
    command = found.command.replace(file, shlex.quote(rows.name))
    return dataclasses.replace(found, model=rows.name, data=rows.name, command=command)


def export(
    run: str | Path, output: str | Path | None = None, *, step: int | None = None, merge: bool = False,
    overwrite: bool = False, callbacks: Callbacks | None = None,
) -> Path:  # fmt: skip
    """Make a model of a checkpoint of `run`, of one that was interrupted too; return its folder.

    output: default `run`/model-step-N. step: of the checkpoint; default the newest. merge: whether the run's adapter is
    merged into the model. overwrite: whether a model at `output` is replaced, with all else in its folder. callbacks:
    as for `train`.
    Raises: BrimfulError.
    """
    where = None if output is None else os.fspath(output)
    asked = ExportOptions(run=os.fspath(run), output=where, step=step, merge=merge, overwrite=overwrite)
    return _export(asked, callbacks or PythonWarnings())


def _texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in the form of the command line: lists as text with commas, paths as text.

    Raises: OptionError for an element of a list that cannot be in such a text.
    """
    texts = {name: _path(value) for name, value in options.items()}
    for name in ("column_names", "labels", "text_column", "label_column", "report_to"):
        if not isinstance(values := texts.get(name), list | tuple):
            continue
        for each in values:
            text = isinstance(each, str) and '"' not in each and (name == "labels" or "," not in each)
            if name != "labels" and not text:
                said = f"{name} has {printable(repr(each))}: names are text without a comma"
                raise OptionError(said, hint="give the column another name")
            if name == "labels" and (not text or each.startswith("column:")):
                raise OptionError(
                    f"labels has {printable(repr(each))}: labels of a file have no quotation marks, and no `column:`",
                    hint="put each row's labels into a column of lists: labels='column:NAME'",
                )
        texts[name] = ",".join(f'"{each}"' if "," in each else each for each in values)
    if isinstance(weights := texts.get("class_weights"), Mapping):
        texts["class_weights"] = json.dumps(dict(weights))
    return texts


def run_classification(
    options: ClassifyOptions,
    callbacks: Callbacks,
    stdout: TextIO | None = None,
    *,
    tables: Tables | None = None,
    rows: TableOutput | None = None,
    processes: Sequence[GpuProcess] = (),
) -> Classification:
    """Classify with `options`, for `classify` and the command line.

    stdout, rows: get the answers without `options.output`. tables: as of `run_training`. processes: as of
    `classify_file`.
    """
    if options.report is not None:
        check_charts()
        check_page(Path(options.report), "--report")
    check_launched(options.launcher)
    leads = options.claim or find_place().leads
    lines = None if stdout is None or options.output is not None else LineOutput(stdout)
    command = command_of("classify", options)
    if options.claim:
        record = classify_claimed(options, command=command, callbacks=callbacks, tables=tables)
    else:
        record = classify_file(
            options, command=command, callbacks=callbacks, output=lines or rows, tables=tables, processes=processes
        )
    if options.report is not None and leads:
        page = classification_page(record).encode()
        try:
            atomic_files.write_bytes(Path(options.report), page)
        except (OutputError, DiskFullError) as error:
            alone = "" if options.output is None else ": with --resume the report alone is made, here or elsewhere"
            raise type(error)(str(error), hint=f"the results are whole{alone}") from error
        callbacks.note(f"report: {options.report}")
    return record


class Classifier(ModelClassifier):
    """A saved classifier as a function from texts to answers, as transformers' pipeline is: one model on its device.

        classifier = brimful.Classifier("run/model")
        classifier(["a text", "another"])                       [{"label": "good", "score": 0.98}, ...]
        classifier("a text", top_k=None)                        all labels, the likeliest first
        classifier(["a text"], labels=["sport", "politics"])    zero-shot, with a model of natural-language inference

    options: max_length, precision, device, packing, token_budget, execution, stream_weights, stream_folder,
    num_workers, verify, trust_remote_code, allow_pickle, as in ClassifyOptions. Of the first texts, `verify` are
    compared with the plain model (`equivalence`), and a slower path runs where answers differ (`fallback`). callbacks:
    as for `train`.
    Raises: BrimfulError; OptionError for an unknown option. Weights are loaded at the first call.
    """

    def __init__(self, model: str | Path, *, callbacks: Callbacks | None = None, **options: Any) -> None:
        asked = _options("Classifier", ClassifyOptions, options, without=_OF_A_FILE, model=model, data="")
        super().__init__(asked, callbacks or PythonWarnings())


def _options(function: str, kind: type[T], given: Mapping[str, Any], without: Sequence[str] = (), **fixed: Any) -> T:
    """Options of a call. without: fields that cannot be given. Raises: OptionError for an unknown option."""
    known = sorted({field.name for field in flags_of(kind)} - set(without))
    for name in given:
        if name not in known:
            raise OptionError(
                f"{function} has no option '{printable(name)}'",
                hint=did_you_mean(name, known) or "the options are " + ", ".join(known),
            )
    return kind(**{name: _path(value) for name, value in fixed.items()}, **_texts(given))


def _path(given: object) -> Any:
    """A path as text; anything else is returned for the options to refuse."""
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def summary_json(run: Run) -> str:
    """JSON document of `--json`: folders of the run and its model, and the results."""
    folder, record = Path(str(run.options["output"])), dataclasses.asdict(run)
    return json_text({"run": str(folder), "model": str(folder / "model"), **{name: record[name] for name in _RESULTS}})
