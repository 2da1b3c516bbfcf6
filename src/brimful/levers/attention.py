"""The attention kernel of a packed run; padded rows keep Hugging Face's own attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from brimful.data.batches.batch import PackedLayout
from brimful.levers.facts import AttentionKernels, kernels_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork
from brimful.levers.packing import Packing
from brimful.levers.token_budget import TokenBudget

_NAMES = {
    "grouped_attention": "torch's sdpa on groups of similar length",
    "flash_attention": "FlashAttention-2, variable length",
    "efficient_attention": "torch's memory-efficient kernel, variable length",
    "triton_attention": "our Triton kernel, variable length",
    "relative_attention": "our Triton kernel, variable length with a bias by distance",
}


@dataclass(frozen=True, kw_only=True)
class Attention(Lever):
    """Attention of a model that runs packed, by `kernels`, or on padded rows, by Hugging Face's own."""

    name = "attention"
    source = "Dao 2023, arXiv 2307.08691; Rabe and Staats 2021, arXiv 2112.05682"
    kernels: AttentionKernels

    @classmethod
    def choose(cls, assembly: Assembly) -> Attention:
        """Choose kernels by device, precision, pattern and length, for training the fastest of those timed."""
        kernels = assembly.fact(kernels_of)
        if not assembly.lever(Packing).packed:
            own = str(assembly.model.config._attn_implementation)
            return cls(value=own, reason="Hugging Face's own, on padded rows", kernels=kernels)
        reason = f"for sequences of {kernels.typical_length} tokens in the mean"
        if kernels.measured is not None:
            reason += f"; {kernels.measured.said}"
        value = "; ".join(dict.fromkeys(_NAMES[name] for name in kernels.functions))
        return cls(value=value, reason=reason, kernels=kernels)

    def cost(self, work: StepWork) -> Cost:
        """Seconds of scores and sums of values, without the softmax."""
        flops = 0.0 if work.attention is None else work.attention.flops(work.lengths_N) * work.passes / 3
        return Cost(step_s=flops / work.flops_per_s)

    def apply(self, assembly: Assembly) -> None:
        """Have each packed batch carry the kernel's name, and the rows that kernels without variable lengths take."""
        assembly.lever(TokenBudget)
        if isinstance(assembly.layout, PackedLayout):
            assembly.layout = replace(
                assembly.layout,
                groups=not self.kernels.variable_length.ok,
                typical_length=self.kernels.typical_length,
                attention=self.kernels.fastest,
            )
