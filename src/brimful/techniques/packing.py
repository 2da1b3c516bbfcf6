"""Packing: sequences end to end in one row, no padding computed, where the proof has shown it equal to plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from brimful.core.records import Arithmetic, Lever
from brimful.models.execution import Execution, PackedExecution, PaddedExecution
from brimful.models.proof import Proof
from brimful.techniques.technique import Cost, Verdict


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How one model runs: packed if it was proved and asked for, on padded rows otherwise.

    proof: of this model; None where packing was turned off, and nothing was tried.
    """

    proof: Proof | None
    source: str = "Krell et al. 2021, arXiv 2107.02027; Portes et al. 2023, arXiv 2312.17482"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`: equal up to the order of sums, and proved so."""
        return "exact"

    @property
    def packed(self) -> bool:
        """Whether the model runs packed."""
        return self.supports().ok

    def supports(self) -> Verdict:
        """What the proof says."""
        if self.proof is None:
            return Verdict(ok=False, because="turned off by --packing off")
        return Verdict(ok=self.proof.packed, because=self.proof.reason)

    def cost(self, num_parameters: int) -> Cost:
        """Nothing: it saves the padding."""
        return Cost()

    def lever(self) -> Lever:
        """Its line in the recipe."""
        return Lever(
            name="packing",
            value="packed" if self.packed else "padded",
            arithmetic="exact",
            reason=self.supports().because,
        )

    def apply(self, model: Any) -> Execution:
        """The execution that runs the model."""
        if self.proof is not None and self.proof.packed and self.proof.form is not None:
            return PackedExecution(model, self.proof.form)
        return PaddedExecution(model, plain_attention(model))


def plain_attention(model: Any) -> str:
    """The attention that Hugging Face's own forward is right with: scores with a soft cap only have the eager one."""
    return "eager" if getattr(model.config, "attn_logit_softcapping", None) else "sdpa"


def needs_groups(device: torch.device, precision: str, config: Any) -> bool:
    """Whether attention of a packed row will want its segments also as padded rows."""
    if device.type != "cuda" or getattr(config, "attn_logit_softcapping", None):
        return True
    windows = any(isinstance(getattr(config, name, None), int) for name in ("sliding_window", "local_attention"))
    return precision in ("fp32", "tf32") and windows
