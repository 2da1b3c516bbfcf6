"""Measured memory on a GPU: components sum up, and those whose bytes are known are what they must be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from brimful.api import train
from brimful.core.callbacks import Callbacks, Progress
from brimful.core.errors import DeviceError, OptionError
from brimful.core.records import PeakMemory
from brimful.hardware.device_memory import check_expandable
from brimful.hardware.memory import process_bytes
from brimful.measurement.memory import Kept, MemoryWatch, PhaseMemory
from gpu.sized_models import save_sized_classifier
from tiny_files import write_reviews

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
    model = save_sized_classifier(tmp_path / "model", "bert", ["bad", "good"])
    data = write_reviews(tmp_path / "rows.csv", 200)
    run = train(
        data, model=model, output=tmp_path / "run", device="cuda", execution=execution, token_budget=budget,
        baselines=False, num_train_epochs=3,
    )  # fmt: skip
    sums_up(run.peak_bytes)
    print(run.peak_bytes)
    parts = run.peak_bytes.components
    num_parameters = run_parameters(tmp_path / "run" / "model")
    assert parts["weights"] >= 4 * num_parameters
    assert 8 * num_parameters <= parts["optimizer_states"] <= 9 * num_parameters + (1 << 20)
    in_pass = run.peak_bytes.moment in ("forward pass", "backward pass")
    assert (parts["activations"] > 0) == in_pass  # an evaluation, or an update, may need more than steps so small


def test_the_comparison_of_the_first_batch_leaves_no_graph_memory(tmp_path: Path) -> None:
    """Its graphs are dropped, and with them their pool: workspaces of products, made in it, would keep all of it."""
    pools: list[set[tuple[int, int]]] = []

    class Looking(Callbacks):
        def progress(self, progress: Progress) -> None:
            large = (each for each in torch.cuda.memory_snapshot() if each["total_size"] > 20 << 20)
            pools.append({tuple(each["segment_pool_id"]) for each in large} - {(0, 0)})

    model = save_sized_classifier(tmp_path / "model", "bert", ["bad", "good"])
    run = train(
        write_reviews(tmp_path / "rows.csv", 200), model=model, output=tmp_path / "run", device="cuda",
        execution="captured", baselines=False, num_train_epochs=3, logging_steps=5, callbacks=Looking(),
    )  # fmt: skip
    assert run.first_batch is not None
    assert run.first_batch.passed
    assert max(map(len, pools)) == 1


@pytest.mark.parametrize("execution", ["eager", "captured"])
def test_a_run_keeps_to_its_limit(tmp_path: Path, execution: str) -> None:
    """With a budget that would take more: memory runs out, the budget is halved, and the driver sees the limit kept."""
    fraction = torch.cuda.get_per_process_memory_fraction()
    model = save_sized_classifier(tmp_path / "model", "bert", ["bad", "good"])
    data = write_reviews(tmp_path / "rows.csv", 4000)
    torch.cuda.empty_cache()
    outside = (process_bytes(GPU) or 0) - torch.cuda.memory_reserved()
    limit_bytes = max(outside, 600 << 20) + (400 << 20)
    run = train(
        data, model=model, output=tmp_path / "run", device="cuda", execution=execution, token_budget=1 << 20,
        batch_size=2000, num_train_epochs=3, baselines=False, memory_limit=str(limit_bytes),
    )  # fmt: skip
    sums_up(run.peak_bytes)
    print(run.peak_bytes, run.out_of_memory)
    assert (run.peak_bytes.nvml or 0) <= limit_bytes
    assert run.recipe.value("memory_limit") == str(limit_bytes)
    assert torch.cuda.get_per_process_memory_fraction() == fraction


def test_a_limit_below_what_the_process_has(tmp_path: Path) -> None:
    model, data = (
        save_sized_classifier(tmp_path / "model", "bert", ["bad", "good"]),
        write_reviews(tmp_path / "rows.csv"),
    )
    with pytest.raises(OptionError, match=r"--memory-limit is 1MB, and .* in use outside torch already"):
        train(data, model=model, output=tmp_path / "run", device="cuda", memory_limit="1MB")


@pytest.mark.parametrize("execution", ["eager", "captured"])
def test_expandable_segments_are_there_and_given_back(tmp_path: Path, execution: str) -> None:
    model, data = (
        save_sized_classifier(tmp_path / "model", "bert", ["bad", "good"]),
        write_reviews(tmp_path / "rows.csv", 200),
    )
    run = train(
        data, model=model, output=tmp_path / "run", device="cuda", execution=execution, allocator="expandable",
        baselines=False, num_train_epochs=3,
    )  # fmt: skip
    assert run.recipe.value("allocator") == "expandable"
    assert run.recipe.value("execution") == execution
    sums_up(run.peak_bytes)
    with pytest.raises(DeviceError, match="did not take effect"):
        check_expandable(GPU)


def test_the_allocator_by_the_command_line(tmp_path: Path) -> None:
    model, data = (
        save_sized_classifier(tmp_path / "model", "bert", ["bad", "good"]),
        write_reviews(tmp_path / "rows.csv", 200),
    )
    words = ["train", data, "--model", model, "--output", tmp_path / "run", "--no-baselines", "--device", "cuda"]
    words += ["--allocator", "expandable", "--memory-limit", "8GB", "--num-train-epochs", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "brimful", *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "within --memory-limit 8GB" in done.stderr
    assert "peak memory" in done.stderr
    words = ["classify", tmp_path / "run" / "model", data, "-o", tmp_path / "out.csv", "--device", "cuda"]
    words += ["--allocator", "expandable", "--memory-limit", "8GB"]
    done = subprocess.run(
        [sys.executable, "-m", "brimful", *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "within --memory-limit 8GB" in done.stderr


def run_parameters(folder: Path) -> int:
    return sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(folder).parameters())
