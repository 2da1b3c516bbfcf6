"""Updates in less memory on a GPU, eager and captured: torch's update, where nothing is rounded, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from brimful.levers.optimizer import Optimizer
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Step, make_schedule
from brimful.step.updates.bucketed_adamw import Savings
from gpu.test_captured_on_gpu import GPU, STEPS, losses, make_step, outcomes, source
from step.updates import test_bitsandbytes_adamw, test_rounded_kernels

pytestmark = pytest.mark.gpu

EXACT: dict[str, dict[str, Any]] = {
    "host": {"on_host": True},
    "backward": {"in_backward": True},
    "both": {"in_backward": True, "on_host": True},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "states": {"states": torch.bfloat16, "on_host": True},
    "weights": {"weights": torch.bfloat16, "states": torch.bfloat16, "in_backward": True},
    "8 bits": {"weights": torch.bfloat16, "states": torch.uint8, "in_backward": True},
}


def step_of(kind: type[Step], savings: dict[str, Any] | None, *, compiled: bool = False, **options: Any) -> Step:
    step = make_step(kind, dropout=0.0, compiled=compiled, our_update=False, **options)
    lever = Optimizer(value="adamw_torch", savings=None if savings is None else Savings(**savings))
    schedule = make_schedule("linear", 1e-3, STEPS, 4)
    step.update = lever.update(step.execution.model, schedule, step.precision, max_grad_norm=0.0)
    step.memory = type(step.memory)(step.update.kept, step.update.parameters)
    if isinstance(step, CapturedStep):
        step._graphs._keep = step.update.captured
    return step


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("savings", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("bucket", [None, 20_000], ids=["one bucket", "many"])
def test_captured_or_not_it_is_torchs_update(
    monkeypatch: pytest.MonkeyPatch, savings: dict[str, Any], compiled: bool, token_budget: int, bucket: int | None
) -> None:
    """In many buckets states come and go, and updates run, while the backward pass goes on."""
    if bucket is not None:
        monkeypatch.setattr("brimful.step.updates.bucketed_adamw.BUCKET", bucket)
    expected = outcomes(step_of(Step, None, precision="fp32"), source(token_budget, typical_length=60))
    for kind in (Step, CapturedStep):
        step = step_of(kind, savings, compiled=compiled, precision="fp32")
        found = outcomes(step, source(token_budget, typical_length=60))
        for one, other in zip(found[:20], expected[:20], strict=True):
            assert one == pytest.approx(other, rel=1e-3)
        assert kind is Step or step.num_graphs


@pytest.mark.parametrize("savings", ROUNDED.values(), ids=ROUNDED)
def test_rounded_updates_are_captured_too(savings: dict[str, Any]) -> None:
    """Rounding is drawn on the device, by applied steps: a replay is another one than the last."""
    found = [
        outcomes(step_of(kind, savings, precision="bf16"), source(8192, typical_length=60), 20)
        for kind in (Step, CapturedStep)
    ]
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=5e-2)


@pytest.mark.parametrize("kind", test_rounded_kernels.KINDS)
def test_the_kernel_of_rounded_numbers_is_the_reference(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    test_rounded_kernels.compare(monkeypatch, kind, "cuda")


def test_less_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brimful.step.updates.bucketed_adamw.BUCKET", 200_000)
    monkeypatch.setattr("brimful.step.updates.host_states.AHEAD", 2_000_000)  # all states of this model are 27 MB
    peaks = []
    lean = {"in_backward": True, "on_host": True}
    for savings in (None, lean, None, lean):  # in the first two torch makes workspaces of products
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = step_of(Step, savings, precision="bf16", num_layers=24)
        outcomes(step, source(8192, batch_size=1, typical_length=60), 4)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del step
    assert peaks[3] < 0.7 * peaks[2]


def test_steps_in_8_bits_are_those_of_bitsandbytes() -> None:
    """But where the last bit decides which share is nearest, as theirs divides otherwise."""
    of = test_bitsandbytes_adamw
    mine, other = of.model().to(GPU), of.model().to(GPU)
    ours, theirs = of.ours_of(mine), of.of_bitsandbytes(other)
    for number in range(8):
        for each, optimizer in ((mine, ours), (other, theirs)):
            of.fill(each, number, decades=1)
            optimizer.step()
    off = (of.weights(mine) - of.weights(other)).abs()
    assert float((off > of.RATE / 100).float().mean()) < 0.02
    for one, two in zip(mine.parameters(), other.parameters(), strict=True):
        same = ours.state[one]["state1"] == theirs.state[two]["state1"]
        assert one.numel() < of.LEAST or float(same.float().mean()) > 0.9


def test_a_run_in_8_bits_is_that_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs decides on the host, and is told each step's learning rate."""
    pytest.importorskip("bitsandbytes")
    options: dict[str, Any] = {"dropout": 0.0, "our_update": False, "optim": "adamw_bnb_8bit", "precision": "fp32"}
    ours = make_step(CapturedStep, **options)
    monkeypatch.setattr("brimful.step.updates.rounded_kernels.can_launch", lambda device, betas: False)
    theirs = make_step(Step, **options)
    assert (ours.update.on_device, theirs.update.on_device) == (True, False)
    expected, found = (losses(each, source(8192, typical_length=60)) for each in (theirs, ours))
    assert found[:20] == pytest.approx(expected[:20], rel=5e-3)
    assert ours.num_graphs
