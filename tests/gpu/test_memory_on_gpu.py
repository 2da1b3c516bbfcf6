"""Measured memory on a GPU: components sum up, and those whose bytes are known are what they must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from brimful.api import train
from brimful.core.records import PeakMemory
from brimful.measurement.memory import Kept, MemoryWatch, PhaseMemory
from tiny_files import save_classifier, write_reviews

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def sums_up(peak: PeakMemory) -> None:
    assert peak.allocated is not None
    assert peak.reserved is not None
    assert peak.nvml is not None
    parts = peak.components
    assert peak.total == sum(parts.values())
    outside = parts["unused"] + parts["outside_torch"]
    assert peak.allocated == sum(parts.values()) - outside
    assert peak.reserved == peak.allocated + parts["unused"]
    assert peak.nvml <= peak.total
    assert all(size >= 0 for size in parts.values())


def test_phases_of_known_tensors() -> None:
    """A product of 16 MiB: what autograd keeps, the gradient and the workspace are known to the byte."""
    weight = torch.nn.Parameter(torch.randn(2048, 2048, device=GPU))
    inputs = torch.randn(2048, 2048, device=GPU)
    moments = [torch.zeros_like(weight) for _ in range(2)]

    def kept() -> Kept:
        return Kept.of(GPU, [weight], [] if weight.grad is None else [weight.grad], moments)

    phases = PhaseMemory(kept, [weight])
    watch = MemoryWatch(GPU, phases)
    for _ in range(2):
        with phases.forward("products"):
            out = (inputs @ weight).exp()  # keeps its result, 16 MiB
        with phases.backward():
            out.sum().backward()  # type: ignore[no-untyped-call]
        del out
    torch.cuda.synchronize()
    peak, size = watch.peak(), 16 << 20
    sums_up(peak)
    parts = peak.components
    assert (parts["weights"], parts["optimizer_states"]) == (size, 2 * size)
    assert parts["gradients"] >= size
    assert parts["activations"] == size
    assert parts["temporaries"] >= size  # inputs
    assert parts["workspaces"] > 0


@pytest.mark.parametrize("execution", ["eager", "captured", "compiled"])
@pytest.mark.parametrize("budget", [None, 128])
def test_a_run_explains_its_memory(tmp_path: Path, execution: str, budget: int | None) -> None:
    """Gradients: as many bytes as weights at most, and fp32 sums of them where a batch is split."""
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    data = write_reviews(tmp_path / "rows.csv", 200)
    run = train(
        data, model=model, output=tmp_path / "run", device="cuda", execution=execution, token_budget=budget,
        baselines=False,
    )  # fmt: skip
    sums_up(run.peak_bytes)
    parts = run.peak_bytes.components
    num_parameters = run_parameters(tmp_path / "run" / "model")
    assert parts["weights"] >= 4 * num_parameters
    assert 8 * num_parameters <= parts["optimizer_states"] <= 9 * num_parameters + (1 << 20)
    assert parts["activations"] > 0


def run_parameters(folder: Path) -> int:
    return sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(folder).parameters())
