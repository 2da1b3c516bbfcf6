"""The precision of matrix products: the one that was asked for, or the fastest with the range of fp32."""

from __future__ import annotations

from typing import Any

import torch

from brimful.core.errors import DeviceError, OptionError
from brimful.core.options import PrecisionChoice
from brimful.core.records import Arithmetic, Lever
from brimful.levers.lever import Verdict
from brimful.step.precision import Precision

SOURCE = "Micikevicius et al. 2018, arXiv 1710.03740; torch.amp"
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


def lever(precision: Precision) -> Lever:
    """Its line in the recipe."""
    arithmetic: Arithmetic = "exact" if precision.value == "fp32" else "rounding"
    return Lever(name="precision", value=precision.value, arithmetic=arithmetic, reason=precision.reason)


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


def _has_bf16_units() -> bool:
    capabilities: Any = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))
