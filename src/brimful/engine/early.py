"""Mistakes in names of files, columns and models, found before torch is imported: an answer within a second or two."""

from __future__ import annotations

from pathlib import Path

from brimful.core.errors import ModelError, printable
from brimful.core.evaluate_options import EvaluateOptions
from brimful.core.export_options import ExportOptions
from brimful.core.options import ClassifyOptions, ProfileOptions, TrainOptions
from brimful.core.trackers import check_trackers
from brimful.data.file_names import split_suffix
from brimful.data.labels.columns import NO_PAIR, check_exists, text_parts
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.formats import EXCEL
from brimful.data.readers.locations import find_splits, locate, refusals
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import fitting, open_stream
from brimful.data.writers.output_path import check_claimed, check_output, check_replaced
from brimful.engine.training.resume import check_options
from brimful.engine.training.run_folder import RunFolder, check_free, run_in
from brimful.models.hub.adapters import find_adapter
from brimful.models.hub.model_config import read_config
from brimful.models.hub.resolve import find_folder
from brimful.models.hub.weight_files import find_weights


def check_early(options: ClassifyOptions | EvaluateOptions | ExportOptions | TrainOptions) -> None:
    """Check what can be checked of data, columns and model without reading more than the first rows.

    Raises: InputError, as the command itself would, only sooner.
    """
    if isinstance(options, ExportOptions):
        run_in(Path(options.run))
        return
    if isinstance(options, EvaluateOptions):
        names = {"--text-column": options.text_column, "--pair-column": options.pair_column}
        if options.data is not None:
            _check_order(options)
            _check_data(options.data, FileFormat.of(options), names)
            _check_model(options)
        elif not (Path(options.model) / "config.json").exists():  # answers that were given before
            _check_data(options.model, FileFormat.of(options), names)
        return
    if isinstance(options, ClassifyOptions):
        _check_order(options)
        if options.output is not None:
            check_output(Path(options.output), options.data)
            if options.claim:
                check_claimed(Path(options.output))
            check_replaced(Path(options.output), overwrite=options.overwrite, resume=options.resume)
        if options.data != "-":
            names = {"--text-column": options.text_column, "--pair-column": options.pair_column}
            _check_data(options.data, FileFormat.of(options), names)
        _check_model(options)
        return
    if not isinstance(options, ProfileOptions):
        check_trackers(options.report_to)
        check_free(Path(options.output), resume=options.resume)
        if options.resume and (run := RunFolder(Path(options.output)).read()) is not None:
            check_options(run, options)
    form, splits = FileFormat.of(options), None if options.eval_data is not None else find_splits(options.data)
    names = {"--text-column": options.text_column, "--pair-column": options.pair_column}
    names |= {"--label-column": options.label_column, "--weight-column": options.weight_column}
    _check_data(options.data if splits is None else splits.training, form, names)
    if options.eval_data is not None:
        _check_data(options.eval_data, fitting(form, options.eval_data), {})
    _check_model(options)


def _check_order(options: ClassifyOptions | EvaluateOptions) -> None:
    """Raises: ModelError where the model and the data have changed places."""
    if Path(options.model).expanduser().is_file() and options.data is not None and Path(options.data).is_dir():
        model, data = printable(options.data, 200), printable(options.model, 200)
        raise ModelError(f"{data} is a file, and a model is a folder", hint=f"the model comes first: {model} {data}")


def _check_data(spec: str, form: FileFormat, names: dict[str, str | None]) -> None:
    """Files, their first rows, and the columns that are named. Data sets of the hub and workbooks wait."""
    with refusals(spec):
        locations = locate(spec)
    if any(each.otherwise is not None or split_suffix(each.path)[0] in EXCEL for each in locations):
        return
    rows = open_stream(spec, form=form).sample
    for flag, name in names.items():
        if name is not None and not (flag == "--pair-column" and name == NO_PAIR):
            _check_named(rows, name, flag)


def _check_named(rows: Rows, name: str, flag: str) -> None:
    is_one = flag in ("--pair-column", "--weight-column")
    for part in (name,) if is_one else text_parts(rows.table.column_names, name):
        check_exists(rows, part, flag)


def _check_model(options: ClassifyOptions | EvaluateOptions | TrainOptions) -> None:
    """The folder, its config.json, and the headers of its weights."""
    given = Path(options.model).expanduser()
    if (given / "run.json").is_file() and not (given / "config.json").is_file():
        raise _run_as_model(given)
    folder = find_folder(options.model, trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle)
    if find_adapter(folder) is not None:
        return  # its model is looked for when it is loaded
    read_config(folder)
    find_weights(folder, allow_pickle=options.allow_pickle)


def _run_as_model(run: Path) -> ModelError:
    shown = printable(run, 200)
    if (run / "model" / "config.json").is_file():
        return ModelError(f"{shown} is a run, not a model", hint=f"its model is {shown}/model")
    return ModelError(
        f"{shown} is a run that has not finished: it has no model yet",
        hint=f"go on with --resume, or make a model of its newest checkpoint: brimful export {shown}",
    )
