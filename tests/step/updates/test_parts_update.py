"""AdamW of parts by our kernel and by torch's, beside torch's own on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from brimful.step.updates import parts
from brimful.step.updates.parts import PartsUpdate

pytest.importorskip("brimful.kernels.optimizers.part_adamw")

#: Numbers of each part.
SIZES = (40, 3)


@pytest.mark.parametrize(("betas", "ours"), [((0.9, 0.999), [40]), ((0.0, 0.999), []), ((0.9, 0.0), [])])
def test_large_parts_are_our_kernels(
    betas: tuple[float, float], ours: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With betas above 0; small ones are torch's."""
    torch.manual_seed(0)
    monkeypatch.setattr(parts, "_LEAST_OF_KERNEL", 10)
    monkeypatch.setattr(parts, "_on_gpu", lambda _: True)
    updated: list[int] = []
    update_part = parts.part_adamw.update_part

    def counted(weight: torch.Tensor, *given: Any, **named: Any) -> None:
        updated.append(weight.numel())
        update_part(weight, *given, **named)

    monkeypatch.setattr(parts.part_adamw, "update_part", counted)
    weights = [torch.randn(size) for size in SIZES]
    expected = [nn.Parameter(weight.clone()) for weight in weights]
    reference = torch.optim.AdamW(expected, lr=0.1, betas=betas, eps=1e-6, weight_decay=0.1)
    update = PartsUpdate(
        nn.Linear(1, 1), torch.full((9,), 0.1), max_grad_norm=0.0, scaled=False, device=torch.device("cpu"),
        kind="adamw", betas=betas, epsilon=1e-6, weight_decay={},
    )  # fmt: skip
    update._moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    update._steps = torch.zeros(len(weights)).unbind()
    told = {"weight_decay": 0.1, "maximize": False, "grad_scale": torch.ones(()), "found_inf": torch.zeros(())}
    for _ in range(3):
        gradients = [torch.randn(size) for size in SIZES]
        for parameter, gradient, steps in zip(expected, gradients, update._steps, strict=True):
            parameter.grad = gradient.clone()
            steps.add_(1)
        update._adamw(range(len(weights)), weights, gradients, torch.tensor(0.1), told)
        reference.step()
    assert updated == ours * 3
    for weight, parameter in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)
