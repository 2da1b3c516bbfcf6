"""A model of a checkpoint: what an interrupted run has learned so far, in Hugging Face form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from brimful.core.atomic_files import path_text
from brimful.core.callbacks import Callbacks
from brimful.core.errors import CheckpointError, ModelError, OptionError, OutputError, listed, printable
from brimful.core.options.export import ExportOptions
from brimful.core.options.train import TrainOptions
from brimful.core.records import Run, TrainedInputs
from brimful.core.trained_part import ADAPTER_SETTINGS
from brimful.engine.target_scale import fold
from brimful.engine.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    load_checkpoint,
    newest_whole,
    saved_steps,
)
from brimful.engine.training.run_folder import RunFolder, run_in
from brimful.levers.optimizer import asked_optimizer
from brimful.levers.parameter_efficient import choose_part
from brimful.models.hub.adapters import merge_adapter
from brimful.models.hub.inspection import ModelFacts, head_parameters, inspect_model, load_tokenizer
from brimful.models.hub.load import load_model
from brimful.models.hub.save import save_adapted_model, save_model
from brimful.reports.card import model_card
from brimful.step.precision import Precision


def export(options: ExportOptions, callbacks: Callbacks) -> Path:
    """Save a checkpoint's weights as a model, and return its folder. Needs no data; the run is left as it is.

    Raises: OutputError for a folder without a run, or an output that is taken; CheckpointError without the checkpoint;
    ModelError for a model that is not the one the run was started with.
    """
    folder = RunFolder(Path(options.run))
    run = run_in(folder.path)
    checkpoint = _checkpoint(folder, run, options.step, callbacks)
    output = Path(options.output) if options.output is not None else folder.path / f"model-step-{checkpoint.step}"
    _check_output(output, folder, overwrite=options.overwrite)
    callbacks.stage(f"loading {run.model}")
    given = run.options
    try:
        facts = inspect_model(
            run.model,
            trust_remote_code=bool(given.get("trust_remote_code")),
            allow_pickle=bool(given.get("allow_pickle")),
        )
    except ModelError as error:
        if "there is no folder" not in str(error) or Path(run.model).is_absolute():
            raise
        raise ModelError(str(error), hint="run this in the folder where the training was started") from error
    model = load_model(facts, run.labels, head="new" if facts.adapter is None else "kept", seed=0)
    wrapped = _choose_part(model, facts, run)
    _take_weights(model, checkpoint, run)
    _take_averages(model, checkpoint, run)
    if run.target_scale is not None:
        fold(model, run.target_scale)
    inputs = _inputs(run)
    so_far = replace(run, steps=checkpoint.step, metrics=dict(checkpoint.loop.get("metrics") or {}))
    beside = (load_tokenizer(facts), run.labels, output, model_card(so_far, inputs), inputs)
    if options.merge and wrapped is None:
        raise OptionError(f"--merge: {path_text(folder.path)} has no adapter", hint="leave it out")
    if wrapped is not None and not (options.merge or given.get("merge")):
        save_adapted_model(wrapped, *beside)
    else:
        save_model(model if wrapped is None else merge_adapter(wrapped), *beside)
    callbacks.note(f"step {checkpoint.step:,} of {path_text(folder.path)} is now a model: {path_text(output)}")
    return output


def _check_output(output: Path, folder: RunFolder, *, overwrite: bool) -> None:
    """Check that nothing is replaced but a model that may be. Raises: OutputError."""
    if output.exists() and not (output.is_dir() and (output / "brimful.json").exists()):
        raise OutputError(f"{path_text(output)} is there already, and is no model of brimful", hint="give another name")
    if output.exists() and folder.model.exists() and output.samefile(folder.model):
        raise OutputError(f"{path_text(output)} is the run's own model", hint="give another name")
    if output.exists() and not overwrite:
        raise OutputError(f"{path_text(output)} is there already", hint="give another name, or add --overwrite")


def _choose_part(model: Any, facts: ModelFacts, run: Run) -> Any:
    """Put the run's adapter into the model; return peft's wrapper, None without one. Frozen weights are the files' own.

    Raises: OutputError for a frozen head, which is drawn from data that are not read here.
    """
    kept = ("peft", "freeze", "merge", "seed", *ADAPTER_SETTINGS)
    asked: Any = {name: run.options[name] for name in kept if run.options.get(name) is not None}
    head = tuple(head_parameters(model))
    part = TrainOptions(data="", model="", output="", **asked)
    wrapped = choose_part(model, part, new_parameters=facts.new_parameters, base=facts.base_name)
    if wrapped is None and not all(dict(model.named_parameters())[name].requires_grad for name in head):
        raise OutputError("the head of the run is frozen", hint="finish it with --resume first")
    return wrapped


def _checkpoint(folder: RunFolder, run: Run, step: int | None, callbacks: Callbacks) -> Checkpoint:
    if step is not None:
        steps = saved_steps(folder.checkpoints)
        if step not in steps:
            shown = listed([f"{each:,}" for each in sorted(steps)]) or "none"
            raise CheckpointError(
                f"{path_text(folder.path)} has no checkpoint of step {step:,}", hint=f"it has {shown}"
            )
        try:
            return load_checkpoint(checkpoint_path(folder.checkpoints, step))
        except CheckpointError as error:
            others = listed([f"{each:,}" for each in sorted(set(steps) - {step})])
            hint = f"there are those of steps {others}" if others else "it is the only one; train again"
            raise CheckpointError(str(error), hint=hint) from error
    newest, passed_over = newest_whole(folder.checkpoints, run.run)
    for line in passed_over:
        callbacks.warning(f"passed over: {line}")
    if newest is None:
        raise CheckpointError(
            f"{path_text(folder.path)} has no whole checkpoint yet", hint="go on with the same command and --resume"
        )
    return newest


def _take_weights(model: torch.nn.Module, checkpoint: Checkpoint, run: Run) -> None:
    """Put the checkpoint's weights into the model. Raises: ModelError where they are not those of such a model."""
    own = model.state_dict()
    state, saved = checkpoint.state, checkpoint.state.shapes()
    wrong = [name for name, shape in saved.items() if name in own and tuple(own[name].shape) != shape]
    wrong += [name for name, p in model.named_parameters() if p.requires_grad and name not in saved]
    if wrong:
        raise ModelError(
            f"{printable(run.model)} is not the model that the run was started with: {printable(wrong[0])} differs",
            hint="put the model back where it was",
        )
    with torch.no_grad():
        for name in saved.keys() & own.keys():
            own[name].copy_(state.weights[name] if name in state.weights else state.buffers[name])


def _take_averages(model: torch.nn.Module, checkpoint: Checkpoint, run: Run) -> None:
    """Put the weights into the model that it is judged by, where its optimizer trains others: those without a schedule
    judge by an average, which they make of their states."""
    kept = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
    asked: Any = {name: run.options[name] for name in kept if run.options.get(name) is not None}
    optimizer = asked_optimizer(TrainOptions(data="", model="", output="", **asked))
    if optimizer.named is None or optimizer.named.package != "schedulefree":
        return
    precision = Precision(value="fp32", device=torch.device("cpu"), reason="nothing is computed")
    update = optimizer.update(model, torch.zeros(1), precision, max_grad_norm=0.0)
    update.load_state(checkpoint.state)
    update.release()


def _inputs(run: Run) -> TrainedInputs:
    """Columns and lengths that the run is trained on. Raises: OutputError for a record of earlier code."""
    stored = run.data.get("inputs")
    if not isinstance(stored, dict):
        raise OutputError(
            "the run's record has no columns: it is of earlier code", hint="finish it with --resume first"
        )
    return TrainedInputs(**{**stored, "label_columns": tuple(stored["label_columns"])})
