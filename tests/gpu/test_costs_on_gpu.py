"""Costs of levers that only a GPU shows: bytes that torch allocates, and seconds of an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

pytest.importorskip("triton")

from brimful.levers.lever import Cost, StepWork
from brimful.levers.optimizer import Optimizer
from brimful.levers.packing import Packing
from brimful.levers.precision import PrecisionLever
from brimful.measurement.peaks import measure_limits, median_seconds
from brimful.models.model_stats import token_matrices
from levers.assemblies import assembly_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def model() -> Any:
    config = BertConfig(
        vocab_size=8000, hidden_size=768, num_hidden_layers=4, num_attention_heads=12, intermediate_size=3072
    )
    return BertForSequenceClassification(config)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resident_bytes_are_those_that_torch_allocates(precision: str) -> None:
    """Weights, states, and copies in half precision, by our fused kernels."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    assembly = assembly_of(model(), precision=precision, device="cuda")
    levers = [assembly.lever(kind) for kind in (Packing, PrecisionLever, Optimizer)]
    found = torch.cuda.memory_allocated() - before
    work = StepWork.of(assembly.model, np.array([64]), flops_per_s=1.0, bytes_per_s=1.0)
    assert assembly.lever(Optimizer).fused
    assert found == pytest.approx(sum((lever.cost(work) for lever in levers), Cost()).resident_bytes, rel=0.03)


@pytest.mark.alone
def test_seconds_are_near_those_measured() -> None:
    """Of an update, within two thirds: its launches and tables are not counted."""
    lengths = np.full(256, 32)
    assembly = assembly_of(model(), precision="bf16", device="cuda", lengths=tuple(lengths))
    limits = measure_limits(
        GPU, torch.bfloat16, shapes=token_matrices(assembly.model) or {}, num_tokens=int(lengths.sum())
    )
    optimizer = assembly.lever(Optimizer)
    work = StepWork.of(
        assembly.model,
        lengths,
        flops_per_s=limits.model_matmul_flops_per_s or limits.matmul_flops_per_s,
        bytes_per_s=limits.copy_bytes_per_s,
    )
    assert assembly.update is not None
    for parameter in assembly.update.parameters:
        parameter.grad = torch.ones_like(parameter)
    update_s = median_seconds(GPU, lambda: assembly.update.apply(gathered=False), replayed=False)  # type: ignore[union-attr]
    expected_s = optimizer.moved_bytes(work.num_trained) / work.bytes_per_s
    print(f"update {update_s * 1e6:.0f} us, predicted {expected_s * 1e6:.0f} us")
    assert update_s == pytest.approx(expected_s, rel=0.67)
