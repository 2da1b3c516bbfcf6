"""Load a saved classifier: check its files, move its weights to the device, choose its fast path.

What it then runs is `Runner.submit`: tokenised texts in, logits out. What logits mean is the business of
`tasks.answers`, where texts come from and answers go that of `classify.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from brimful.core.callbacks import Callbacks
from brimful.core.errors import ModelError, printable
from brimful.core.options.choices import ExecutionChoice
from brimful.core.options.classify import ClassifyOptions
from brimful.core.records import LabelSpace, OutOfMemory, Recipe
from brimful.data.batches.batch import PaddedLayout
from brimful.data.tokens.encoder import Encoder, Tokens
from brimful.engine.assemble import LEVERS, say_what_compiles
from brimful.engine.prepare import make_encoder
from brimful.engine.sequence_lengths import Longest, longest_to_read
from brimful.hardware.probe import device_name
from brimful.levers.execution import ExecutionMode
from brimful.levers.lever import Assembly
from brimful.levers.packing import Packing, streamed_to
from brimful.levers.token_budget import most_rows
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer
from brimful.models.hub.load import load_model
from brimful.models.model_stats import Attention, attention_of, matmul_parameters
from brimful.models.packed.packed_forward import PaddedModel, padding_id_of
from brimful.models.packed.streamed_layers import end_streaming
from brimful.step.forward import Forward, LayoutForward, chunks
from brimful.step.graphs.cache import GraphPool
from brimful.step.graphs.captured_forward import PackedForward, PaddedForward
from brimful.step.precision import Precision
from brimful.step.recovery import OutOfMemoryLog, whole_model_fits
from brimful.tasks.answers import label_space


class Result(Protocol):
    """Logits that may still be on their way."""

    @property
    def busy_s(self) -> float:
        """Seconds that they took, once they are there."""
        ...

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the texts, NaN for those without tokens."""
        ...


#: Batches, filled to the budget, of texts like the first ones, by which budgets are chosen where those are few.
_FULL_BATCHES = 4
#: Shapes are chosen for sequences of this many tokens at least, and for longer ones where the first texts have them.
_USUAL_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A model whose files are whole and whose task is known; its weights are still where they are."""

    facts: ModelFacts
    space: LabelSpace
    tokenizer: Any
    encoder: Encoder
    longest: Longest

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens."""
        return self.longest.tokens


