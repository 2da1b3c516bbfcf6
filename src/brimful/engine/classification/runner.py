"""Load a saved classifier: check its files, move its weights to the device, choose its fast path.

What it then runs is `Runner.submit`: tokenised texts in, logits out. What logits mean is the business of
`tasks.answers`, where texts come from and answers go that of `classify.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
from torch import nn

from brimful.core.callbacks import Callbacks
from brimful.core.errors import ModelError, printable
from brimful.core.options import ClassifyOptions, ExecutionChoice
from brimful.core.records import LabelSpace, Lever, Recipe
from brimful.data.tokens.encoder import Encoder, Tokens
from brimful.engine.assemble import make_layout
from brimful.engine.prepare import longest_sequence
from brimful.hardware.probe import device_name
from brimful.levers.attention import AttentionKernels, choose_kernels, padded_lever
from brimful.levers.execution import ExecutionMode, choose_forward
from brimful.levers.float8 import choose_float8
from brimful.levers.packing import Packing
from brimful.levers.precision import lever as precision_lever
from brimful.models.half_weights import halve_linears
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer
from brimful.models.hub.load import load_model
from brimful.models.model_stats import Attention, attention_of, matmul_parameters
from brimful.models.onednn_prepack import can_reorder, reorder_linears
from brimful.models.packed.equivalence import check_equivalence
from brimful.models.packed.packed_forward import Execution, has_token_types, padding_id_of
from brimful.step.forward import Forward, LayoutForward, chunks
from brimful.step.graphs.cache import GraphPool
from brimful.step.graphs.captured_forward import PackedForward
from brimful.step.precision import Precision
from brimful.tasks.answers import label_space

#: Batches, filled to the budget, of texts like the first ones, by which budgets are chosen where those are few.
_FULL_BATCHES = 4
#: Texts laid out in one micro-batch at the most, where shapes need not repeat.
_MOST_TEXTS = 512
#: Most tokens of a micro-batch on a GPU unless --token-budget says otherwise.
_GPU_BUDGET = 32768
#: On a CPU: the least and the most, and numbers that the widest activation may have where that is between them.
_CPU_BUDGETS, _CPU_ACTIVATION = (1024, 4096), 3 << 19


class Result(Protocol):
    """Logits that may still be on their way."""

    @property
    def busy_s(self) -> float:
        """Seconds that they took, once they are there."""
        ...

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the texts, NaN for those without tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A model whose files are whole and whose task is known; its weights are still where they are."""

    facts: ModelFacts
    space: LabelSpace
    tokenizer: Any
    encoder: Encoder
    max_length: int


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
    max_length = longest_sequence(options.max_length, facts, options.model)
    tokenizer = load_tokenizer(facts)
    encoder = Encoder.from_tokenizer(tokenizer, max_length, with_types=has_token_types(facts.config))
    return Checked(
        facts=facts, space=label_space(facts.config), tokenizer=tokenizer, encoder=encoder, max_length=max_length
    )


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A classifier on its device. execution_mode: how it is launched, an ExecutionChoice."""

    forward: Forward
    execution: Execution
    precision: Precision
    recipe: Recipe
    packing: Packing
    execution_mode: ExecutionChoice

    def submit(self, tokens: Tokens) -> Result:
        """Starts on a window of texts."""
        return self.forward.submit(tokens)

    def operations(self, lengths_N: np.ndarray) -> float | None:
        """Floating-point operations of a forward pass over texts of these lengths, padding not counted."""
        parameters, attention = self._counted
        if attention is None:
            return None
        return 2.0 * parameters * float(lengths_N.sum()) + attention.flops(lengths_N) / 3.0

    @cached_property
    def _counted(self) -> tuple[int, Attention | None]:
        return matmul_parameters(self.execution.model), attention_of(self.execution.model)


def make_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, *, sample: Tokens, num_tokens: int,
    packing_wanted: bool, callbacks: Callbacks,
) -> Runner:  # fmt: skip
    """Loads the weights and puts together how they run.

    sample: the first texts of the input, by whose lengths kernels and shapes are chosen. num_tokens: of the whole
    input, about.
    Raises: ModelError for weights that do not fit the model, OptionError for --execution where it does not work.
    """
    loaded = _load(checked, precision, sample, packing_wanted)
    packing, kernels, execution = loaded.packing, loaded.kernels, loaded.execution
    model = execution.model
    graphs = packing.packed and kernels.unfixed is None and precision.device.type == "cuda"
    asked = options.execution
    if asked == "auto" and graphs and precision.value == "fp8":
        asked = "compiled"  # fp8 is of fused layers
    mode = choose_forward(
        asked, precision.device, model, num_tokens=num_tokens, packed=packing.packed, fixed=kernels.unfixed
    )
    mode.apply(execution, fused=kernels.fused, note=callbacks.warning, forward_only=True)
    default = cpu_budget(model, checked.max_length) if precision.device.type == "cpu" else _GPU_BUDGET
    budget_tokens = options.token_budget or default
    precision = _with_float8(precision, packing, mode if graphs else None, budget_tokens, callbacks)
    loaded = replace(loaded, precision=precision)
    if graphs:
        forward, budget = _graphs(checked, loaded, mode, budget_tokens, callbacks)
    else:
        forward, budget = _layout(checked, loaded, budget_tokens)
    attention = kernels.lever() if packing.packed else padded_lever(model)
    return Runner(
        forward=forward,
        execution=execution,
        precision=precision,
        recipe=Recipe(
            device=device_name(precision.device),
            levers=(packing.lever(), budget, precision_lever(precision), attention, *loaded.weights, mode.lever()),
        ),
        packing=packing,
        execution_mode=cast(ExecutionChoice, mode.value),
    )


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A model on its device.

    weights: the lever, if they were reordered. lengths_N: tokens of the texts that its kernels were chosen by, at least
    one each.
    """

    execution: Execution
    packing: Packing
    kernels: AttentionKernels
    precision: Precision
    weights: tuple[Lever, ...]
    lengths_N: np.ndarray


