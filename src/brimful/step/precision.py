"""Precision of matrix products: how passes of a model compute.

Weights, gradients, optimizer states, norms, softmax and loss stay fp32 in all of them. In half precision, sums between
post-norm layers on fused kernels are kept in it too (`kernels.residual_dtype`).

fp32   full products
tf32   products of 10-bit mantissas on a GPU's matrix units
bf16   torch's autocast in bf16: 7-bit mantissas, the range of fp32
fp16   torch's autocast in fp16, with a loss scale that halves when gradients overflow and doubles every 2,000 steps
fp8    bf16, with those products of layers in 8 bits that a plan names
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from brimful.kernels.layers.float8 import Plan
from brimful.kernels.residual_dtype import half_residuals

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

    def autocast(self) -> AbstractContextManager[object]:
        """The context that forward passes run in."""
        return self._in_half() if self.value in AUTOCAST else nullcontext()

    @contextmanager
    def _in_half(self) -> Iterator[None]:
        plan = nullcontext() if self.plan is None else self.plan.active()
        with torch.autocast(self.device.type, AUTOCAST[self.value]), half_residuals(), plan:
            yield

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

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Set fp32 products of the process to this precision, and back."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if self.value == "fp32" else "high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
