"""Why a forward pass runs one kernel after another, in words that are true of it."""

from __future__ import annotations

import pytest
import torch

from brimful.core.errors import OptionError
from brimful.levers.attention import AttentionKernels
from brimful.levers.execution import choose_forward


@pytest.mark.parametrize(
    ("device", "packed", "function", "said"),
    [
        ("cpu", True, "flash_attention", "graphs and fused kernels are for GPUs, and this runs on cpu"),
        ("cpu", False, "grouped_attention", "graphs and fused kernels are for GPUs, and this runs on cpu"),
        ("cuda", True, "grouped_attention", "attention works on groups of rows whose shapes change with every batch"),
        ("cuda", False, "flash_attention", "padded batches have too many shapes"),
    ],
)
def test_why_a_forward_pass_is_not_captured(device: str, packed: bool, function: str, said: str) -> None:
    kernels = AttentionKernels(functions=(function,), typical_length=30)
    asked = {"num_tokens": 0, "packed": packed, "fixed": kernels.unfixed}
    mode = choose_forward("auto", torch.device(device), None, **asked)  # type: ignore[arg-type]
    assert (mode.value, mode.reason) == ("eager", said)
    with pytest.raises(OptionError, match="--execution captured does not work here: " + said):
        choose_forward("captured", torch.device(device), None, **asked)  # type: ignore[arg-type]
