"""The contexts that a precision puts around forward passes."""

from __future__ import annotations

import pytest
import torch

from brimful.levers.precision import PrecisionLever
from brimful.step.precision import Precision
from levers.assemblies import assembly_of
from tiny import FAMILIES


@pytest.mark.parametrize(("value", "half"), [("fp32", False), ("tf32", False), ("bf16", True), ("fp16", True)])
def test_sums_between_layers_are_in_half_precision_where_products_are(value: str, half: bool) -> None:
    precision = Precision(value=value, device=torch.device("cpu"), reason="a test")
    with precision.autocast():
        assert precision.context().half_residuals == half == torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("unit", ["avx2", "amx_bf16", "avx512_bf16", "bf16", "sve_bf16"])
def test_emulated_bf16_is_said_to_be_slow(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: True}, raising=False)
    for value in ("fp32", "bf16"):
        lever = assembly_of(FAMILIES["bert"].model(), precision=value).lever(PrecisionLever)
        assert ("no units for it" in lever.reason) == (value == "bf16" and unit == "avx2")