def _load(checked: Checked, precision: Precision, sample: Tokens, packing_wanted: bool) -> _Loaded:
    model = load_model(checked.facts, checked.space, head="kept", seed=0).requires_grad_(False)
    lengths_N = sample.lengths[sample.lengths > 0]
    typical_length = round(float(lengths_N.mean())) if len(lengths_N) else 1
    equivalence = check_equivalence(
        model,
        max_length=checked.max_length,
        device=precision.device,
        precision=precision.value,
        typical_length=typical_length,
    )
    packing = Packing(equivalence=equivalence, wanted=packing_wanted)
    model = model.to(precision.device).eval()
    halved = packing.packed and equivalence.half_weights
    weights: tuple[Lever, ...] = ()
    # Never those of the plain model that the others are compared with, which is asked for without packing.
    if packing_wanted and precision.device.type == "cpu" and (halved or precision.value == "fp32"):
        weights = _reordered(model, precision, checked.max_length)
    if halved:
        halve_linears(model, precision.dtype)  # what is still as it was
    return _Loaded(
        execution=packing.apply(model),
        packing=packing,
        kernels=choose_kernels(model.config, precision, typical_length),
        precision=precision,
        weights=weights,
        lengths_N=lengths_N,
    )


def _reordered(model: nn.Module, precision: Precision, max_length: int) -> tuple[Lever, ...]:
    """Puts Linear weights in the order that a CPU's products read, where that works; the lever of it."""
    dtype = precision.dtype
    rows = cpu_budget(model, max_length)
    if not can_reorder(dtype) or not reorder_linears(model, dtype, rows=rows, max_length=max_length):
        return ()
    reason = "Linear layers keep their weights in the order that oneDNN's products read"
    return (Lever(name="weights", value="reordered", arithmetic="exact", reason=reason),)


def cpu_budget(model: nn.Module, longest: int) -> int:
    """Most tokens that a CPU should compute at once: as many as leave its activations in the cache.

    Of narrow models more, whose many calls would cost more. Measured: token_budgets.md in benchmarks/classification.
    longest: tokens of the longest sequence there can be.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = (p for p in model.parameters() if p.ndim == 2 and id(p) not in embedded)
    widest = max((max(p.shape) for p in products), default=1)
    least, most = _CPU_BUDGETS
    return max(longest, least, min(most, _CPU_ACTIVATION // widest))


def _with_float8(
    precision: Precision, packing: Packing, mode: ExecutionMode | None, budget: int, callbacks: Callbacks
) -> Precision:
    """The precision with its plan where fp8 was asked for; bf16, which is said, where none of it is used."""
    fused = mode is not None and mode.compiled
    found = choose_float8(precision, packing.equivalence, num_tokens=budget, fused=fused, forward_only=True)
    if found.value != precision.value:
        callbacks.warning(f"products run in {found.value}: {found.reason}")
    return found


def _graphs(
    checked: Checked, loaded: _Loaded, mode: ExecutionMode, budget: int, callbacks: Callbacks
) -> tuple[Forward, Lever]:
    forward = PackedForward(
        loaded.execution,
        loaded.precision,
        budget=budget,
        longest=checked.max_length,
        padding_id=padding_id_of(loaded.execution.model.config),
        typical_length=loaded.kernels.typical_length,
        recorder=GraphPool(loaded.precision.device) if mode.captured else None,
        fused=mode.compiled and loaded.kernels.fused,
        note=callbacks.warning,
    )
    reason = "tokens of a micro-batch; texts are put in order of length within a window, so that few are missing"
    return forward, Lever(name="token_budget", value=str(budget), arithmetic="exact", reason=reason)


def _few_and_many(lengths_N: np.ndarray, budget: int) -> list[np.ndarray]:
    """A window of these texts alone, and one of as many like them as fill some batches: a first file, or what has come
    of a pipe, may be three rows, and a hundred thousand follow."""
    times = -(-_FULL_BATCHES * budget // max(1, int(lengths_N.sum())))
    return [lengths_N, np.tile(lengths_N, times)] if times > 1 and len(lengths_N) else [lengths_N]


def _layout(checked: Checked, loaded: _Loaded, budget: int) -> tuple[Forward, Lever]:
    # Where rows influence one another, a text's answer must not depend on its neighbours: each is a batch.
    most_rows = _MOST_TEXTS if loaded.packing.equivalence.independent else 1
    windows = _few_and_many(loaded.lengths_N, budget)
    batches = [lengths_N[rows] for lengths_N in windows for rows in chunks(lengths_N, budget, most_rows)]
    layout, lever = make_layout(
        loaded.packing,
        loaded.kernels,
        loaded.precision,
        loaded.execution.model.config,
        batches=batches or [np.array([1])],
        batch_size=most_rows,
        max_length=checked.max_length,
        token_budget=budget,
    )
    return LayoutForward(loaded.execution, layout, loaded.precision, batch_tokens=budget, most_rows=most_rows), lever
