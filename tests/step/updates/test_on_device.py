"""Adafactor and Lion on the device: the steps of others' own, skipped ones that change nothing, and states of both."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Adafactor as TransformersAdafactor

from brimful.step.updates.adafactor import SETTINGS, Adafactor
from brimful.step.updates.lion import Lion
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


class PlainLion(torch.optim.Optimizer):
    """As the paper has it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                moment = self.state[parameter].setdefault("state1", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * (BETAS[0] * moment + (1 - BETAS[0]) * parameter.grad).sign())
                moment.mul_(BETAS[1]).add_((1 - BETAS[1]) * parameter.grad)


def lion_of_bitsandbytes(given: Any) -> Any:
    optim = pytest.importorskip("bitsandbytes").optim
    return optim.Lion(given, lr=1.0, betas=BETAS, optim_bits=32)


BETAS = (0.9, 0.99)
THEIRS: dict[str, Any] = {
    "adafactor": lambda given: TransformersAdafactor(given, lr=1.0, **SETTINGS),
    "lion": lambda given: PlainLion(given, lr=1.0),
    "lion of bitsandbytes": lion_of_bitsandbytes,
}


def ours_of(name: str, given: Any, rate: torch.Tensor) -> Any:
    return Adafactor(given, rate) if name == "adafactor" else Lion(given, rate, betas=BETAS)


def by_theirs(name: str, model: nn.Module) -> list[torch.Tensor]:
    optimizer = THEIRS[name](groups(model))
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
@pytest.mark.parametrize("name", THEIRS)
def test_steps_are_those_of_others(name: str, scale: float | None, skipping: bool) -> None:
    """Steps are skipped whose gradient is not finite: weights, moments and counts are as they were."""
    model = Shapes()
    expected = by_theirs(name, copy.deepcopy(model))
    rate = torch.zeros(())
    optimizer = ours_of(name, groups(model), rate)
    for number in range(STEPS):
        rate.fill_(rate_of(number))
        optimizer.grad_scale = None if scale is None else torch.tensor(scale * 2.0 ** (number % 4))
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
        fill(model, number, 1.0 if scale is None else scale * 2.0 ** (number % 4))
        optimizer.step()
    assert difference(all_of(model.parameters()), all_of(expected)) < SAME
    moments = [state["exp_avg_sq"] for state in optimizer.state.values() if "exp_avg_sq" in state]
    assert all(moment.max() < 1e3 for moment in moments)  # those of scaled gradients are a million times as large


@pytest.mark.parametrize("name", THEIRS)
def test_states_of_others_are_gone_on_with(name: str) -> None:
    """A run that another's own began, which may count steps on the host."""
    model = Shapes()
    other = copy.deepcopy(model)
    theirs = THEIRS[name](groups(other))
    for group in theirs.param_groups:
        group["lr"] = 1e-2
    for number in range(4):
        fill(other, number)
        theirs.step()
    model.load_state_dict(other.state_dict())
    ours = ours_of(name, groups(model), torch.tensor(1e-2))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        ours.state[one] = {key: copy.deepcopy(value) for key, value in theirs.state[two].items()}
    for number in range(4, 8):
        for each, optimizer in ((other, theirs), (model, ours)):
            fill(each, number)
            optimizer.step()
    assert difference(all_of(model.parameters()), all_of(other.parameters())) < SAME
