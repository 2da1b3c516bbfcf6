"""The contexts that a precision puts around forward passes."""

from __future__ import annotations

import pytest
import torch

from brimful.step.precision import Precision


@pytest.mark.parametrize(("value", "half"), [("fp32", False), ("tf32", False), ("bf16", True), ("fp16", True)])
def test_sums_between_layers_are_in_half_precision_where_products_are(value: str, half: bool) -> None:
    precision = Precision(value=value, device=torch.device("cpu"), reason="a test")
    with precision.autocast():
        assert precision.context().half_residuals == half == torch.is_autocast_enabled("cpu")
