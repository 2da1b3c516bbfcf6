"""From what was asked to what runs: the model on its device, every lever with its reason, the step and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.options import TrainOptions
from brimful.core.records import Lever, Recipe
from brimful.data.batches.batch import Layout, PackedLayout, PaddedLayout, Sampler
from brimful.data.batches.packing import TILE, choose_budgets, length_buckets
from brimful.data.batches.prefetch import Source
from brimful.data.tokens.augment import Augmenter
from brimful.engine.prepare import Part, Prepared
from brimful.hardware.probe import device_name
from brimful.levers.attention import AttentionKernels, choose_kernels, measure_attention, padded_lever
from brimful.levers.execution import ExecutionMode, choose_execution
from brimful.levers.float8 import choose_float8
from brimful.levers.optimizer import choose_optimizer
from brimful.levers.packing import Packing
from brimful.levers.precision import lever as precision_lever
from brimful.models.hub.load import load_model
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from brimful.models.packed.packed_forward import Execution, padding_id_of
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from brimful.tasks.task import Task

#: Most tokens of a micro-batch unless --token-budget says otherwise: on a GPU enough to fill it, on a CPU few enough
#: to stay near the caches.
_DEFAULT_BUDGET = {"cuda": 32768, "cpu": 4096}
#: Batches looked at to choose token budgets.
_LOOKED_AT = 2000


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
    execution: Execution
    layout: Layout
    step: Step
    precision: Precision
    recipe: Recipe
    packing: Packing


@dataclass(frozen=True, kw_only=True)
class Built(Assembled):
    """A run that could begin."""

    source: Source


def build(options: TrainOptions, prepared: Prepared, precision: Precision, callbacks: Callbacks) -> Built:
    """Loads the model and puts together how it runs.

    Raises: ModelError for weights that do not fit the model.
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
    model: Any,
    workload: Workload,
    options: TrainOptions,
    precision: Precision,
    callbacks: Callbacks,
    *,
    cache: bool = True,
) -> Assembled:
    """Puts together how a model in memory runs. Its parameters become the step's.

    cache: whether an equivalence check of the same architecture holds for it too.
    """
    device, typical_length = precision.device, round(workload.mean_length)
    measured = measure_attention(model, precision, typical_length) if options.packing == "auto" else None
    kernels = choose_kernels(model.config, precision, typical_length, measured)
    equivalence = check_equivalence(
        model,
        max_length=workload.max_length,
        device=device,
        precision=precision.value,
        typical_length=typical_length,
        attention=kernels.fastest,
        cache=cache,
    )
    packing = Packing(equivalence=equivalence, wanted=options.packing == "auto")
    model = model.to(device).train()
    execution = packing.apply(model)
    layout, budget_lever = make_layout(
        packing,
        kernels,
        precision,
        model.config,
        batches=workload.batches,
        batch_size=options.batch_size,
        max_length=workload.max_length,
        token_budget=options.token_budget,
    )
    schedule = make_schedule(
        options.lr_scheduler_type, options.learning_rate, workload.num_steps, workload.num_warmup_steps
    )
    mode = choose_execution(
        options.execution,
        device,
        model,
        num_tokens=int(workload.num_steps * options.batch_size * workload.mean_length),
        packed=packing.packed,
        fixed=kernels.unfixed,
        float8=precision.value == "fp8",
    )
    precision = _with_float8(precision, equivalence, layout, mode, callbacks)
    mode.apply(execution, fused=kernels.fused, note=callbacks.warning)
    optimizer = choose_optimizer(options, model)
    update = optimizer.apply(
        model, schedule, precision, max_grad_norm=options.max_grad_norm, half_weights=equivalence.half_weights
    )
    arguments = (execution, workload.task, update, precision)
    step = (
        CapturedStep(
            *arguments,
            most_tokens=layout.most_tokens,
            fused=mode.compiled and kernels.fused,
            note=callbacks.warning,
            seed=options.seed,
        )
        if mode.captured and update.on_device
        else Step(*arguments, seed=options.seed)
    )
    levers = (
        packing.lever(),
        budget_lever,
        precision_lever(precision),
        optimizer.lever(),
        kernels.lever() if packing.packed else padded_lever(model),
    )
    return Assembled(
        model=model,
        execution=execution,
        layout=layout,
        step=step,
        precision=precision,
        recipe=Recipe(device=device_name(device), levers=(*levers, mode.lever(), _dropout())),
        packing=packing,
    )


