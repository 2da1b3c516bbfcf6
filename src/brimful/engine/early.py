"""Mistakes in options, files, columns, labels and models, found before torch is imported: an answer within a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from brimful.core.callbacks import Callbacks
from brimful.core.errors import InputError, ModelError, printable
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.options.export import ExportOptions
from brimful.core.options.profile import ProfileOptions
from brimful.core.options.train import TrainOptions
from brimful.core.trackers import check_trackers
from brimful.core.trained_part import FrozenParts
from brimful.data.file_names import split_suffix
from brimful.data.labels.columns import NO_PAIR, check_exists, text_parts
from brimful.data.readers.fields import rows_with_fields
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.formats import EXCEL
from brimful.data.readers.locations import find_splits, locate, refusals
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import fitting, open_stream
from brimful.data.writers.output_path import check_claimed, check_output, check_replaced
from brimful.engine.read_examples import read_examples
from brimful.engine.training.resume import check_options
from brimful.engine.training.run_folder import RunFolder, check_free, run_in
from brimful.hardware.gpu_missing import check_gpu
from brimful.levers.optimizer_names import check_installed
from brimful.models.hub.adapters import find_adapter
from brimful.models.hub.model_config import read_config
from brimful.models.hub.resolve import find_folder
from brimful.models.hub.weight_files import find_weights

#: Files of rows that are read twice, once to find mistakes in them, have at most so many bytes together.
_QUICKLY_READ = 2 << 20
#: Names of the number of layers in a config.json.
_NUM_LAYERS = ("num_hidden_layers", "n_layers", "n_layer")


def check_early(
    options: ClassifyOptions | EvaluateOptions | ExportOptions | TrainOptions, callbacks: Callbacks
) -> None:
    """Check what can be checked of options, data, columns and model: of a few rows all of it, of many the first ones.

    callbacks: receives what was inferred where that ends in a mistake.
    Raises: InputError, as the command itself would, only sooner.
    """
    if isinstance(options, ExportOptions):
        run_in(Path(options.run))
        return
    check_gpu(options.device, options.gpus)
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
            _check_data(options.data, FileFormat.of(options), names, keep_broken=options.claim)
        _check_model(options)
        return
    check_installed(options.optim)
    if not isinstance(options, ProfileOptions):
        check_trackers(options.report_to)
        check_free(Path(options.output), resume=options.resume)
        if options.resume and (run := RunFolder(Path(options.output)).read()) is not None:
            check_options(run, options)
    form, splits = FileFormat.of(options), find_splits(options.data)
    names = {"--text-column": options.text_column, "--pair-column": options.pair_column}
    names |= {"--label-column": options.label_column, "--weight-column": options.weight_column}
    _check_data(options.data if splits is None else splits.training, form, names)
    if options.eval_data is not None:
        _check_data(options.eval_data, fitting(form, options.eval_data), {})
    config = _check_model(options)
    _check_layers(options, config or {})
    if all(_is_quickly_read(spec) for spec in (options.data, options.eval_data) if spec is not None):
        _check_rows(options, callbacks)


def _check_layers(options: TrainOptions, config: dict[str, Any]) -> None:
    """Check the layers that --freeze names, where config.json plainly says how many there are."""
    count = next((config[name] for name in _NUM_LAYERS if isinstance(config.get(name), int)), None)
    if options.freeze is not None and count and "text_config" not in config:
        FrozenParts.parse(options.freeze).check_layers(count)


def _is_quickly_read(spec: str) -> bool:
    """Return whether all rows are in a few small files of this machine, and not compressed."""
    splits = find_splits(spec)
    specs = [spec] if splits is None else [splits.training, splits.evaluation]
    places = [place for each in specs if each is not None for place in locate(each)]
    if len(places) > 100 or any(split_suffix(p.path)[1] or not Path(p.path).is_file() for p in places):
        return False
    return sum(Path(place.path).stat().st_size for place in places) <= _QUICKLY_READ


class _Kept(Callbacks):
    """Keeps what is said, for other callbacks to hear it later."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self.said: list[Callable[[], None]] = []

    def note(self, text: str) -> None:
        self.said.append(partial(self._callbacks.note, text))

    def warning(self, text: str) -> None:
        self.said.append(partial(self._callbacks.warning, text))


def _check_rows(options: TrainOptions, callbacks: Callbacks) -> None:
    """Read the rows as training will; say what led to a mistake."""
    kept = _Kept(callbacks)
    try:
        read_examples(options, kept, {})
    except InputError:
        callbacks.stage(f"reading {options.data}")
        for say in kept.said:
            say()
        raise


def _check_order(options: ClassifyOptions | EvaluateOptions) -> None:
    """Raises: ModelError where the model and the data have changed places."""
    if Path(options.model).expanduser().is_file() and options.data is not None and Path(options.data).is_dir():
        model, data = printable(options.data, 200), printable(options.model, 200)
        raise ModelError(f"{data} is a file, and a model is a folder", hint=f"the model comes first: {model} {data}")


def _check_data(spec: str, form: FileFormat, names: dict[str, str | None], *, keep_broken: bool = False) -> None:
    """Files, their first rows, and the columns that are named. Data sets of the hub and workbooks wait.

    keep_broken: as of `open_stream`.
    """
    with refusals(spec):
        locations = locate(spec)
    if any(each.otherwise is not None or split_suffix(each.path)[0] in EXCEL for each in locations):
        return
    rows = rows_with_fields(open_stream(spec, form=form, keep_broken=keep_broken).sample, *names.values())
    for flag, name in names.items():
        if name is not None and not (flag == "--pair-column" and name == NO_PAIR):
            _check_named(rows, name, flag)


def _check_named(rows: Rows, name: str, flag: str) -> None:
    is_one = flag in ("--pair-column", "--weight-column")
    for part in (name,) if is_one else text_parts(rows.table.column_names, name):
        check_exists(rows, part, flag)


def _check_model(options: ClassifyOptions | EvaluateOptions | TrainOptions) -> dict[str, Any] | None:
    """Check the folder, its config.json, and the headers of its weights; return what config.json says, None of an
    adapter."""
    given = Path(options.model).expanduser()
    if (given / "run.json").is_file() and not (given / "config.json").is_file():
        raise _run_as_model(given)
    folder = find_folder(options.model, trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle)
    if find_adapter(folder) is not None:
        return None  # its model is looked for when it is loaded
    config = read_config(folder)
    find_weights(folder, allow_pickle=options.allow_pickle)
    return config


def _run_as_model(run: Path) -> ModelError:
    shown = printable(run, 200)
    if (run / "model" / "config.json").is_file():
        return ModelError(f"{shown} is a run, not a model", hint=f"its model is {shown}/model")
    return ModelError(
        f"{shown} is a run that has not finished: it has no model yet",
        hint=f"go on with --resume, or make a model of its newest checkpoint: brimful export {shown}",
    )
