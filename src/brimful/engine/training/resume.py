"""Going on with a run: differences that stop it, and a length that may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from brimful.core.errors import CheckpointError, OutputError, printable
from brimful.core.options.checks import flag
from brimful.core.options.train import TrainOptions, differences, differences_in_rows
from brimful.core.records import ADAPTER_FILE, CHOSEN_ROWS, TOKENIZER, LabelSpace, Recipe, Run
from brimful.core.trained_part import HEAD_ALONE, ONCE_HEAD_ALONE
from brimful.engine.learning import learning_of

if TYPE_CHECKING:  # they import torch, which options are checked without
    from torch import Tensor

    from brimful.engine.training.checkpoint import Checkpoint


#: Files whose SHA-256 earlier versions did not record.
_ONCE_UNRECORDED = (ADAPTER_FILE, TOKENIZER)
_HINT = "resume with what the run was started with, or start another one in a new folder"


def check_options(run: Run, options: TrainOptions, precision: str | None = None) -> None:
    """Check that the options are those of the run, or mean the same, but for those that change nothing learned.

    precision: that products will be in, None where it is not known yet. Needs no data: what is read is compared by
    `check_data`. Raises: OutputError naming what differs.
    """
    rate = None if options.learning_rate is None else learning_of(run).learning_rate
    before = dict(run.options) | {"learning_rate": rate}
    if changed := differences(before, options, alike=_alike(run, options, precision)):
        raise _refused(options, changed)


def _alike(run: Run, options: TrainOptions, precision: str | None) -> list[str]:
    """Options that mean for the run what it was started with: what `auto` chose, a folder by another name."""
    found, used = [], run.recipe.value("precision")
    chosen = precision if options.precision == "auto" else options.precision
    if chosen in (used, None) and "fp8" not in (options.precision, run.options.get("precision")):
        found.append("precision")
    if Path(options.model).expanduser().resolve() == Path(str(run.options.get("model"))).expanduser().resolve():
        found.append("model")
    if run.labels.task != "regression" or (run.target_scale is None and options.target_scaling == "off"):
        found.append("target_scaling")
    return found


def check_data(
    run: Run,
    options: TrainOptions,
    *,
    space: LabelSpace,
    fingerprint: str,
    max_length: int,
    sha256: Mapping[str, str],
) -> None:
    """Check that data, labels, the longest sequence and the files behind options are those of the run.

    sha256: of these files, and of the choice of rows. Raises: OutputError naming what differs.
    """
    rows, _, eval_rows = fingerprint.partition("+")
    rows_before, _, eval_rows_before = run.data_fingerprint.partition("+")
    changed = []
    if rows != rows_before:
        changed.append("the data have changed")
    elif eval_rows != eval_rows_before:
        changed.append("the evaluation rows have changed")
    if space != run.labels:
        changed.append("what the model's outputs mean has changed")
    if max_length != run.data.get("max_length", max_length):
        changed.append(f"{flag('max_length')} was {run.data['max_length']}, is {max_length}")
    before = run.data.get("sha256") or {}
    files = [name for name in sha256 if name != CHOSEN_ROWS]
    known = [name for name in files if name in before or name not in _ONCE_UNRECORDED]
    changed += [f"the {name} has changed" for name in known if sha256[name] != before.get(name)]
    if sha256[CHOSEN_ROWS] != before.get(CHOSEN_ROWS):
        by_options = differences_in_rows(run.options, options)
        changed += by_options or ([f"the {CHOSEN_ROWS} has changed"] if CHOSEN_ROWS in before and not changed else [])
    if changed:
        raise _refused(options, changed)


def check_levers(run: Run, recipe: Recipe, options: TrainOptions) -> None:
    """Check that the levers that change what is learned are those of the run. recipe: of now.

    Raises: OutputError naming what differs.
    """
    levers = (*run.recipe.levers, *recipe.levers)
    names = dict.fromkeys(lever.name for lever in levers if lever.arithmetic == "training")
    before = {name: run.recipe.value(name) for name in names}
    once = {name: HEAD_ALONE for name, was in before.items() if was == ONCE_HEAD_ALONE}
    values = [(name, was, recipe.value(name)) for name, was in (before | once).items()]
    if changed := [f"{name} was {was}, is {value}" for name, was, value in values if was != value]:
        raise _refused(options, changed)


def _refused(options: TrainOptions, changed: list[str]) -> OutputError:
    return OutputError(f"{printable(options.output, 200)} cannot be resumed: {'; '.join(changed)}", hint=_HINT)


def num_steps_before(run: Run, batches_per_epoch: int) -> int:
    """Steps that a run was asked for."""
    steps, epochs = run.options.get("max_steps"), learning_of(run).num_train_epochs
    return int(steps) if steps else math.ceil((epochs or 0) * batches_per_epoch)


def length_note(num_steps: int, before: int, schedule: str) -> str | None:
    """One line on a run whose length changed; None where it is what it was."""
    if num_steps == before:
        return None
    rest = (
        "the learning rate stays what it is"
        if schedule == "constant"
        else (f"from here on the learning rate is that of the {schedule} schedule over {num_steps:,} steps")
    )
    return f"the run has {num_steps:,} steps now, {before:,} before: {rest}"


def require_checkpoint(folder: Path, saved: list[int]) -> None:
    """Check that a finished run can go on. Raises: CheckpointError."""
    if not saved:
        raise CheckpointError(
            f"{printable(folder, 200)} has no checkpoint left to go on from",
            hint=f"train its model further in a new folder: --model {printable(folder, 200)}/model",
        )


def check_weights(own: Mapping[str, Tensor], checkpoint: Checkpoint, output: str) -> None:
    """Check that a checkpoint has weights for this model. Raises: OutputError."""
    shapes, saved = {name: tuple(tensor.shape) for name, tensor in own.items()}, checkpoint.state.shapes()
    if other := sorted(name for name in {*shapes, *saved} if shapes.get(name) != saved.get(name)):
        raise OutputError(
            f"{printable(output, 200)} cannot be resumed: {printable(other[0])} of the model is not what it is in the"
            f" checkpoint, one of {len(other)} such weights",
            hint="resume with the model that the run was started with, or start another one in a new folder",
        )