def make_layout(
    packing: Packing,
    kernels: AttentionKernels,
    precision: Precision,
    config: Any,
    *,
    batches: list[np.ndarray],
    batch_size: int,
    max_length: int,
    token_budget: int | None,
) -> tuple[Layout, Lever]:
    """Layout of batches for this model, and its lever.

    config: of the loaded model. batches: lengths of the sequences of batches as they will come. batch_size: most
    sequences of a batch.
    """
    largest = token_budget or _largest_budget(config, precision)
    padding_id = padding_id_of(config)
    if packing.packed:
        budgets = choose_budgets(batches, largest, max_length)
        value = ", ".join(str(b) for b in budgets.tokens)
        reason = f"tokens of a micro-batch, from the data's lengths; {100 * budgets.fill:.1f} % filled"
        packed = PackedLayout(
            budgets=budgets,
            num_slots=batch_size,
            max_length=max_length,
            padding_id=padding_id,
            groups=kernels.needs_groups,
            typical_length=kernels.typical_length,
            attention=kernels.fastest,
        )
        return packed, Lever(name="token_budget", value=value, arithmetic="exact", reason=reason)
    split = packing.equivalence.independent
    lengths = length_buckets(max_length)
    reason = f"rows of {lengths[0]} to {lengths[-1]} tokens by length" if split else packing.equivalence.reason
    padded = PaddedLayout(
        lengths=lengths, num_tokens=max(largest, max_length), num_rows=batch_size, padding_id=padding_id, split=split
    )
    value = str(largest) if split else "whole batch"
    return padded, Lever(name="token_budget", value=value, arithmetic="exact", reason=reason)


def _largest_budget(config: Any, precision: Precision) -> int:
    """Most tokens of a micro-batch: the default of the device, or what its free memory holds of activations.

    34 bytes a hidden unit, layer and token in half precision (Korthikanti et al. 2022, arXiv 2205.05198, without the
    scores that variable-length attention does not keep), a third more for what the formula leaves out, on half of what
    is free once the optimizer has taken its part.
    """
    default = _DEFAULT_BUDGET[precision.device.type]
    width, depth = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if precision.device.type != "cuda" or not isinstance(width, int) or not isinstance(depth, int):
        return default
    free_bytes, _ = torch.cuda.mem_get_info(precision.device)
    token_bytes = 45 * width * depth * (precision.dtype.itemsize // 2)
    return max(TILE, min(default, free_bytes // 2 // token_bytes // TILE * TILE))


def _with_float8(
    precision: Precision, equivalence: Equivalence, layout: Layout, mode: ExecutionMode, callbacks: Callbacks
) -> Precision:
    """The precision with its plan where fp8 was asked for; bf16, which is said, where none of it is used."""
    num_tokens = layout.budgets.tokens[-1] if isinstance(layout, PackedLayout) else 0
    found = choose_float8(precision, equivalence, num_tokens=num_tokens, fused=mode.compiled)
    if found.value != precision.value:
        callbacks.warning(f"products run in {found.value}: {found.reason}")
    return found


def _source(options: TrainOptions, prepared: Prepared, layout: Layout) -> Source:
    training: Part = prepared.training
    augmenter = None
    if options.transform is not None:
        augmenter = Augmenter(options.transform, prepared.encoder, seed=options.seed, num_workers=options.num_workers)

    def texts(samples: np.ndarray) -> tuple[list[str], list[str] | None]:
        pairs = training.examples.pairs
        return training.examples.texts.take(samples).to_pylist(), (
            None if pairs is None else pairs.take(samples).to_pylist()
        )

    order: Sampler = prepared.order
    return Source(training.tokens, training.targets_N, prepared.task, layout, order, augmenter=augmenter, texts=texts)


def _dropout() -> Lever:
    return Lever(
        name="dropout",
        value="by (seed, batch, micro-batch)",
        arithmetic="exact",
        reason="masks repeat on resume; they change with the split into micro-batches",
    )
