"""The Python interface: what the command line calls, for programs. Wires the parts; computes nothing itself."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.classification import Classification
from brimful.core.errors import DiskFullError, OptionError, OutputError, printable
from brimful.core.options import ClassifyOptions, ProfileOptions, TrainOptions, flag, flags_of
from brimful.core.profile import Profile
from brimful.core.records import Run, json_text
from brimful.data.writers.shards import LineOutput
from brimful.engine.classification.classifier import ModelClassifier
from brimful.engine.classification.classify import classify_file
from brimful.engine.profiling.profile import profile as _profile
from brimful.engine.training.train import train as _train
from brimful.integrations.fanout import Fanout
from brimful.reports.charts import check_charts
from brimful.reports.classification_page import classification_page

#: Fields that a command takes without their flags, and those that its line names even if they are as usual.
_POSITIONALS = {"train": ("data",), "classify": ("model", "data")}
_ALWAYS = {"train": ("model", "output"), "classify": ()}
#: Fields of ClassifyOptions that are of a file, or that a call of a Classifier is given.
_OF_A_FILE = (
    *("model", "data", "header", "column_names", "output", "text_column", "pair_column", "labels"),
    *("hypothesis_template", "multi_label", "top_k", "threshold", "logits", "resume", "max_errors", "shard_rows"),
    *("verify", "report", "json", "num_gpus"),
)


def train(
    data: str | Path, *, model: str | Path, output: str | Path, callbacks: Callbacks | None = None, **options: Any
) -> Run:
    """Fine-tunes a classifier on a file of texts and saves it under `output`/model.

    options: the fields of TrainOptions, e.g. `learning_rate=2e-5, num_train_epochs=3`; `column_names` may be a list.
    callbacks: hears what is inferred and how training goes. Default: nobody.
    Raises: BrimfulError, of the kind that `core.errors` draws; OptionError for an option there is not.
    """
    _check_known("train", TrainOptions, options)
    _join_names(options)
    asked = TrainOptions(data=_path(data), model=_path(model), output=_path(output), **options)
    return run_training(asked, callbacks or Callbacks())


def run_training(options: TrainOptions, callbacks: Callbacks) -> Run:
    """Runs `options`; what `train` and the command line share."""
    if options.report_to == "tensorboard" and not options.dry_run:
        from brimful.integrations.tensorboard import TensorBoard

        callbacks = Fanout(callbacks, TensorBoard(Path(options.output) / "tensorboard"))
    run = _train(options, command=command_of("train", options), callbacks=callbacks)
    if options.dry_run:
        callbacks.stage("this was a dry run: nothing was trained, nothing was written")
    return run


def profile(data: str | Path, *, model: str | Path, callbacks: Callbacks | None = None, **options: Any) -> Profile:
    """Says where the time of one training step goes, on these data. Nothing is saved but the trace asked for.

    options: the fields of TrainOptions that a step depends on, and `steps` and `trace`.
    Raises: BrimfulError, as `train` does.
    """
    _check_known("profile", ProfileOptions, options)
    _join_names(options)
    asked = {name: _path(value) if name == "trace" else value for name, value in options.items()}
    return run_profile(ProfileOptions(data=_path(data), model=_path(model), **asked), callbacks or Callbacks())


def run_profile(options: ProfileOptions, callbacks: Callbacks) -> Profile:
    """Profiles what `options` ask for; what `profile` and the command line share."""
    return _profile(options, callbacks)


def classify(
    model: str | Path,
    data: str | Path,
    output: str | Path,
    *,
    callbacks: Callbacks | None = None,
    **options: Any,
) -> Classification:
    """Labels every row of a file of texts, into another file or a folder, in constant memory.

    For texts in memory there is `Classifier`. options: the other fields of ClassifyOptions, e.g. `max_length=256`;
    `labels` and `column_names` may be lists, too.
    Raises: BrimfulError; OptionError for an option there is not.
    """
    _check_known("classify", ClassifyOptions, options, without=("model", "data", "output"))
    _join_names(options)
    if isinstance(options.get("labels"), list | tuple):
        options["labels"] = _joined(options["labels"])
    if "report" in options:
        options["report"] = _path(options["report"])
    if output is None or output == "-":
        raise OptionError("classify needs an output", hint="for texts in memory there is Classifier")
    asked = ClassifyOptions(model=_path(model), data=_path(data), output=_path(output), **options)
    return run_classification(asked, callbacks or Callbacks())


def _join_names(options: dict[str, Any]) -> None:
    """Makes a list of column names the text that the option has.

    Raises: OptionError for a name that cannot be in it.
    """
    names = options.get("column_names")
    if not isinstance(names, list | tuple):
        return
    if wrong := [each for each in names if not isinstance(each, str) or "," in each]:
        said = f"column_names has {printable(repr(wrong[0]))}: names are text without a comma"
        raise OptionError(said, hint="give the column another name")
    options["column_names"] = ",".join(names)


def _joined(labels: Sequence[object]) -> str:
    """Candidate labels as the option has them."""
    wrong = [each for each in labels if not isinstance(each, str) or "," in each or each.startswith("column:")]
    if wrong:
        raise OptionError(
            f"labels has {printable(repr(wrong[0]))}: of a file, labels are text without a comma or `column:`",
            hint="put each row's labels into a column of lists: labels='column:NAME'",
        )
    return ",".join(cast(Sequence[str], labels))


def run_classification(options: ClassifyOptions, callbacks: Callbacks, stdout: TextIO | None = None) -> Classification:
    """Classifies what `options` ask for; what `classify` and the command line share.

    stdout: where answers go without `options.output`.
    """
    if options.report is not None:
        check_charts()
        _check_report(Path(options.report))
    lines = None if stdout is None or options.output is not None else LineOutput(stdout)
    record = classify_file(options, command=command_of("classify", options), callbacks=callbacks, output=lines)
    if options.report is not None:
        page = classification_page(record).encode()
        try:
            atomic_files.write_bytes(Path(options.report), page)
        except (OutputError, DiskFullError) as error:
            alone = "" if options.output is None else ": with --resume the report alone is made, here or elsewhere"
            raise type(error)(str(error), hint=f"the results are whole{alone}") from error
        callbacks.note(f"report: {options.report}")
    return record


def _check_report(path: Path) -> None:
    """Before anything is done. No input and no output ends in .html, so none can be overwritten."""
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise OptionError(f"--report {printable(path)} is no name of a page", hint="let it end in .html")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError(
            f"--report {printable(path)}: {printable(path.parent)} is no folder that this user may write into",
            hint="give another folder, or make it first",
        )


class Classifier(ModelClassifier):
    """A saved classifier as a function from texts to answers, as transformers' pipeline is: one model on its device.

        classifier = brimful.Classifier("run/model")
        classifier(["a text", "another"])                       [{"label": "good", "score": 0.98}, ...]
        classifier("a text", top_k=None)                        all labels, the likeliest first
        classifier(["a text"], labels=["sport", "politics"])    zero-shot, with a model of natural-language inference

    options: how it runs: max_length, precision, device, packing, token_budget, execution, num_workers,
    trust_remote_code, allow_pickle, as in ClassifyOptions.
    Raises: BrimfulError; OptionError for an option there is not. Weights are read by the first call.
    """

    def __init__(self, model: str | Path, *, callbacks: Callbacks | None = None, **options: Any) -> None:
        _check_known("Classifier", ClassifyOptions, options, without=_OF_A_FILE)
        super().__init__(ClassifyOptions(model=_path(model), data="", **options), callbacks or Callbacks())


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


def command_of(command: str, options: Any) -> str:
    """The command line that asks for `options`."""
    words, given = [], []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in _POSITIONALS[command]:
            given.append(value)
            continue
        if value == field.default and field.default is not dataclasses.MISSING and field.name not in _ALWAYS[command]:
            continue
        text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
        if value is True or value is False:
            words += [flag(field.name if value else f"no_{field.name}")]
        elif text.startswith("-"):
            words += [f"{flag(field.name)}={text}"]
        else:
            words += [flag(field.name), text]
    if any(each.startswith("-") and each != "-" for each in given):
        return shlex.join(["brimful", command, *words, "--", *given])
    return shlex.join(["brimful", command, *given, *words])


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
        "compilations": dataclasses.asdict(run.compilations),
        "packed": run.packed,
        "packed_reason": run.packed_reason,
        "recipe": dataclasses.asdict(run.recipe),
    }
    return json_text(document)
