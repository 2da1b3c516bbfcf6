"""Packing: sequences end to end in one row, no padding computed, where the equivalence check has shown it equal to
plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brimful.core.records import Arithmetic, Lever
from brimful.levers.lever import Cost, Verdict
from brimful.models.packed.equivalence import Equivalence
from brimful.models.packed.packed_forward import Execution, PackedExecution, PaddedExecution


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Execution of one model: packed if wanted and the equivalence check passed, on padded rows otherwise.

    equivalence: of this model, which also says whether its batches may be split. wanted: False for --packing off.
    """

    equivalence: Equivalence
    wanted: bool = True
    source: str = "Krell et al. 2021, arXiv 2107.02027; Portes et al. 2023, arXiv 2312.17482"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`: equal up to the order of sums, by the equivalence check."""
        return "exact"

    @property
    def packed(self) -> bool:
        """True if the model runs packed."""
        return self.supports().ok

    def supports(self) -> Verdict:
        """Result of the equivalence check."""
        if not self.wanted:
            return Verdict(ok=False, because="turned off by --packing off")
        return Verdict(ok=self.equivalence.packed, because=self.equivalence.reason)

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
        if self.packed and self.equivalence.form is not None:
            return PackedExecution(model, self.equivalence.form)
        return PaddedExecution(model, plain_attention(model))


def plain_attention(model: Any) -> str:
    """The attention that Hugging Face's own forward is right with: scores with a soft cap only have the eager one."""
    return "eager" if getattr(model.config, "attn_logit_softcapping", None) else "sdpa"
