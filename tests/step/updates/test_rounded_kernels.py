"""The kernel of rounded weights and moments against torch's update with rounding beside it, by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from brimful.kernels.optimizers import rounded_adamw as kernels_of_triton
from brimful.step.updates import bucketed_adamw
from brimful.step.updates.bucketed_adamw import BucketedAdamW, Savings

SCHEDULE = torch.full((9,), 1e-2)
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "8 bits": (torch.bfloat16, torch.uint8),
    "8 bits of fp32 weights": (None, torch.uint8),
    "fp32 states": (torch.bfloat16, torch.float32),
}


class Model(torch.nn.Module):
    """Numbers that fill no whole block, and some that a batch may not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = torch.nn.Linear(37, 41), torch.nn.Linear(41, 3)
        self.unused = torch.nn.Linear(20, 20)


def update_of(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, ours: bool, device: str = "cpu", **savings: Any
) -> BucketedAdamW:
    monkeypatch.setattr(bucketed_adamw, "LEAST_IN_8_BITS", 300)
    monkeypatch.setattr(bucketed_adamw, "can_launch", lambda device, betas: ours)
    model, (weights, states) = Model().to(device), KINDS[kind]
    linear = frozenset(id(p) for p in model.parameters() if p.ndim == 2)
    return BucketedAdamW(
        model, SCHEDULE, max_grad_norm=0.0, scaled=False, betas=(0.9, 0.999), epsilon=1e-8,
        weight_decay={"one.weight": 0.1}, savings=Savings(weights=weights, linear=linear, states=states, **savings),
    )  # fmt: skip


def give_gradients(update: BucketedAdamW, seed: int, *, unused: bool = False) -> None:
    drawn = torch.Generator().manual_seed(seed)
    for name, parameter in update.named.items():
        if unused or not name.startswith("unused"):
            gradient = torch.randn(parameter.shape, generator=drawn) * torch.logspace(-6, 0, parameter.shape[-1])
            parameter.grad = gradient.to(parameter)


def adamw(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], _: list[Tensor],
    steps: list[Tensor], *, lr: Tensor, beta1: float, beta2: float, weight_decay: float, eps: float,
    grad_scale: Tensor, found_inf: Tensor, **__: bool,
) -> None:  # fmt: skip
    """AdamW as it is written: torch 2.11's fused kernels take 1 - beta2 in fp32, 13 millionths too little."""
    if found_inf:
        return
    for w, g, m, v, step in zip(weights, (g / grad_scale for g in gradients), first, second, steps, strict=True):
        w.mul_(1 - lr * weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        sizes = (v / (1 - beta2 ** float(step))).sqrt_().add_(eps)
        w.sub_(lr / (1 - beta1 ** float(step)) * m / sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_reference(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    compare(monkeypatch, kind, "cpu")


def compare(monkeypatch: pytest.MonkeyPatch, kind: str, device: str) -> None:
    """Equal but where the last bit of fp32 decides how a number is rounded."""
    monkeypatch.setattr(torch, "_fused_adamw_", adamw)
    plain, ours = (update_of(monkeypatch, kind, ours=each, device=device) for each in (False, True))
    for step in range(2):
        for update in (plain, ours):
            give_gradients(update, step, unused=step == 0)  # zeros after it
        expected, found = plain.apply(gathered=False), ours.apply(gathered=False)
        assert torch.allclose(found, expected, rtol=1e-6)
        expected_w, found_w = (torch.cat([p.flatten() for p in each.weights().values()]) for each in (plain, ours))
        off_w = found_w != expected_w
        if device != "cpu":  # of fp32 weights a GPU rounds the last bit in another order; the interpreter does not
            kept = [p for p in plain.parameters for _ in range(p.numel())]
            off_w &= torch.tensor([p.dtype.itemsize == 2 for p in kept], device=device)
        assert float(off_w.float().mean()) < (1.0 if kind == "8 bits of fp32 weights" else 0.02)
        assert torch.allclose(found_w, expected_w, atol=2e-4, rtol=2**-7)
    theirs, mine = plain.state().optimizer, ours.state().optimizer
    assert theirs.keys() == mine.keys()
    for name, kept in theirs.items():
        assert torch.equal(kept.tensors["step"], mine[name].tensors["step"])
        for moment in ("exp_avg", "exp_avg_sq"):
            one, other = kept.tensors[moment].float(), mine[name].tensors[moment].float()
            assert float((one - other).norm()) <= 1e-2 * float(one.norm())
            assert float(((one - other).abs() > 1e-6 * one.abs()).float().mean()) < 0.02


def test_a_norm_that_is_not_finite_skips_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    update = update_of(monkeypatch, "8 bits", ours=True, in_backward=True)
    kernels, squares = update._kernels, torch.zeros(())
    assert kernels is not None
    counts = torch.zeros(3)
    large = torch.full((kernels_of_triton.LARGE + 5,), 0.5, dtype=torch.bfloat16)
    kernels.take([torch.tensor([3.0]), large, torch.tensor([4.0])], torch.tensor(2.0), squares, counts)
    assert float(squares) == pytest.approx((25 + 0.25 * len(large)) / 4, rel=1e-6)
    assert (float(update._skipped), counts.tolist()) == (0.0, [1.0, 1.0, 1.0])
    kernels.take([torch.tensor([1.0])], torch.tensor(2.0), squares, None)
    assert float(update._skipped) == 0.0
    kernels.take([large.clone().index_fill_(0, torch.tensor([7]), torch.nan)], torch.tensor(2.0), squares, counts[:2])
    assert (float(update._skipped), counts.tolist()) == (1.0, [1.0, 1.0, 1.0])
    kernels.take([torch.tensor([1.0])], torch.tensor(2.0), squares, counts[1:])
    assert (float(update._skipped), counts.tolist()) == (1.0, [1.0, 1.0, 1.0])
    before = [p.clone() for p in update.parameters]
    give_gradients(update, 0)
    for bucket in update._buckets:
        update._update(bucket, {i: p.grad for i, p in enumerate(update.parameters) if p.grad is not None})
    assert all(torch.equal(p, was) for p, was in zip(update.parameters, before, strict=True))
