"""Attention kernels of a packed run: which ones the layers will get, and whether they want padded rows besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from brimful.core.records import Arithmetic, Lever
from brimful.kernels.attention import Pattern, RelativeBias, choose_attention, grouped_attention
from brimful.models.relative import farthest_bucket
from brimful.techniques.precision import Precision
from brimful.techniques.technique import Cost, Verdict

_NAMES = {
    "grouped_attention": "torch's sdpa on groups of similar length",
    "flash_attention": "FlashAttention-2, variable length",
    "efficient_attention": "torch's memory-efficient kernel, variable length",
    "triton_attention": "our Triton kernel, variable length",
    "relative_attention": "our Triton kernel, variable length with a bias by distance",
}


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """The kernels of one model in one precision, by function name, those of full layers and of windowed ones.

    typical_length: mean length of the sequences to come.
    """

    functions: tuple[str, ...]
    typical_length: int
    source: str = "Dao 2023, arXiv 2307.08691; Rabe and Staats 2021, arXiv 2112.05682"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`: equal up to the order of sums, in the precision of the run."""
        return "exact"

    @property
    def needs_groups(self) -> bool:
        """Whether segments must come as padded rows too; their shapes then change with every batch."""
        return grouped_attention.__name__ in self.functions

    @property
    def unfixed(self) -> str | None:
        """Why shapes do not repeat from batch to batch, None if they do."""
        return "attention works on groups of rows whose shapes change with every batch" if self.needs_groups else None

    def supports(self) -> Verdict:
        """The choice made sure that they do."""
        return Verdict(ok=True, because="chosen by device, precision, pattern and length")

    def cost(self, num_parameters: int) -> Cost:
        """Nothing that grows with the parameters."""
        return Cost()

    def lever(self) -> Lever:
        """Its line in the recipe."""
        names = dict.fromkeys(_NAMES[name] for name in self.functions)
        reason = f"for sequences of {self.typical_length} tokens in the mean"
        return Lever(name="attention", value="; ".join(names), arithmetic="exact", reason=reason)


def padded_lever(model: Any) -> Lever:
    """The line of a model on padded rows, which keeps its own attention."""
    own = str(model.config._attn_implementation)
    return Lever(name="attention", value=own, arithmetic="exact", reason="Hugging Face's own, on padded rows")


def choose_kernels(config: Any, precision: Precision, typical_length: int) -> AttentionKernels:
    """The kernels that layers of this configuration will be given."""
    num_heads = getattr(config, "num_attention_heads", None) or 1  # FNet has none, and no use for a kernel
    given = (getattr(config, name, None) for name in ("head_dim", "attention_head_size"))
    head_dim = next((d for d in given if d), getattr(config, "hidden_size", 64) // num_heads)
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    window = next((w for w in windows if isinstance(w, int)), None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    relative = None if farthest_bucket(config) is None else RelativeBias(bucket_W=torch.empty(0))
    patterns = [Pattern(scale=1.0, window=w, softcap=softcap, relative=relative) for w in dict.fromkeys((None, window))]
    chosen = [
        choose_attention(precision.device, precision.dtype, pattern, head_dim, typical_length) for pattern in patterns
    ]
    return AttentionKernels(functions=tuple(function.__name__ for function in chosen), typical_length=typical_length)
