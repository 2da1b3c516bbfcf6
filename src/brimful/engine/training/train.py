"""Fine-tuning: from options to a finished run folder."""

from __future__ import annotations

import dataclasses
import secrets
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from brimful.core.atomic_files import path_text
from brimful.core.callbacks import Callbacks
from brimful.core.errors import BrimfulError, InputError, OptionError, RanksError, listed
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.place import check_tensor_parallel, find_place
from brimful.core.records import FirstBatch, Run
from brimful.core.trackers import Trackers
from brimful.data.readers.in_memory import Tables
from brimful.engine.assemble import Built, build
from brimful.engine.first_batch import checked_build
from brimful.engine.learning import resumed
from brimful.engine.prepare import Prepared, prepare
from brimful.engine.training.baselines import Baselines
from brimful.engine.training.checkpoint import (
    saved_steps,
)
from brimful.engine.training.events import EventLog
from brimful.engine.training.follower import follow
from brimful.engine.training.loop import TrainingLoop
from brimful.engine.training.orders import Order
from brimful.engine.training.resume import (
    check_data,
    check_levers,
    check_options,
    length_note,
    num_steps_before,
    require_checkpoint,
)
from brimful.engine.training.run_context import RunContext
from brimful.engine.training.run_folder import RunFolder, bytes_to_save, check_free, check_space, differences_of_machine
from brimful.engine.training.same_path import agree, met, path_of
from brimful.engine.training.tracked_log import tracked
from brimful.hardware.asked import asked_of
from brimful.hardware.device_memory import device_memory
from brimful.hardware.meeting import coming, entered
from brimful.hardware.probe import choose_device, probe
from brimful.hardware.process_settings import deterministic, freed_memory_kept
from brimful.hardware.ranks import Ranks, joined
from brimful.levers.optimizer import asked_optimizer
from brimful.levers.optimizer_names import check_installed
from brimful.levers.precision import choose_precision
from brimful.models.hub.adapters import check_adapter
from brimful.step.precision import Precision

#: Times --hang-timeout that a batch may take to come where texts go through a function of the user's own.
_MORE_FOR_TRANSFORMS = 10


def train(
    options: TrainOptions,
    *,
    command: str,
    callbacks: Callbacks,
    phases: Phases | None = None,
    tables: Tables | None = None,
    trackers: Trackers | None = None,
) -> Run:
    """Runs what `options` ask for and returns its record. With `dry_run`, returns what would run.

    command: how the run was asked for, for the record. phases: of this process, if it began before. tables: data in
    memory, by the names that options have for them. trackers: follow the log of the run.
    Raises: InputError for what cannot be done; NonFiniteError, DiskFullError, CheckpointError; Interrupted after a
    signal, when all is saved.
    """
    path, phases, place = Path(options.output), phases or Phases(), find_place()
    phases.enter("data")
    with coming(place):
        check_free(path, resume=options.resume)
        check_installed(options.optim)
        check_adapter(options)
        if options.gpus not in (None, "1") and place.count == 1:
            hint = "start the script with torchrun --nproc-per-node N, and leave gpus out"
            raise OptionError(f"--gpus {options.gpus} is of the command line: a script is one process", hint=hint)
        check_tensor_parallel(place, options.tensor_parallel)
        device = choose_device("cuda" if options.gpus is not None else options.device, place.local_rank)
    with (
        entered(place, device_memory(device, options.memory_limit, options.allocator)),
        joined(
            place,
            device,
            note=callbacks.warning,
            asked=asked_of(options, device),
            tensor_parallel=options.tensor_parallel,
        ) as ranks,
    ):
        ranks.pulse.hang_s = options.hang_timeout
        ranks.pulse.follow(phases)
        ranks.pulse.input_s = options.hang_timeout * (1 if options.transform is None else _MORE_FOR_TRANSFORMS)
        if not (ranks.leads or options.dry_run):
            return follow(options, device, ranks)
        if (said := _batch_note(options, ranks.count)) is not None:
            callbacks.note(said)
        try:
            run = _train_on(device, options, command, callbacks, phases, tables, ranks, trackers or Trackers())
            if not ranks.leads:  # it has planned as the leader has
                ranks.hear()
                return run
        except BaseException:
            if ranks.leads:
                with suppress(RanksError):
                    ranks.tell(Order.END)
            raise
        ranks.tell_last(Order.END)
        return run


def _batch_note(options: TrainOptions, count: int) -> str | None:
    """Say that rows of a micro-batch and accumulation make the batch of all processes, where there are several."""
    rows, times = options.per_device_batch_size, options.gradient_accumulation_steps or 1
    if rows is None or count == 1:
        return None
    return (
        f"the effective batch is {rows} x {times} = {rows * times} rows of all {count} processes together; with these"
        f" settings transformers has {rows * times * count}, which is --batch-size {rows * times * count} here"
    )


