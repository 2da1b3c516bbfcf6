"""Precision of matrix products: how passes of a model compute.

Weights, gradients, optimizer states, norms, softmax and loss stay fp32 in all of them. In half precision, sums between
post-norm layers on fused kernels are kept in it too (`kernels.forward_context`).

fp32   full products
tf32   products of 10-bit mantissas on a GPU's matrix units
bf16   torch's autocast in bf16: 7-bit mantissas, the range of fp32
fp16   torch's autocast in fp16, with a loss scale that halves when gradients overflow and doubles every 2,000 steps
fp8    bf16, with those products of layers in 8 bits that a plan names
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from brimful.hardware.process_settings import matmul_precision
from brimful.kernels.float8 import Plan
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.side_stream import SideStream

#: Dtypes of autocast, by precision.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision of products on one device, and why it was chosen. plan: which of them are in fp8, if any."""

    value: str
    device: torch.device
    reason: str
    plan: Plan | None = None

    @property
    def scaled(self) -> bool:
        """True if gradients need a loss scale."""
        return self.value == "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the operands of products."""
        return AUTOCAST.get(self.value, torch.float32)

    @property
    def half(self) -> torch.dtype | None:
        """Dtype of half-precision products, None in full precision."""
        return AUTOCAST.get(self.value)

    @contextmanager
    def autocast(self, *, caches: bool = True) -> Iterator[None]:
        """Settings of torch that forward passes run in. caches: whether a weight is cast once for all its uses."""
        is_half, dtype = self.half is not None, self.half or torch.bfloat16
        with self.apply(), torch.autocast(self.device.type, dtype, enabled=is_half, cache_enabled=caches):
            yield

    def context(self, side_stream: SideStream | None = None, *, seeded_dropout: bool = False) -> ForwardContext:
        """A context for one forward pass. side_stream: for gradients of weights. seeded_dropout: as there."""
        return ForwardContext(
            half_residuals=self.half is not None,
            float8=self.plan,
            side_stream=side_stream,
            seeded_dropout=seeded_dropout,
        )

    def after_update(self) -> None:
        """Make fp8 copies of the new weights."""
        if self.plan is not None:
            self.plan.renew()

    def after_training(self) -> None:
        """Free fp8 copies of the weights."""
        if self.plan is not None:
            self.plan.forget()

    def in_bf16(self, because: str) -> Precision:
        """bf16 instead of the fp8 that was asked for."""
        return replace(self, value="bf16", reason=f"fp8 was asked for, but {because}", plan=None)

    def apply(self) -> AbstractContextManager[None]:
        """Lend fp32 products of the process this precision: for a pass and not for a run, since other models wait."""
        return matmul_precision("highest" if self.value == "fp32" else "high")
