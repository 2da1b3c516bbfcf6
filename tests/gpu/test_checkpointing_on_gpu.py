"""Recomputed layers on a GPU, eager and captured, plain and fused: the same losses, with dropout on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from brimful.models.model_stats import layers_of
from brimful.models.packed.recompute import recompute
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Step
from gpu.test_captured_on_gpu import losses, make_step, source

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _equal_bits() -> Any:
    """Sums of embeddings' gradients in one order."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_deterministic_debug_mode(before)


def course(
    kind: type[Step], *, checkpointed: bool, compiled: bool, token_budget: int, precision: str = "bf16"
) -> tuple[list[float], int]:
    """Losses of a few steps, and the most memory that one of them had."""
    batches = source(token_budget)
    batches.layout = dataclasses.replace(batches.layout, typical_length=60)  # type: ignore[type-var]
    step = make_step(kind, dropout=0.2, compiled=compiled, precision=precision)
    step.seeded_dropout = True
    if checkpointed:
        recompute(list(layers_of(step.execution.model) or ()), range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = losses(step, batches, 8)
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", [Step, CapturedStep])
def test_recomputed_layers_have_the_same_losses(kind: type[Step], compiled: bool, token_budget: int) -> None:
    """Over steps that are met, captured and replayed; but for sums in the order of their gradients' layout."""
    for precision, tolerance in (("fp32", 1e-6), ("bf16", 1e-4)):
        (kept, _), (again, _) = (
            course(kind, checkpointed=each, compiled=compiled, token_budget=token_budget, precision=precision)
            for each in (False, True)
        )
        assert again[:2] == kept[:2]
        assert again == pytest.approx(kept, rel=tolerance)


def test_less_memory_is_needed() -> None:
    (_, kept), (_, again) = (
        course(Step, checkpointed=checkpointed, compiled=False, token_budget=8192) for checkpointed in (False, True)
    )
    assert again < kept
