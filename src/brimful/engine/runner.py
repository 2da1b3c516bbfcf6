"""A saved classifier made ready to run: its files checked, its weights on the device, its fast path proved.

What it then runs is `Runner.submit`: tokenised texts in, logits out. What logits mean is the business of
`tasks.answers`, where texts come from and answers go that of `stream.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from torch import nn

from brimful.core.errors import ModelError, printable
from brimful.core.listener import Listener
from brimful.core.options import ClassifyOptions, ExecutionChoice
from brimful.core.records import LabelSpace, Lever, Recipe
from brimful.data.tokens import Encoder, Tokens
from brimful.engine.build import make_layout
from brimful.engine.predict import LayoutForward, chunks
from brimful.engine.prepare import longest_sequence
from brimful.models.anatomy import attention_flops, matmul_parameters
from brimful.models.execution import Execution, has_token_types
from brimful.models.halves import halve_linears
from brimful.models.intake import ModelFacts, inspect_model, load_tokenizer
from brimful.models.load import load_model
from brimful.models.proof import prove
from brimful.step.forward import PackedForward
from brimful.tasks.answers import label_space
from brimful.techniques.attention import AttentionKernels, choose_kernels
from brimful.techniques.execution import ExecutionMode, choose_forward
from brimful.techniques.packing import Packing
from brimful.techniques.precision import Precision

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


class Forward(Protocol):
    """The forward pass over windows of texts."""

    def submit(self, tokens: Tokens) -> Result:
        """Starts on a window. Results are asked for in the order of submission."""
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
        model = self.execution.model
        attention = attention_flops(model, lengths_N.tolist())
        products = 2.0 * matmul_parameters(model) * float(lengths_N.sum())
        return None if attention is None else products + attention / 3.0


def make_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, *, sample: Tokens, num_tokens: int,
    packing_wanted: bool, listener: Listener,
) -> Runner:  # fmt: skip
    """Loads the weights and puts together how they run.

    sample: the first texts of the input, by whose lengths kernels and shapes are chosen. num_tokens: of the whole
    input, about.
    """
    facts, config = checked.facts, checked.facts.config
    model = load_model(facts, checked.space, head="kept", seed=0).requires_grad_(False)
    lengths = sample.lengths[sample.lengths > 0]
    typical_length = round(float(lengths.mean())) if len(lengths) else 1
    proof = prove(
        model,
        max_length=checked.max_length,
        device=precision.device,
        precision=precision.value,
        typical_length=typical_length,
    )
    packing = Packing(proof=proof, wanted=packing_wanted)
    model = model.to(precision.device).eval()
    if packing.packed and proof.halves:
        halve_linears(model, precision.dtype)
    execution = packing.apply(model)
    kernels = choose_kernels(config, precision, typical_length)
    graphs = packing.packed and precision.device.type == "cuda" and not kernels.needs_groups
    mode = choose_forward(
        options.execution, precision.device, model, num_tokens=num_tokens, refusal=None if graphs else _why_not(packing)
    )
    mode.apply_forward(execution, note=listener.warning)
    forward: Forward
    if graphs:
        forward, budget = _graphs(checked, options, execution, precision, typical_length, mode, listener)
    else:
        forward, budget = _layout(checked, options, execution, precision, packing, kernels, lengths)
    own = Lever(
        name="attention",
        value=str(config._attn_implementation),
        arithmetic="exact",
        reason="Hugging Face's own, on padded rows",
    )
    levers = (
        packing.lever(), budget, precision.lever(), kernels.lever() if packing.packed else own, mode.lever()
    )  # fmt: skip
    device = "CPU" if precision.device.type == "cpu" else _gpu_name(precision)
    return Runner(
        forward=forward,
        execution=execution,
        precision=precision,
        recipe=Recipe(device=device, levers=levers),
        packing=packing,
        execution_mode=cast(ExecutionChoice, mode.value),
    )


def cpu_budget(model: nn.Module, longest: int) -> int:
    """Most tokens that a CPU should compute at once: as many as leave its activations in the cache.

    Of narrow models more, whose many calls would cost more. Measured: benchmarks/classification/cpu/budgets.md.
    longest: tokens of the longest sequence there can be.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = (p for p in model.parameters() if p.ndim == 2 and id(p) not in embedded)
    widest = max((max(p.shape) for p in products), default=1)
    least, most = _CPU_BUDGETS
    return max(longest, least, min(most, _CPU_ACTIVATION // widest))


def _why_not(packing: Packing) -> str:
    return "the CPU and padded rows have no fixed shapes" if packing.packed else packing.supports().because


def _gpu_name(precision: Precision) -> str:
    import torch

    return torch.cuda.get_device_name(precision.device)


def _graphs(
    checked: Checked, options: ClassifyOptions, execution: Execution, precision: Precision, typical_length: int,
    mode: ExecutionMode, listener: Listener,
) -> tuple[Forward, Lever]:  # fmt: skip
    config = checked.facts.config
    budget = options.token_budget or _GPU_BUDGET
    forward = PackedForward(
        execution,
        precision,
        budget=budget,
        longest=checked.max_length,
        padding_id=config.pad_token_id if isinstance(getattr(config, "pad_token_id", None), int) else 0,
        typical_length=typical_length,
        captured=mode.captured,
        note=listener.warning,
    )
    reason = "tokens of a micro-batch; texts are put in order of length within a window, so that few are missing"
    return forward, Lever(name="token_budget", value=str(budget), arithmetic="exact", reason=reason)


def _layout(
    checked: Checked, options: ClassifyOptions, execution: Execution, precision: Precision, packing: Packing,
    kernels: AttentionKernels, lengths: np.ndarray,
) -> tuple[Forward, Lever]:  # fmt: skip
    # Where rows influence one another, a text's answer must not depend on its neighbours: each is a batch.
    most_rows = _MOST_TEXTS if packing.proof.independent else 1
    default = cpu_budget(execution.model, checked.max_length) if precision.device.type == "cpu" else _GPU_BUDGET
    budget = options.token_budget or default
    layout, lever = make_layout(
        packing,
        kernels,
        precision,
        checked.facts.config,
        batches=[lengths[rows] for rows in chunks(lengths, budget, most_rows)] or [np.array([1])],
        batch_size=most_rows,
        max_length=checked.max_length,
        token_budget=budget,
    )
    return LayoutForward(execution, layout, precision, batch_tokens=budget, most_rows=most_rows), lever
