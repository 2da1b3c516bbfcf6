"""From what was asked to what runs: the model on its device, every lever with its reason, the step or forward pass.

Training, classification and profiling are put together here. The levers are walked in one list; each makes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brimful.core.callbacks import Callbacks
from brimful.core.options import ClassifyOptions, TrainOptions
from brimful.core.records import LabelSpace, Recipe
from brimful.data.batches.batch import Layout
from brimful.data.batches.prefetch import Source
from brimful.data.tokens.augment import Augmenter
from brimful.engine.prepare import Prepared
from brimful.hardware.probe import device_name
from brimful.levers.attention import Attention
from brimful.levers.dropout import Dropout
from brimful.levers.execution import ExecutionMode
from brimful.levers.float8 import Float8
from brimful.levers.lever import Assembly, Lever
from brimful.levers.optimizer import Optimizer
from brimful.levers.packing import Packing
from brimful.levers.precision import PrecisionLever
from brimful.levers.token_budget import TokenBudget, most_rows
from brimful.levers.weights import Weights
from brimful.models.hub.inspection import ModelFacts
from brimful.models.hub.load import load_model
from brimful.models.packed.packed_forward import LayoutModel, padding_id_of
from brimful.step.forward import Forward, LayoutForward, chunks
from brimful.step.graphs.cache import GraphPool
from brimful.step.graphs.captured_forward import PackedForward
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from brimful.tasks.task import Task

#: All levers, in the order of their lines in the recipe.
LEVERS: tuple[type[Lever], ...] = (
    *(Packing, TokenBudget, PrecisionLever, Float8, Optimizer, Attention, Weights, ExecutionMode, Dropout),
)
#: Batches looked at to choose token budgets.
_LOOKED_AT = 2000
#: Batches, filled to the budget, of texts like the first ones, by which budgets are chosen where those are few.
_FULL_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Facts of a training run that its step is made for.

    batches: lengths of the sequences of each effective batch, of those to come or of as many like them. mean_length: of
    a sequence, in tokens. num_steps: applied ones, the warm-up's among them.
    """

    task: Task
    batches: list[np.ndarray]
    mean_length: float
    max_length: int
    num_steps: int
    num_warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model on its device, and the step that trains it."""

    model: Any
    execution: LayoutModel
    layout: Layout
    step: Step
    precision: Precision
    recipe: Recipe
    packing: Packing


@dataclass(frozen=True, kw_only=True)
class Built(Assembled):
    """A run that could begin."""

    source: Source


@dataclass(frozen=True, kw_only=True)
class AssembledForward:
    """A classifier that could begin. mode: the way it is launched."""

    model: Any
    execution: LayoutModel
    forward: Forward
    precision: Precision
    recipe: Recipe
    packing: Packing
    mode: ExecutionMode


def build(options: TrainOptions, prepared: Prepared, precision: Precision, callbacks: Callbacks) -> Built:
    """Load the model that is to learn, and put together how it does.

    Raises: ModelError for weights that do not fit the model, OptionError for what was asked for and does not work here.
    """
    model = load_model(prepared.facts, prepared.space, head=prepared.alignment.head, seed=options.seed)
    lengths, order = prepared.training.tokens.lengths, prepared.order
    looked_at = min(_LOOKED_AT, prepared.num_batches or prepared.num_steps)
    workload = Workload(
        task=prepared.task,
        batches=[lengths[order.samples(number)] for number in range(looked_at)],
        mean_length=float(lengths.mean()),
        max_length=prepared.max_length,
        num_steps=prepared.num_steps,
        num_warmup_steps=prepared.num_warmup_steps,
    )
    assembled = assemble(model, workload, options, precision, callbacks)
    return Built(**vars(assembled), source=_source(options, prepared, assembled.layout))


def assemble(
    model: Any, workload: Workload, options: TrainOptions, precision: Precision, callbacks: Callbacks, *,
    cache: bool = True,
) -> Assembled:  # fmt: skip
    """Put together how a model in memory learns. Its parameters become the step's.

    cache: whether an equivalence check of the same architecture holds for it too.
    """
    assembly = Assembly(
        options=options,
        model=model,
        precision=precision,
        packing_wanted=options.packing == "auto",
        max_length=workload.max_length,
        typical_length=round(workload.mean_length),
        num_tokens=int(workload.num_steps * options.batch_size * workload.mean_length),
        batches=lambda _: workload.batches,
        schedule=make_schedule(
            options.lr_scheduler_type, options.learning_rate, workload.num_steps, workload.num_warmup_steps
        ),
        warn=callbacks.warning,
        cache=cache,
    )
    recipe = assembly.recipe(LEVERS, device_name(precision.device))
    assert assembly.execution is not None
    assert assembly.layout is not None
    return Assembled(
        model=assembly.model,
        execution=assembly.execution,
        layout=assembly.layout,
        step=_step(assembly, workload.task),
        precision=assembly.precision,
        recipe=recipe,
        packing=assembly.lever(Packing),
    )


def _step(assembly: Assembly, task: Task) -> Step:
    assert assembly.execution is not None
    assert assembly.update is not None
    assert assembly.layout is not None
    mode = assembly.lever(ExecutionMode)
    parts = (assembly.execution, task, assembly.update, assembly.precision)
    if not mode.captured:
        return Step(*parts, seed=assembly.seed)
    return CapturedStep(
        *parts,
        seed=assembly.seed,
        most_tokens=assembly.layout.most_tokens,
        fused=mode.compiled and mode.fused,
        note=assembly.warn,
    )


def _source(options: TrainOptions, prepared: Prepared, layout: Layout) -> Source:
    training, augmenter = prepared.training, None
    if options.transform is not None:
        augmenter = Augmenter(options.transform, prepared.encoder, seed=options.seed, num_workers=options.num_workers)

    def texts(samples: np.ndarray) -> tuple[list[str], list[str] | None]:
        pairs = training.examples.pairs
        return training.examples.texts.take(samples).to_pylist(), (
            None if pairs is None else pairs.take(samples).to_pylist()
        )

    return Source(
        training.tokens, training.targets_N, prepared.task, layout, prepared.order, augmenter=augmenter, texts=texts
    )


def assemble_forward(
    options: ClassifyOptions, facts: ModelFacts, space: LabelSpace, precision: Precision, *, max_length: int,
    lengths_N: np.ndarray, num_tokens: int, packing_wanted: bool, callbacks: Callbacks,
) -> AssembledForward:  # fmt: skip
    """Load a model that is only read, and put together how it is.

    lengths_N: tokens of the first texts of the input, by which kernels and shapes are chosen. num_tokens: of all of it,
    about.
    Raises: ModelError for weights that do not fit the model, OptionError for --execution where it does not work.
    """
    lengths_N = lengths_N[lengths_N > 0]
    assembly = Assembly(
        options=options,
        model=load_model(facts, space, head="kept", seed=0).requires_grad_(False),
        precision=precision,
        packing_wanted=packing_wanted,
        max_length=max_length,
        typical_length=round(float(lengths_N.mean())) if len(lengths_N) else 1,
        num_tokens=num_tokens,
        batches=lambda budget: _batches_like(lengths_N, budget, most_rows(assembly)),
        schedule=None,
        warn=callbacks.warning,
    )
    recipe = assembly.recipe(LEVERS, device_name(precision.device))
    assert assembly.execution is not None
    mode = assembly.lever(ExecutionMode)
    return AssembledForward(
        model=assembly.model,
        execution=assembly.execution,
        forward=_forward(assembly, mode),
        precision=assembly.precision,
        recipe=recipe,
        packing=assembly.lever(Packing),
        mode=mode,
    )


def _batches_like(lengths_N: np.ndarray, budget: int, rows: int) -> Sequence[np.ndarray]:
    """Batches of these texts alone, and of as many like them as fill some: a first file, or what has come of a pipe,
    may be three rows, and a hundred thousand follow."""
    times = -(-_FULL_BATCHES * budget // max(1, int(lengths_N.sum())))
    windows = [lengths_N, np.tile(lengths_N, times)] if times > 1 and len(lengths_N) else [lengths_N]
    batches = [window[members] for window in windows for members in chunks(window, budget, rows)]
    return batches or [np.array([1])]


def _forward(assembly: Assembly, mode: ExecutionMode) -> Forward:
    assert assembly.execution is not None
    if assembly.layout is not None:
        return LayoutForward(
            assembly.execution,
            assembly.layout,
            assembly.precision,
            batch_tokens=assembly.budget,
            most_rows=most_rows(assembly),
        )
    return PackedForward(
        assembly.execution,
        assembly.precision,
        budget=assembly.budget,
        longest=assembly.max_length,
        padding_id=padding_id_of(assembly.model.config),
        typical_length=assembly.typical_length,
        recorder=GraphPool(assembly.device) if mode.captured else None,
        fused=mode.compiled and mode.fused,
        note=assembly.warn,
    )
