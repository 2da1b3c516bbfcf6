"""Adafactor on the device: transformers' own steps, skipped ones that change nothing, and states of both."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Adafactor as TransformersAdafactor

from brimful.step.updates.adafactor import SETTINGS, Adafactor
from tolerances import difference

STEPS = 12
#: Order of rounding, grown by so many steps whose size depends on square roots of means.
SAME = 2e-5


class Shapes(nn.Module):
    """Parameters of no, one, two and three dimensions, and one that has no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "bias": (7,),
            "matrix": (5, 9),
            "cube": (2, 4, 3),
            "late": (6, 4),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw)))


def fill(model: nn.Module, number: int, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(number + 1)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=draw) * 10.0 ** (number % 5 - 3)
        parameter.grad = None if name == "late" and number < 3 else gradient * scale


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim <= 1]}]


def rate_of(number: int) -> float:
    return 1e-2 * (1 - number / STEPS)


def by_transformers(model: nn.Module) -> list[torch.Tensor]:
    optimizer = TransformersAdafactor(groups(model), lr=1.0, **SETTINGS)
    for number in range(STEPS):
        fill(model, number)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(number)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def all_of(found: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in found])


@pytest.mark.parametrize("scale", [None, 1024.0], ids=["plain", "scaled"])
@pytest.mark.parametrize("skipping", [False, True], ids=["all", "some skipped"])
def test_steps_are_those_of_transformers(scale: float | None, skipping: bool) -> None:
    """Skipped steps, of gradients that are not finite, among them: of weights and of counted steps nothing is left."""
    model = Shapes()
    expected = by_transformers(copy.deepcopy(model))
    rate = torch.zeros(())
    optimizer = Adafactor(groups(model), rate)
    for number in range(STEPS):
        rate.fill_(rate_of(number))
        optimizer.grad_scale = None if scale is None else torch.tensor(scale)
        if skipping:
            fill(model, number)
            before = copy.deepcopy(optimizer.state_dict()["state"]), all_of(model.parameters())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan if number % 2 else math.inf)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            assert torch.equal(all_of(model.parameters()), before[1])
            for index, kept in before[0].items():
                now = optimizer.state_dict()["state"][index]
                assert all(torch.equal(now[name], value) for name, value in kept.items())
        optimizer.found_inf = torch.zeros(()) if skipping else None
        fill(model, number, scale or 1.0)
        optimizer.step()
    assert difference(all_of(model.parameters()), all_of(expected)) < SAME


def test_states_of_transformers_are_gone_on_with() -> None:
    """A run that transformers' own began, whose steps are counted on the host."""
    model = Shapes()
    other = copy.deepcopy(model)
    theirs = TransformersAdafactor(groups(other), lr=1e-2, **SETTINGS)
    for number in range(4):
        fill(other, number)
        theirs.step()
    model.load_state_dict(other.state_dict())
    ours = Adafactor(groups(model), torch.tensor(1e-2))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        ours.state[one] = {key: copy.deepcopy(value) for key, value in theirs.state[two].items()}
    for number in range(4, 8):
        for each, optimizer in ((other, theirs), (model, ours)):
            fill(each, number)
            optimizer.step()
    assert difference(all_of(model.parameters()), all_of(other.parameters())) < SAME
