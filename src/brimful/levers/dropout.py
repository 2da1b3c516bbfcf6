"""Dropout: masks that a resumed run draws again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from brimful.levers.execution import ExecutionMode
from brimful.levers.lever import Assembly, Cost, Lever, StepWork


@dataclass(frozen=True, kw_only=True)
class Dropout(Lever):
    """Seeds of dropout. modules: of the model's dropout modules, how many are at work."""

    name = "dropout"
    source = "Salmon et al. 2011, Parallel random numbers (Philox)"
    seed: int
    modules: int

    @classmethod
    def choose(cls, assembly: Assembly) -> Dropout | None:
        """Draw masks by a token's place in the batch where our kernels do, by (seed, batch, micro-batch) elsewhere."""
        if not assembly.training:
            return None
        mode = assembly.levers.get(ExecutionMode)
        fused = isinstance(mode, ExecutionMode) and mode.fused and mode.compiled
        of_fused = "those of fused layers do not change with the split into micro-batches and processes, others do"
        changes = of_fused if fused else "they change with the split into micro-batches and processes"
        return cls(
            value="by (seed, batch, token)" if fused else "by (seed, batch, micro-batch)",
            reason=f"masks repeat on resume; {changes}",
            seed=assembly.options.seed,  # type: ignore[union-attr]
            modules=_modules(assembly.model),
        )

    def cost(self, work: StepWork) -> Cost:
        """Masks of hidden states that a backward pass needs, a byte a number, each written once and read once."""
        num_bytes = self.modules * work.num_tokens * work.width if work.num_trained else 0
        return Cost(step_bytes=num_bytes, step_s=2 * num_bytes / work.bytes_per_s)

    def apply(self, assembly: Assembly) -> None:
        """Seed the step."""
        assembly.seed = self.seed


def _modules(model: Any) -> int:
    """Dropout modules of hidden states. Those of attention's scores are its kernel's, which keeps no mask."""
    parents = (module for module in model.modules() if not hasattr(module, "is_causal"))
    return sum(isinstance(child, nn.Dropout) and child.p > 0 for parent in parents for child in parent.children())
