"""Models on their way to running, with as much of it decided as a test needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.train import TrainOptions
from brimful.levers.facts import AttentionKernels, equivalence_of, kernels_of
from brimful.levers.lever import Assembly
from brimful.levers.packing import Packing
from brimful.levers.token_budget import TokenBudget
from brimful.models.packed.equivalence import Equivalence
from brimful.step.precision import Precision

EQUIVALENCE = Equivalence(
    packed=True, independent=True, reason="a test", pooling="first", first_position=0, half_weights=True,
    float8_error=0.5, float8_shapes=((48, 32), (32, 48)),
)  # fmt: skip


def assembly_of(
    model: Any, *, training: bool = True, precision: str = "fp32", device: str = "cpu", num_tokens: int = 1000,
    equivalence: Equivalence = EQUIVALENCE, function: str = "triton_attention",
    warn: Callable[[str], None] = pytest.fail, lengths: tuple[int, ...] = (5, 9, 30, 16), **asked: Any,
) -> Assembly:  # fmt: skip
    """One whose equivalence check and kernels are given. Without a GPU, it is packed already if it is to be on one."""
    options = (
        TrainOptions(data="", model="", output="", **{"batch_size": 4} | asked)
        if training
        else ClassifyOptions(data="", model="", **asked)
    )
    lengths_N = np.array(lengths)
    found = Assembly(
        options=options,
        model=model,
        precision=Precision(value=precision, device=torch.device(device), reason="asked for"),
        max_length=64,
        typical_length=round(float(lengths_N.mean())),
        num_tokens=num_tokens,
        batches=lambda _: [lengths_N],
        schedule=torch.full((9,), 1e-3) if training else None,
        warn=warn,
    )
    found.facts[equivalence_of] = equivalence
    found.facts[kernels_of] = AttentionKernels(functions=(function,), typical_length=found.typical_length)
    if device != "cpu" and not torch.cuda.is_available():
        found.levers[Packing] = Packing.choose(found)
        found.levers[TokenBudget] = TokenBudget(value="64", reason="a test", tokens=64, token_bytes=0)
    return found
