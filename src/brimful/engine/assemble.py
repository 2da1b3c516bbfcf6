"""From what was asked to what learns: the model on its device, every lever with its reason, and the step.

Classification walks the same list of levers, in `engine.classification.runner`; each makes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import Learning, Recipe
from brimful.data.batches.batch import Layout
from brimful.data.batches.prefetch import AHEAD, Source
from brimful.data.batches.shares import shares_of
from brimful.data.tokens.augment import Augmenter
from brimful.engine.compilations import CompilationWatch
from brimful.engine.own_loss import own_loss_doubt
from brimful.engine.prepare import Prepared
from brimful.engine.target_scale import check_fold
from brimful.hardware.probe import device_name
from brimful.hardware.ranks import ALONE, Ranks
from brimful.levers.attention import Attention
from brimful.levers.checkpointing import Checkpointing, seeds_dropout
from brimful.levers.data_parallel import DataParallel
from brimful.levers.device_memory import Allocator, MemoryLimit
from brimful.levers.dropout import Dropout
from brimful.levers.execution import ExecutionMode
from brimful.levers.float8 import Float8
from brimful.levers.lever import Assembly, Lever
from brimful.levers.more_room import more_room
from brimful.levers.optimizer import Optimizer
from brimful.levers.packing import Packing, streamed_to
from brimful.levers.parameter_efficient import FrozenWeights, TrainedPart
from brimful.levers.precision import PrecisionLever
from brimful.levers.sharding import Sharding
from brimful.levers.streaming import Streaming
from brimful.levers.tensor_parallel import TensorParallel
from brimful.levers.token_budget import TokenBudget
from brimful.levers.weights import Weights
from brimful.models.hub.inspection import ModelFacts
from brimful.models.hub.load import load_model
from brimful.models.packed.packed_forward import LayoutModel
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.recovery import whole_model_fits
from brimful.step.step import Step, make_schedule
from brimful.step.updates.given_adamw import OwnersAdamW
from brimful.tasks.task import Task

#: All levers, in the order of their lines in the recipe.
LEVERS: tuple[type[Lever], ...] = (
    *(
        TrainedPart,
        Sharding,
        TensorParallel,
        Packing,
        DataParallel,
        TokenBudget,
        Checkpointing,
        PrecisionLever,
        Streaming,
        FrozenWeights,
        Float8,
    ),
    Optimizer,
    *(Attention, Weights, ExecutionMode, Dropout, MemoryLimit, Allocator),
)
#: Batches looked at to choose token budgets.
_LOOKED_AT = 2000


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model on its device, and the step that trains it.

    lengths: of the sequences of batches to come, or like them. longest: most tokens of a sequence to come. adapter:
    peft's wrapper around the model, if any. eager_attention: whether padded rows must have it. remedy: says what to do
    where no micro-batch fits.
    """

    model: Any
    execution: LayoutModel
    layout: Layout
    step: Step
    precision: Precision
    recipe: Recipe
    packing: Packing
    lengths: Sequence[np.ndarray]
    longest: int
    adapter: Any = None
    eager_attention: bool = False
    remedy: Callable[[], str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Built(Assembled):
    """A run that could begin. compilations: of its step, its comparison with the plain model included."""

    source: Source
    compilations: CompilationWatch

    @property
    def ahead(self) -> int:
        """Batches that a thread makes ahead of the step. None where one process replays steps: it has time to make each
        itself, and a thread would take Python's lock from it."""
        is_idle = self.step.captures and self.step.ranks.count == 1
        return 0 if is_idle and self.source.quick else self.source.ahead


def build(
    options: TrainOptions, prepared: Prepared, precision: Precision, callbacks: Callbacks, phases: Phases | None = None,
    *, eager_attention: bool = False, attention: str | None = None, ranks: Ranks = ALONE,
) -> Built:  # fmt: skip
    """Load the model that is to learn, and put together how it does.

    eager_attention, attention, ranks: as of `assemble`.
    Raises: ModelError for weights that do not fit the model, OptionError for what was asked for and does not work here.
    """
    phases = phases or Phases()
    phases.enter("model")
    head, folder = prepared.alignment.head, streamed_to(options)
    model = load_model(prepared.facts, prepared.space, head=head, seed=options.seed, folder=folder)
    if prepared.target_scale is not None:
        check_fold(model, prepared.target_scale)
    if prepared.facts.runs_own_code and (doubt := own_loss_doubt(model, prepared.space)) is not None:
        callbacks.warning(doubt)
    phases.enter("setup")
    lengths, order = prepared.training.tokens.lengths, prepared.order
    looked_at = min(_LOOKED_AT, prepared.num_batches or prepared.num_steps)
    assembled = assemble(
        model,
        options,
        precision,
        callbacks,
        task=prepared.task,
        batches=[part for number in range(looked_at) for part in _parts(lengths[order.samples(number)], ranks)],
        mean_length=float(lengths.mean()),
        max_length=prepared.max_length,
        longest=int(lengths.max()) if options.transform is None else prepared.max_length,
        num_steps=prepared.num_steps,
        learning=prepared.learning,
        eager_attention=eager_attention,
        attention=attention,
        loaded=prepared.facts,
        ranks=ranks,
    )
    source, compilations = _source(options, prepared, assembled.layout, ranks), CompilationWatch(assembled.step)
    return Built(**vars(assembled), source=source, compilations=compilations)


def assemble(
    model: Any, options: TrainOptions, precision: Precision, callbacks: Callbacks, *, task: Task,
    batches: list[np.ndarray], mean_length: float, max_length: int, longest: int, num_steps: int,
    learning: Learning, cache: bool = True, eager_attention: bool = False, attention: str | None = None,
    loaded: ModelFacts | None = None,
    optimizer: torch.optim.Optimizer | OwnersAdamW | Literal["elsewhere"] | None = None, ranks: Ranks = ALONE,
) -> Assembled:  # fmt: skip
    """Put together how a model in memory learns. Its parameters become the step's.

    batches: lengths of the sequences of each effective batch, of those to come or of as many like them. mean_length: of
    a sequence, in tokens. max_length, longest: most tokens that a sequence may have, and that one will have. num_steps:
    applied ones, the warm-up's among them. learning: peak and warm-up of the schedule. cache: whether an equivalence
    check of the same architecture holds for it too. eager_attention, attention, optimizer: as of `Assembly`. loaded:
    facts of the files that the model was read from, if it can be again. ranks: processes that take each step together.
    """
    assembly = Assembly(
        options=options,
        model=model,
        precision=precision,
        max_length=max_length,
        typical_length=round(mean_length),
        num_tokens=int(num_steps * options.batch_size * mean_length),
        batches=lambda _: batches,
        schedule=make_schedule(options.lr_scheduler_type, learning.learning_rate, num_steps, learning.num_warmup_steps),
        warn=callbacks.warning,
        cache=cache,
        eager_attention=eager_attention,
        attention=attention,
        new_parameters=() if loaded is None else loaded.new_parameters,
        base_name="" if loaded is None else loaded.base_name,
        weights_on_disk=loaded is not None,
        optimizer=optimizer,
        ranks=ranks,
    )
    with whole_model_fits(precision.device, lambda: more_room(assembly, in_a_step=False)):
        recipe = assembly.recipe(LEVERS, device_name(precision.device))
        execution, layout = assembly.execution, assembly.layout
        assert execution is not None
        assert layout is not None
        step = _step(assembly, execution, layout, task, ranks)
    say_what_compiles(assembly, callbacks)
    return Assembled(
        model=assembly.model,
        execution=execution,
        layout=layout,
        step=step,
        precision=assembly.precision,
        recipe=recipe,
        packing=assembly.lever(Packing),
        lengths=batches,
        longest=longest,
        adapter=assembly.adapter,
        eager_attention=eager_attention,
        remedy=lambda: more_room(assembly, in_a_step=True),
    )


def say_what_compiles(assembly: Assembly, callbacks: Callbacks) -> None:
    """Say, before the first step or pass, how long it may wait for torch's compiler."""
    if seconds := assembly.lever(ExecutionMode).compile_seconds(assembly):
        callbacks.stage(f"compiling layers: {seconds:.0f} s or more where this machine has not compiled them before")


def _step(assembly: Assembly, execution: LayoutModel, layout: Layout, task: Task, ranks: Ranks) -> Step:
    """Return the step that `assembly` describes: captured, or launched by the host."""
    mode, update, seeded_dropout = assembly.lever(ExecutionMode), assembly.update, seeds_dropout(assembly)
    assert update is not None
    update.pass_tokens = layout.most_tokens if assembly.lever(Packing).packed else 0
    parts, together = (execution, task, update, assembly.precision), assembly.find(DataParallel)
    shared: dict[str, Any] = {"seed": assembly.seed, "seeded_dropout": seeded_dropout, "ranks": ranks}
    if together is not None:
        shared |= {"half_wire": together.half, "overlap": together.overlap}
    if not mode.captured:
        return Step(*parts, **shared)
    return CapturedStep(
        *parts,
        **shared,
        most_tokens=layout.most_tokens,
        precompile=mode.fused and not update.gathers_weights,
        note=assembly.warn,
    )


def _parts(lengths_N: np.ndarray, ranks: Ranks) -> list[np.ndarray]:
    """Lengths of the rows of a batch that each process takes."""
    if ranks.data_count == 1:
        return [lengths_N]
    return [lengths_N[rows] for rows in shares_of(lengths_N, ranks.data_count) if len(rows)]


def _source(options: TrainOptions, prepared: Prepared, layout: Layout, ranks: Ranks) -> Source:
    training, augmenter = prepared.training, None
    if options.transform is not None:
        augmenter = Augmenter(options.transform, prepared.encoder, seed=options.seed, num_workers=options.num_workers)

    def texts(samples: np.ndarray) -> tuple[list[str], list[str] | None]:
        pairs = training.examples.pairs
        return training.examples.texts.take(samples).to_pylist(), (
            None if pairs is None else pairs.take(samples).to_pylist()
        )

    return Source(
        training.tokens,
        training.targets_N,
        prepared.task,
        layout,
        prepared.order,
        augmenter=augmenter,
        texts=texts,
        ahead=options.prefetch or AHEAD,
        quick=options.prefetch is None and augmenter is None,
        weights_N=training.examples.weights,
        part=(ranks.data_rank, ranks.data_count),
    )