def check_model(options: ClassifyOptions) -> Checked:
    """The model that was asked for, before its weights are read.

    Raises: ModelError for one without a classification head, InputError for anything else that cannot be done.
    """
    facts = inspect_model(options.model, trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle)
    if not facts.has_head:
        raise ModelError(
            f"{printable(options.model)} has no classification head: {facts.head_note}",
            hint="fine-tune it first: brimful train",
        )
    longest = longest_to_read(options.max_length, facts, options.model)
    tokenizer = load_tokenizer(facts)
    encoder = make_encoder(tokenizer, facts, longest.tokens)
    return Checked(facts=facts, space=label_space(facts.config), tokenizer=tokenizer, encoder=encoder, longest=longest)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A classifier on its device. execution: the way it is launched, as an option has it."""

    model: Any
    forward: Forward
    precision: Precision
    recipe: Recipe
    packing: Packing
    execution: ExecutionChoice

    def submit(self, tokens: Tokens) -> Result:
        """Start on a window of texts."""
        return self.forward.submit(tokens)

    def operations(self, lengths_N: np.ndarray) -> float:
        """Floating-point operations of a pass over texts of these lengths, without padding; 0 where unknown."""
        parameters, attention = self._counted
        return (
            0.0 if attention is None else 2.0 * parameters * float(lengths_N.sum()) + attention.flops(lengths_N) / 3.0
        )

    @property
    def token_operations(self) -> float:
        """Floating-point operations of a token, without attention."""
        return 2.0 * self._counted[0]

    @cached_property
    def _counted(self) -> tuple[int, Attention | None]:
        return matmul_parameters(self.model), attention_of(self.model)


def _loaded(checked: Checked, options: ClassifyOptions) -> Any:
    folder = streamed_to(options)
    model = load_model(checked.facts, checked.space, head="kept", seed=0, folder=folder, answers=True)
    return model.requires_grad_(False)


def make_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, *, sample: Tokens, num_tokens: int,
    callbacks: Callbacks, hear: Callable[[OutOfMemory], None] | None = None, model: Any = None,
    packing_refused: bool = False, plain: bool = False,
) -> Runner:  # fmt: skip
    """Load the weights of a checked model, unless it is in memory as `model`, and put together how they run.

    sample: the first texts of the input, by which kernels and shapes are chosen. num_tokens: of the whole input, about.
    hear: called with each time that memory runs out; without it, they are said by `callbacks`.
    packing_refused: as of `Assembly`. plain: as of `PaddedModel`, for padded rows.
    Raises: ModelError for weights that do not fit the model, OptionError for --execution where it does not work.
    """
    lengths_N = sample.lengths[sample.lengths > 0]
    end_streaming(model, moved=options.stream_weights == "none")
    assembly = Assembly(
        options=options,
        model=model or _loaded(checked, options),
        precision=precision,
        max_length=checked.max_length,
        shaped_length=_shaped_length(lengths_N, checked.max_length),
        typical_length=round(float(lengths_N.mean())) if len(lengths_N) else 1,
        num_tokens=num_tokens,
        batches=lambda budget: _batches_like(lengths_N, budget, most_rows(assembly)),
        schedule=None,
        warn=callbacks.warning,
        packing_refused=packing_refused,
    )
    with whole_model_fits(precision.device, lambda: _more_room(options, precision, "")):
        recipe = assembly.recipe(LEVERS, device_name(precision.device))
    if isinstance(assembly.execution, PaddedModel):
        assembly.execution.plain = plain
    forward = _forward(assembly)
    forward.remedy = lambda: _more_room(options, precision, "lower --max-length, or ")
    forward.hear = hear or OutOfMemoryLog(warn=callbacks.warning)
    forward.refused = lambda error: callbacks.warning(f"{error}; rows like these have no answer")
    say_what_compiles(assembly, callbacks)
    return Runner(
        model=assembly.model,
        forward=forward,
        precision=assembly.precision,
        recipe=recipe,
        packing=assembly.lever(Packing),
        execution=cast(ExecutionChoice, assembly.lever(ExecutionMode).value),
    )


def _more_room(options: ClassifyOptions, precision: Precision, besides: str) -> str | None:
    """Levers that are not on and would save memory, as the hint of an error; None where there are none."""
    on_gpu = precision.device.type == "cuda"
    added = ["--precision bf16"] if on_gpu and precision.half is None else []
    if on_gpu and options.stream_weights == "none":
        added.append("--stream-weights host, whose answers are the same bytes")
    return f"{besides}add {' or '.join(added)}" if added else None


def _shaped_length(lengths_N: np.ndarray, max_length: int) -> int:
    """The longest sequence that shapes are chosen for: a model that takes 8,192 tokens is seldom given so many."""
    longest = int(lengths_N.max(initial=1))
    return min(max_length, max(_USUAL_LENGTH, 1 << (longest - 1).bit_length()))


def _batches_like(lengths_N: np.ndarray, budget: int, rows: int) -> Sequence[np.ndarray]:
    """Batches of these texts alone, and of as many like them as fill some: a first file, or what has come of a pipe,
    may be three rows, and a hundred thousand follow."""
    times = -(-_FULL_BATCHES * budget // max(1, int(lengths_N.sum())))
    windows = [lengths_N, np.tile(lengths_N, times)] if times > 1 and len(lengths_N) else [lengths_N]
    batches = [window[members] for window in windows for members in chunks(window, budget, rows)]
    return batches or [np.array([1])]


def _forward(assembly: Assembly) -> Forward:
    execution, mode = assembly.execution, assembly.lever(ExecutionMode)
    assert execution is not None
    recorder = GraphPool(assembly.device) if mode.captured else None
    layout = assembly.layout
    if isinstance(layout, PaddedLayout) and layout.split and assembly.device.type == "cuda":
        return PaddedForward(
            execution,
            assembly.precision,
            budget=assembly.budget,
            longest=assembly.max_length,
            padding_id=layout.padding_id,
            recorder=recorder,
            note=assembly.warn,
        )
    if layout is not None:
        return LayoutForward(
            execution,
            layout,
            assembly.precision,
            batch_tokens=assembly.budget,
            most_rows=most_rows(assembly),
            alike=not assembly.lever(Packing).equivalence.independent,
        )
    return PackedForward(
        execution,
        assembly.precision,
        budget=assembly.budget,
        longest=assembly.usual_length,
        padding_id=padding_id_of(assembly.model.config),
        typical_length=assembly.typical_length,
        recorder=recorder,
        fused=mode.compiled and mode.fused,
        note=assembly.warn,
    )
