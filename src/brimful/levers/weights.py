"""Weights of a model that is only read, put in the order that a CPU's products read them in: once, not at every use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from brimful.levers.facts import equivalence_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.models.onednn_prepack import can_reorder, reorder_linears
from brimful.models.packed.family_forms import has_state_space

#: Least and most tokens computed at once on a CPU, and numbers that the widest activation may have between these.
_CPU_BUDGETS, _CPU_ACTIVATION = (1024, 4096), 3 << 19
#: Tokens of models whose layers make a state of each token, which is many times as large as what others make of it.
_CPU_STATES = 256


@dataclass(frozen=True, kw_only=True)
class Weights(Lever):
    """Linear weights reordered for oneDNN."""

    name = "weights"
    source = "torch inductor's freezing; benchmarks/classification"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether oneDNN takes such products, of a model that is not the plain one that others are held to."""
        if assembly.training or assembly.device.type != "cpu" or not assembly.packing_wanted:
            return Verdict(ok=False, because="for models that are only read, on a CPU")
        if getattr(assembly.options, "stream_weights", "none") != "none":
            return Verdict(ok=False, because="weights come and go as they are")
        equivalence = assembly.fact(equivalence_of)
        fits = assembly.precision.value == "fp32" or (equivalence.packed and equivalence.half_weights)
        if not fits or not can_reorder(assembly.precision.dtype):
            return Verdict(ok=False, because=f"oneDNN does not take its products in {assembly.precision.value}")
        return Verdict(ok=True, because="Linear layers keep their weights in the order that oneDNN's products read")

    @classmethod
    def choose(cls, assembly: Assembly) -> Weights | None:
        """Reorder wherever that works."""
        verdict = cls.supports(assembly)
        return cls(value="reordered", reason=verdict.because) if verdict.ok else None

    def cost(self, work: StepWork) -> Cost:
        """Bytes of the reordered copies, once the weights they were made of are gone: none."""
        return Cost()

    def apply(self, assembly: Assembly) -> None:
        """Replace the Linear layers, unless the model computes something else then."""
        model, longest = assembly.model, assembly.usual_length
        rows = cpu_budget(model, longest)
        if not reorder_linears(model, assembly.precision.dtype, rows=rows, max_length=longest):
            assembly.drop(self)


def cpu_budget(model: nn.Module, longest: int) -> int:
    """Return the most tokens that a CPU should compute at once: as many as leave its activations in the cache.

    Of narrow models more, whose many calls would cost more. longest: tokens of the longest sequence there can be.
    Measured: benchmarks/classification/2026-11-22-cpu/token_budgets.md; of layers with a state of each token,
    benchmarks/fallback/2026-11-29-cpu-answers-d8589b5.
    """
    if has_state_space(getattr(model, "config", None)):
        return _CPU_STATES
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = (p for p in model.parameters() if p.ndim == 2 and id(p) not in embedded)
    widest = max((max(p.shape) for p in products), default=1)
    least, most = _CPU_BUDGETS
    return max(longest, least, min(most, _CPU_ACTIVATION // widest))
