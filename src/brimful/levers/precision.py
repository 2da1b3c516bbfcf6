"""The precision of matrix products: the one that was asked for, or the fastest with the range of fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from brimful.core.errors import DeviceError, OptionError
from brimful.core.options.choices import PrecisionChoice
from brimful.core.records import Arithmetic
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.packing import Packing, streamed_to
from brimful.models.fp32_outputs import answer_in_fp32
from brimful.models.half_experts import halve_experts
from brimful.models.half_weights import halve_linears
from brimful.step.precision import Precision

#: The first compute capability whose matrix units have each.
_BEGINS = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (9, 0)}


def supports(value: str, device: torch.device) -> Verdict:
    """tf32 and fp8 are formats of a GPU's matrix units; the others run everywhere."""
    if value in ("tf32", "fp8") and device.type != "cuda":
        return Verdict(ok=False, because=f"{value} is a format of NVIDIA's matrix units")
    if device.type == "cuda" and value in _BEGINS:
        found, first = torch.cuda.get_device_capability(device), _BEGINS[value]
        has, needs = (".".join(map(str, each)) for each in (found, first))
        return Verdict(ok=found >= first, because=f"the GPU has compute capability {has}, and it begins with {needs}")
    return Verdict(ok=True, because="it runs everywhere")


@dataclass(frozen=True, kw_only=True)
class PrecisionLever(Lever):
    """The precision of products. half: whether they are in half precision. copies: whether Linear layers of a model
    that is only read hold half-precision weights alone."""

    name = "precision"
    source = "Micikevicius et al. 2018, arXiv 1710.03740; torch.amp"
    half: bool
    copies: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact` in fp32, `rounding` otherwise."""
        return "exact" if self.value == "fp32" else "rounding"

    @classmethod
    def choose(cls, assembly: Assembly) -> PrecisionLever:
        """Take the assembly's, which its device multiplies in; fp8 is bf16 beside a lever of its own."""
        precision, packing = assembly.precision, assembly.lever(Packing)
        if assembly.training and precision.value == "fp16" and assembly.device.type == "cpu":
            assembly.warn("--precision fp16 takes several times as long as fp32 on a CPU")
        return cls(
            value="bf16" if precision.value == "fp8" else precision.value,
            reason=precision.reason + _slowness(precision),
            half=precision.half is not None,
            copies=packing.packed and packing.equivalence.half_weights and not assembly.training,
        )

    def cost(self, work: StepWork) -> Cost:
        """Weights, fp32 unless they are copies in half precision, and the copies that autocast makes in a step."""
        cast = 2 * work.linear_parameters if self.half else 0
        if self.copies:
            return Cost(resident_bytes=4 * work.num_parameters - cast)
        return Cost(resident_bytes=4 * work.num_parameters, step_bytes=cast, step_s=3 * cast / work.bytes_per_s)

    def apply(self, assembly: Assembly) -> None:
        """Have a regression answer in fp32 and experts multiply in bf16, and halve Linear weights of a model that is
        only read. All else is the context of its passes."""
        if self.half and assembly.optimizer is None:  # a loop's own model stays as it is
            answer_in_fp32(assembly.model)
        if self.value == "bf16":
            halve_experts(assembly.model)
        if self.copies:
            folder = streamed_to(assembly.options)  # those that are still as they were
            halve_linears(assembly.model, assembly.precision.dtype, folder)


def choose_precision(asked: PrecisionChoice, device: torch.device) -> Precision:
    """The precision that was asked for; for `auto` bf16 on a GPU that has it, fp32 elsewhere.

    fp8 has no plan yet: which products are in it is measured when the model is there.

    Raises: OptionError for tf32 or fp8 without a GPU, DeviceError for a GPU that does not have what was asked.
    """
    if asked == "auto":
        bf16 = Precision(value="bf16", device=device, reason="the GPU's fastest type with the range of fp32")
        if device.type == "cuda" and supports("bf16", device).ok:
            return bf16
        return Precision(value="fp32", device=device, reason=f"the default on {device.type}")
    precision = Precision(value=asked, device=device, reason="asked for")
    verdict = supports(asked, device)
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


def _slowness(precision: Precision) -> str:
    """Say that products in bf16 are emulated, where they are."""
    if precision.value != "bf16" or precision.device.type != "cpu" or _has_bf16_units() or _has("bf16", "sve_bf16"):
        return ""
    return "; this CPU has no units for it, and takes many times as long as in fp32"


def _has_bf16_units() -> bool:
    """Return whether a CPU of x86 multiplies numbers in bf16 itself: there it is known to be faster than fp32."""
    return _has("amx_bf16", "avx512_bf16")


def _has(*names: str) -> bool:
    """Return whether a CPU has any of these instructions, by torch's names."""
    capabilities: Any = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in names)