def _train_on(
    device: torch.device,
    options: TrainOptions,
    command: str,
    callbacks: Callbacks,
    phases: Phases,
    tables: Tables | None,
    ranks: Ranks,
    trackers: Trackers,
) -> Run:
    path = Path(options.output)
    precision = choose_precision(options.precision, device)
    options, prepared = _prepared(options, precision, callbacks, phases, tables)
    if options.dry_run:
        built = build(options, prepared, precision, callbacks, phases, ranks=ranks)
        callbacks.recipe(built.recipe)
        return _record(options, prepared, built, command, run="", status="planned")
    with RunFolder(path) as folder, deterministic(options.deterministic), ExitStack() as stack:
        stack.enter_context(freed_memory_kept(device))
        check_free(path, resume=options.resume)  # again: another process may have been here since, and gone
        before = folder.read() if options.resume else None
        if before is not None:
            check_options(before, options, precision.value)
            if _is_finished(before, path, prepared):
                callbacks.note(_finished_text(before, folder, prepared.num_steps))
                return dataclasses.replace(before, options=dataclasses.asdict(options))  # it may have been moved
            _go_on_longer(before, folder, prepared, options, callbacks)
        baselines = stack.enter_context(closing(Baselines(prepared, options, beside=device.type == "cuda")))
        baselines.begin()
        built, first_batch = _built(options, prepared, precision, callbacks, phases, before, ranks)
        run_id = before.run if before is not None else secrets.token_hex(6)
        run = _record(options, prepared, built, command, run=run_id, status="running")
        run = dataclasses.replace(run, first_batch=first_batch)
        if before is not None:
            _warn_of_differences(before, run, callbacks)
        folder.write(run)
        with (
            EventLog(folder.events, report=callbacks.warning) as events,
            tracked(events, trackers, path, callbacks),
        ):
            context = RunContext(
                options=options,
                prepared=prepared,
                built=built,
                folder=folder,
                events=events,
                callbacks=callbacks,
                phases=phases,
                baselines=baselines,
                record=run,
            )
            return _learn(context)


def _prepared(
    options: TrainOptions, precision: Precision, callbacks: Callbacks, phases: Phases, tables: Tables | None
) -> tuple[TrainOptions, Prepared]:
    """Return the options of a run, those of the run that it goes on with among them, and all that it needs, read and
    found to fit."""
    path, check = Path(options.output), None
    found = RunFolder(path).read() if options.resume else None
    if found is not None:
        options = resumed(options, found)
        check_options(found, options, precision.value)
        check = partial(check_data, found, options)
    prepared = prepare(options, callbacks, phases, check, tables, found)
    if not _is_finished(found, path, prepared):
        num_bytes = bytes_to_save(options, prepared.facts.num_parameters, asked_optimizer(options).state_bytes)
        check_space(path, num_bytes)
    return options, prepared


def _warn_of_differences(before: Run, run: Run, callbacks: Callbacks) -> None:
    """Warn of what differs from where the run began, and changes its last bits."""
    moved = differences_of_machine(before, run)
    if moved:
        masks = " and masks of dropout" if any(each.startswith("processes ") for each in moved) else ""
        callbacks.warning(f"rounding{masks} may differ from here on: {'; '.join(moved)}")


def _learn(context: RunContext) -> Run:
    """Train. What the user must mend, as a function for texts, makes another run: nothing saved, the folder is free."""
    try:
        return TrainingLoop(context).run()
    except InputError:
        context.folder.leave_free()
        raise


def _built(
    options: TrainOptions, prepared: Prepared, precision: Precision, callbacks: Callbacks, phases: Phases,
    before: Run | None, ranks: Ranks,
) -> tuple[Built, FirstBatch]:  # fmt: skip
    """A run that could begin, here and in the processes that follow, and how its first batch compared.

    before: the record of the run that goes on.
    """
    callbacks.stage("loading the model")
    built, first_batch = checked_build(options, prepared, precision, callbacks, phases, ranks)
    if before is not None:
        check_levers(before, built.recipe, options)
    if ranks.reachable:
        ranks.tell(Order.BUILD)
        ranks.spread(path_of(prepared, built))
        callbacks.stage("waiting for the other processes")
        agree(ranks)
        try:
            built = met(built, callbacks)
        except BrimfulError:  # all have met it
            ranks.end_orders()
            raise
    callbacks.recipe(built.recipe)
    return built, first_batch


def _go_on_longer(
    before: Run, folder: RunFolder, prepared: Prepared, options: TrainOptions, callbacks: Callbacks
) -> None:
    """Say what more steps than were asked for before do to the schedule. Raises: CheckpointError if none is left."""
    if before.status == "finished":
        require_checkpoint(folder.path, saved_steps(folder.checkpoints))
    steps_before = num_steps_before(before, prepared.order.batches_per_epoch)
    if (longer := length_note(prepared.num_steps, steps_before, options.lr_scheduler_type)) is not None:
        callbacks.note(longer)
    done = max(saved_steps(folder.checkpoints), default=0)
    if before.status != "finished" and prepared.num_steps < done:
        callbacks.warning(f"{done:,} steps are done, and {prepared.num_steps:,} are asked for: none is left to make")


def _finished_text(run: Run, folder: RunFolder, asked: int) -> str:
    """A line on a run that has no step left to make. asked: steps that this call wants."""
    if asked >= run.steps:
        return "this run had finished; nothing was changed"
    said = f"this run had finished: it has {run.steps:,} steps, and {asked:,} are asked for; nothing was changed"
    earlier = [f"{each:,}" for each in sorted(saved_steps(folder.checkpoints)) if each < run.steps]
    if not earlier:
        return f"{said}; no earlier checkpoint is left to make a model of"
    return f"{said}; brimful export {path_text(folder.path)} --step N makes a model of step {listed(earlier)}"


def _is_finished(run: Run | None, path: Path, prepared: Prepared) -> bool:
    """True where a run in `path` has done all that is asked for."""
    if run is None or run.status != "finished" or not RunFolder(path).model.exists():
        return False
    return prepared.num_steps <= num_steps_before(run, prepared.order.batches_per_epoch)


def _record(options: TrainOptions, prepared: Prepared, built: Built, command: str, *, run: str, status: Any) -> Run:
    packing = built.packing
    return Run(
        run=run,
        status=status,
        model=options.model,
        options=dataclasses.asdict(options),
        command=command,
        labels=prepared.space,
        recipe=built.recipe,
        machine=probe(),
        data_fingerprint=prepared.data_fingerprint,
        data=prepared.report,
        packed=packing.packed,
        packed_reason=packing.reason,
        learning=prepared.learning,
        target_scale=prepared.target_scale,
    )
