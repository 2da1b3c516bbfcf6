"""Load a saved classifier: check its files, move its weights to the device, choose its fast path.

What it then runs is `Runner.submit`: tokenised texts in, logits out. What logits mean is the business of
`tasks.answers`, where texts come from and answers go that of `classify.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from brimful.core.callbacks import Callbacks
from brimful.core.errors import ModelError, printable
from brimful.core.options import ClassifyOptions, ExecutionChoice
from brimful.core.records import LabelSpace
from brimful.data.tokens.encoder import Encoder, Tokens
from brimful.engine.assemble import AssembledForward, assemble_forward
from brimful.engine.prepare import longest_sequence
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer
from brimful.models.model_stats import Attention, attention_of, matmul_parameters
from brimful.models.packed.packed_forward import has_token_types
from brimful.step.precision import Precision
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


class Runner(AssembledForward):
    """A classifier on its device."""

    def submit(self, tokens: Tokens) -> Result:
        """Start on a window of texts."""
        return self.forward.submit(tokens)

    @property
    def execution_mode(self) -> ExecutionChoice:
        """The way it is launched, as an option has it."""
        return cast(ExecutionChoice, self.mode.value)

    def operations(self, lengths_N: np.ndarray) -> float | None:
        """Floating-point operations of a forward pass over texts of these lengths, padding not counted."""
        parameters, attention = self._counted
        if attention is None:
            return None
        return 2.0 * parameters * float(lengths_N.sum()) + attention.flops(lengths_N) / 3.0

    @cached_property
    def _counted(self) -> tuple[int, Attention | None]:
        return matmul_parameters(self.model), attention_of(self.model)


def make_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, *, sample: Tokens, num_tokens: int,
    packing_wanted: bool, callbacks: Callbacks,
) -> Runner:  # fmt: skip
    """Load the weights of a checked model and put together how they run.

    sample: the first texts of the input. num_tokens: of the whole input, about.
    Raises: ModelError for weights that do not fit the model, OptionError for --execution where it does not work.
    """
    assembled = assemble_forward(
        options,
        checked.facts,
        checked.space,
        precision,
        max_length=checked.max_length,
        lengths_N=sample.lengths,
        num_tokens=num_tokens,
        packing_wanted=packing_wanted,
        callbacks=callbacks,
    )
    return Runner(**vars(assembled))
