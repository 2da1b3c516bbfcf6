"""A row by brimful: the steps of `brimful train`, made by the parts that it is wired of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from brimful.benchmarking.figures import Blocks, figures
from brimful.benchmarking.workload import Work, useful_flops
from brimful.core.bench import Measured, Steps
from brimful.core.callbacks import Callbacks
from brimful.core.phases import Phases
from brimful.core.records import Arithmetic, OutOfMemory, Recipe
from brimful.data.batches.prefetch import Feed
from brimful.engine.assemble import Built
from brimful.engine.first_batch import checked_build
from brimful.engine.fitted_step import FittedStep
from brimful.hardware.device_memory import device_memory
from brimful.hardware.process_settings import deterministic, freed_memory_kept
from brimful.levers.optimizer_names import check_installed
from brimful.levers.precision import choose_precision
from brimful.measurement.memory import MemoryWatch
from brimful.step.recovery import out_of_memory_text

#: Steps that may be in flight while the host goes on: as in training.
_IN_FLIGHT = 2


def measure_ours(
    work: Work, steps: Steps, callbacks: Callbacks, told: Callable[[int], None], until: float | None = None
) -> Measured:
    """Train for some steps and time them. told: called with the steps done so far. until: as of `Blocks`.

    Raises: what training raises.
    """
    options, device = work.options, work.device
    check_installed(options.optim)
    limits = device_memory(device, options.memory_limit, options.allocator)
    with limits, deterministic(options.deterministic), freed_memory_kept(device):
        precision = choose_precision(options.precision, device)
        built, checked = checked_build(options, work.prepared, precision, callbacks, Phases())
        memory = MemoryWatch(device, built.step.memory, limit=options.memory_limit)
        for each in checked.fallbacks:
            callbacks.warning(f"{each} was not equal to the plain model on the first batch, and a slower path ran")
        if not built.packing.packed and options.packing != "off":
            callbacks.warning(f"not packed: {built.packing.reason}")
        blocks = Blocks(until=until)
        _run(built, steps, callbacks, told, blocks)
        peak = memory.peak()
    steps = blocks.done(steps)
    timed = range(steps.warm_up, steps.total)
    lengths = work.lengths(timed)
    return figures(
        blocks,
        steps,
        lengths=lengths,
        flops=useful_flops(built.model, lengths),
        precision=built.precision.value,
        arithmetic=arithmetic_of(built.recipe),
        peak=peak,
        recipe=built.recipe,
    )


def arithmetic_of(recipe: Recipe) -> Arithmetic:
    """The least exact class of a recipe's levers."""
    classes = {lever.arithmetic for lever in recipe.levers}
    return "training" if "training" in classes else "rounding" if "rounding" in classes else "exact"


def _run(built: Built, steps: Steps, callbacks: Callbacks, told: Callable[[int], None], blocks: Blocks) -> None:
    """Read times at the edges of blocks, when the device has done all that it was told; losses and computed tokens."""
    flying, device = deque[Any](), built.step.device

    def hear(found: OutOfMemory) -> None:
        built.source.layout = fitted.layout
        callbacks.warning(out_of_memory_text(found))

    fitted, losses = FittedStep(built, hear), list[float]()

    def land() -> None:
        losses.append(flying.popleft().read().loss)
        if len(losses) == 1:
            blocks.first_step_at = time.perf_counter()
        told(len(losses))

    with closing(built.source) as source, Feed(source, device, stop=steps.total, ahead=built.ahead) as feed:
        for number, batch in enumerate(feed, 1):
            flying.append(fitted.run(batch))
            if number > steps.warm_up:
                blocks.computed_tokens += batch.num_computed
            if len(flying) > _IN_FLIGHT:
                land()
            if number >= steps.warm_up and (number - steps.warm_up) % steps.block == 0:
                while flying:
                    land()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                blocks.mark()
                if blocks.is_over(steps):
                    break
    if len(losses) == steps.total:
        blocks.losses = losses[-steps.block :]
