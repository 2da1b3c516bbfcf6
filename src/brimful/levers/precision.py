"""Precision of matrix products. Weights, gradients, optimizer states, norms, softmax and loss stay fp32 in all of them.

In half precision, sums between post-norm layers on fused kernels are kept in it too (`kernels.residuals`).

fp32   full products
tf32   products of 10-bit mantissas on a GPU's matrix units
bf16   torch's autocast in bf16: 7-bit mantissas, the range of fp32
fp16   torch's autocast in fp16, with a loss scale that halves when gradients overflow and doubles every 2,000 steps
fp8    bf16, with those products of layers in 8 bits that are faster so (`techniques.float8`)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from brimful.core.errors import DeviceError, OptionError
from brimful.core.options import PrecisionChoice
from brimful.core.records import Arithmetic, Lever
from brimful.kernels.layers.float8 import Plan
from brimful.kernels.residual_dtype import half_residuals
from brimful.levers.lever import Cost, Verdict

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
#: The first compute capability whose matrix units have each.
_BEGINS = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (9, 0)}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision of products on one device. plan: which of them are in fp8, None until that was measured."""

    value: str
    device: torch.device
    reason: str
    plan: Plan | None = None
    source: str = "Micikevicius et al. 2018, arXiv 1710.03740; torch.amp"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact` in fp32, `rounding` otherwise."""
        return "exact" if self.value == "fp32" else "rounding"

    @property
    def scaled(self) -> bool:
        """Whether gradients need a loss scale."""
        return self.value == "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """What products take."""
        return _AUTOCAST.get(self.value, torch.float32)

    def supports(self) -> Verdict:
        """tf32 and fp8 are formats of a GPU's matrix units; the others run everywhere."""
        if self.value in ("tf32", "fp8") and self.device.type != "cuda":
            return Verdict(ok=False, because=f"{self.value} is a format of NVIDIA's matrix units")
        if self.device.type == "cuda" and self.value in _BEGINS:
            found, first = torch.cuda.get_device_capability(self.device), _BEGINS[self.value]
            has, needs = (".".join(map(str, each)) for each in (found, first))
            return Verdict(
                ok=found >= first, because=f"the GPU has compute capability {has}, and it begins with {needs}"
            )
        return Verdict(ok=True, because="it runs everywhere")

    def cost(self, num_parameters: int) -> Cost:
        """Autocast keeps a copy of the weights in its own type during a step; fp8 two of those that it multiplies."""
        copies = 2 * num_parameters if self.value == "fp8" else 0
        return Cost(resident_bytes=copies, step_bytes=2 * num_parameters if self.value in _AUTOCAST else 0)

    def lever(self) -> Lever:
        """Its line in the recipe."""
        return Lever(name="precision", value=self.value, arithmetic=self.arithmetic, reason=self.reason)

    def autocast(self) -> AbstractContextManager[object]:
        """The context that forward passes run in."""
        return self._in_half() if self.value in _AUTOCAST else nullcontext()

    @contextmanager
    def _in_half(self) -> Iterator[None]:
        plan = nullcontext() if self.plan is None else self.plan.active()
        with torch.autocast(self.device.type, _AUTOCAST[self.value]), half_residuals(), plan:
            yield

    def after_update(self) -> None:
        """fp8 copies of the weights are those of the new ones."""
        if self.plan is not None:
            self.plan.renew()

    def after_training(self) -> None:
        """fp8 copies of the weights are freed."""
        if self.plan is not None:
            self.plan.forget()

    def in_bf16(self, because: str) -> Precision:
        """fp8 that was asked for, where no product is in it."""
        return replace(self, value="bf16", reason=f"fp8 was asked for, but {because}", plan=None)

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Sets fp32 products of the process to this precision, and back."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if self.value == "fp32" else "high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def choose_precision(asked: PrecisionChoice, device: torch.device) -> Precision:
    """The precision that was asked for; for `auto` bf16 on a GPU that has it, fp32 elsewhere.

    fp8 has no plan yet: which products are in it is measured when the model is there.

    Raises: OptionError for tf32 or fp8 without a GPU, DeviceError for a GPU that does not have what was asked.
    """
    if asked == "auto":
        bf16 = Precision(value="bf16", device=device, reason="the GPU's fastest type with the range of fp32")
        if device.type == "cuda" and bf16.supports().ok:
            return bf16
        return Precision(value="fp32", device=device, reason=f"the default on {device.type}")
    precision = Precision(value=asked, device=device, reason="asked for")
    verdict = precision.supports()
    if not verdict.ok:
        kind = DeviceError if device.type == "cuda" else OptionError
        raise kind(f"--precision {asked} does not work here: {verdict.because}", hint="use fp32 or bf16")
    return precision


def choose_forward_precision(asked: PrecisionChoice, device: torch.device) -> Precision:
    """The same for a model that is only read: there `auto` is also bf16 on a CPU with units for it.

    A CPU without them emulates bf16, and is many times slower than in fp32.
    """
    if asked == "auto" and device.type == "cpu" and _has_bf16_units():
        return Precision(value="bf16", device=device, reason="this CPU multiplies it faster than fp32")
    return choose_precision(asked, device)


def _has_bf16_units() -> bool:
    capabilities: Any = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))
