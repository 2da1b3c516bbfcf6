"""Packing: sequences end to end in one row, no padding computed, where the equivalence check has shown it equal to
plain."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.levers.facts import equivalence_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.parameter_efficient import FrozenWeights
from brimful.levers.sharding import OF_WEIGHTS, Sharding
from brimful.levers.tensor_parallel import TensorParallel
from brimful.levers.weights import Weights
from brimful.models.model_stats import layers_of
from brimful.models.packed.equivalence import Equivalence
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.models.packed.streamed_layers import move_all_but


@dataclass(frozen=True, kw_only=True)
class Packing(Lever):
    """The layout of a model's sequences: end to end, or in padded rows.

    equivalence: what the check found, which also says if batches may be split.
    """

    name = "packing"
    source = "Krell et al. 2021, arXiv 2107.02027; Portes et al. 2023, arXiv 2312.17482"
    equivalence: Equivalence

    @property
    def packed(self) -> bool:
        """True for a model that runs packed."""
        return self.value == "packed"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return what the equivalence check says of this model."""
        equivalence = assembly.fact(equivalence_of)
        return Verdict(ok=equivalence.packed and equivalence.form is not None, because=equivalence.reason)

    @classmethod
    def choose(cls, assembly: Assembly) -> Packing:
        """Pack where that is shown to be equal, unless it was turned off."""
        verdict, equivalence = cls.supports(assembly), assembly.fact(equivalence_of)
        if not assembly.packing_wanted:
            refused = assembly.packing_refused or assembly.eager_attention
            why = "answers of faster ways were not those of the plain model" if refused else "--packing off"
            return cls(value="padded", reason=f"off: {why}", equivalence=equivalence)
        return cls(value="packed" if verdict.ok else "padded", reason=verdict.because, equivalence=equivalence)

    def cost(self, work: StepWork) -> Cost:
        """Seconds of the products of all tokens that are computed: padded, each row is as long as the longest."""
        padded = len(work.lengths_N) * int(work.lengths_N.max(initial=0))
        return Cost(step_s=work.products_s(work.num_tokens if self.packed else padded))

    def apply(self, assembly: Assembly) -> None:
        """Put the model on its device, and make the execution that runs it."""
        assembly.find(FrozenWeights)  # before the device has room for them
        model, layers = assembly.model, layers_of(assembly.model)
        sharding = assembly.find(Sharding)
        in_parts = sharding is not None and sharding.value in OF_WEIGHTS
        in_parts = in_parts or assembly.find(TensorParallel) is not None
        if streamed(assembly) and layers is not None:
            move_all_but(model, layers, assembly.device)
        elif not in_parts:  # or its parts come there when they are cut
            model = assembly.model = model.to(assembly.device)
        if not (assembly.training and model.training):  # what is in eval mode in a model in train mode stays so
            model.train(assembly.training)
        assembly.find(Weights)  # before an execution keeps modules that it replaces
        if self.packed and self.equivalence.form is not None:
            assembly.execution = PackedModel(model, self.equivalence.form)
        else:  # soft caps have Hugging Face's eager attention only
            soft_capped = getattr(model.config, "attn_logit_softcapping", None)
            eager = soft_capped or assembly.eager_attention
            assembly.execution = PaddedModel(model, "eager" if eager else "sdpa")


def streamed(assembly: Assembly) -> bool:
    """Return whether weights of layers are to come for their turn alone."""
    return getattr(assembly.options, "stream_weights", "none") != "none"


def streamed_to(options: Any) -> Path | None:
    """Return the folder of the file that weights are streamed from, into which they are loaded; None for memory."""
    if getattr(options, "stream_weights", "none") != "disk":
        return None
    return Path(options.stream_folder or tempfile.gettempdir())
