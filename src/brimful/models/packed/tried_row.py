"""A packed row on which a model is tried: errors of its logits and gradients beside the plain model's in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.core.tolerances import TOLERANCES
from brimful.hardware.process_settings import matmul_precision
from brimful.kernels import float8
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layout import Inputs, map_tensors
from brimful.models.packed.attention_check import Calls
from brimful.models.packed.packed_forward import PackedForm, PackedModel

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TriedRow:
    """A packed row of so many tokens, the plain logits and gradients that a run on it is compared with, and the
    precision of the run. keeps_all: whether dropout is compiled into our kernels, and drops nothing."""

    form: PackedForm
    row: Inputs
    num_tokens: int
    plain: Tensor
    gradient: list[Tensor]
    precision: str
    keeps_all: bool = False

    def attention_error(self, small: Any) -> tuple[float, str]:
        """Error of the chosen kernels call by call, in units of the tolerance, and where the worst is."""
        return self.attention_calls(small).error(self.num_tokens, self.precision)

    def attention_calls(self, small: Any) -> Calls:
        """Kinds of calls that the model makes of the chosen kernels."""
        calls = Calls()
        with torch.no_grad():
            self.logits(small, PackedModel(small, self.form, watch=calls))
        return calls

    def kernel_error(self, small: Any) -> float:
        """Error of the model on the chosen kernel, in units of the tolerance.

        The tolerance is at least three times what the reference attention loses in that precision: rounding in other
        layers is not the kernel's fault.
        """
        lost, found = self.errors(small, reference=True), self.errors(small, reference=False)
        return in_tolerances(found, lost, self.precision)

    def errors(self, small: Any, *, reference: bool, plan: float8.Plan | None = None) -> tuple[float, float]:
        """Relative differences of logits and gradient from fp32, with the reference attention or the chosen kernel.

        Of logits, what all rows share is left out: the head's bias says nothing of attention.
        """
        logits = self.logits(small, PackedModel(small, self.form, plain=reference), plan)
        found, expected = (each - each.mean(0) for each in (logits.detach().cpu(), self.plain))
        return relative_error(found, expected), error_of_all(gradients_of(small, logits), self.gradient)

    def logits(self, small: Any, packed: PackedModel, plan: float8.Plan | None = None) -> Tensor:
        device, dtype = next(small.parameters()).device, HALF.get(self.precision)
        context = ForwardContext(half_residuals=dtype is not None, float8=plan, keeps_all=self.keeps_all)
        autocast = torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
        with matmul_precision("high" if self.precision == "tf32" else "highest"), autocast:
            logits = packed(map_tensors(self.row, lambda t: t.to(device)), context).logits
        return logits[: len(self.plain)].float()


def in_tolerances(found: tuple[float, float], lost: tuple[float, float], precision: str) -> float:
    """Return the worse of two errors, forward and gradient, in units of the tolerance; a plain model loses `lost`."""
    forward = found[0] / max(TOLERANCES[precision].logits, 3 * lost[0])
    return worse(forward, found[1] / max(TOLERANCES[precision].gradient, 3 * lost[1]))


def kernel_reason(precision: str, error: float, worst: str) -> str:
    """Say by how much attention kernels are over their tolerance. worst: the place, if it is known."""
    where = f" ({worst})" if worst else ""
    return f"the attention kernel in {precision} is {error:.1f} times over its tolerance{where}"


def worse(error: float, other: float) -> float:
    """The larger error, NaN if either is: `max` keeps a number and drops the NaN behind it."""
    return float(np.maximum(error, other))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`; NaN if anything is not finite."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def gradients_of(model: nn.Module, logits: Tensor) -> list[Tensor]:
    """Gradient of each parameter, on the CPU, for a fixed random direction in the logits."""
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((logits * direction).sum(), parameters, allow_unused=True, materialize_grads=True)
    return [g.to("cpu", torch.promote_types(g.dtype, torch.float32)) for g in found]


def error_of_all(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """`relative_error` of all parameters together, in the precision that they are in: most are tables of words."""
    squares = np.zeros(2)
    for one, other in zip(found, expected, strict=True):
        squares += np.square([float(torch.linalg.vector_norm(each)) for each in (one - other, other)])
    return float(np.sqrt(squares[0]) / max(np.sqrt(squares[1]), 1e-30))
