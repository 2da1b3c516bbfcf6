"""AdamW in bitsandbytes' 8 bits by our kernel, through Triton's interpreter: against the arithmetic as it is written,
and against bitsandbytes' own where it is installed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from brimful.levers import optimizer_names
from brimful.step.state import ParameterState
from brimful.step.updates import rounded_kernels
from brimful.step.updates.bitsandbytes_adamw import LEAST, BitsandbytesAdamW
from brimful.step.updates.moments import shares_of
from levers.test_named_optimizers import make_step
from step.test_step import ROWS, snapshot
from tiny import FAMILIES

BETAS, EPSILON, RATE, DECAY = (0.9, 0.98), 1e-8, 1e-2, 0.1
CPU = torch.device("cpu")


def shares() -> tuple[Tensor, Tensor]:
    """Shares as bitsandbytes has them: the largest is one of its own, and not instead of the last middle."""
    found = []
    for signed in (True, False):
        ours = shares_of(signed, CPU).clone()
        ours[254] = 0.1 + 0.9 * (1 - 0.5 / (64 if signed else 128))
        ours[0] = -ours[254] if signed else 0.0
        found.append(ours)
    return found[0], found[1]


def model() -> nn.Module:
    """Numbers that fill no whole block and no whole program, few of them, and some without a gradient at first."""
    torch.manual_seed(0)
    return nn.ModuleDict({"large": nn.Linear(67, 71), "late": nn.Linear(64, 64, bias=False)})


def groups(of: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in of.parameters() if (p.ndim > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, DECAY), (False, 0.0))
    ]


def fill(of: nn.Module, number: int, scale: float = 1.0, *, decades: float = 5, alike: bool = False) -> None:
    """Give gradients. alike: none that is small, nor of another sign than before."""
    draw = torch.Generator().manual_seed(number)
    for name, parameter in of.named_parameters():
        gradient = torch.randn(parameter.shape, generator=draw) * torch.logspace(-decades, 0, parameter.shape[-1])
        if alike:
            gradient = 1.5 + gradient.sign()
        given = (gradient * scale).to(parameter.device)
        parameter.grad = None if name.startswith("late") and number < 2 else given


def ours_of(of: nn.Module) -> BitsandbytesAdamW:
    rate = torch.tensor(RATE, device=next(of.parameters()).device)
    return BitsandbytesAdamW(groups(of), rate, betas=BETAS, eps=EPSILON, shares=shares())


class Written:
    """The same arithmetic as it is written, each moment the share of its block's largest that is nearest."""

    def __init__(self, of: nn.Module) -> None:
        self._groups, self._kept = groups(of), dict[int, list[Tensor]]()
        self._steps: dict[int, int] = {}

    def step(self) -> None:
        for group in self._groups:
            for p in (each for each in group["params"] if each.grad is not None):
                first, second = self._kept.setdefault(id(p), [torch.zeros(p.numel()) for _ in range(2)])
                n = self._steps[id(p)] = self._steps.get(id(p), 0) + 1
                g = p.grad.flatten()
                first.lerp_(g, 1 - BETAS[0])
                second.lerp_(g * g, 1 - BETAS[1])
                sizes = (second / (1 - BETAS[1] ** n)).sqrt() + EPSILON
                with torch.no_grad():
                    p.mul_(1 - RATE * group.get("weight_decay", 0.0))
                    p.sub_((RATE / (1 - BETAS[0] ** n) * first / sizes).view_as(p))
                if p.numel() >= LEAST:
                    self._kept[id(p)] = [nearest(x, each) for x, each in zip((first, second), shares(), strict=True)]


def nearest(x: Tensor, of: Tensor) -> Tensor:
    whole = nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
    largest = whole.abs().amax(1, keepdim=True)
    found = of[((whole / largest.clamp_min(1e-38)).unsqueeze(-1) - of).abs().argmin(-1)]
    return (found * largest).flatten()[: len(x)]


def weights(of: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in of.parameters()])


def test_steps_are_those_that_are_written() -> None:
    """Scaled gradients, and steps between that are skipped: weights, moments and counts are as they were."""
    plain, mine = model(), model()
    written, ours = Written(plain), ours_of(mine)
    for number in range(4):
        fill(plain, number)
        written.step()
        fill(mine, number, math.nan)
        before = copy.deepcopy(ours.state_dict()["state"]), weights(mine)
        ours.found_inf, ours.grad_scale = torch.ones(()), torch.tensor(8.0)
        ours.step()
        assert torch.equal(weights(mine), before[1])
        for index, kept in before[0].items():
            now = ours.state_dict()["state"][index]
            assert all(torch.equal(now[name], value) for name, value in kept.items())
        fill(mine, number, 8.0)
        ours.found_inf = torch.zeros(())
        ours.step()
        off = (weights(mine) - weights(plain)).abs()
        assert float((off > 1e-6).float().mean()) < 0.01  # where the last bit decides which share is nearest
        assert float(off.max()) < RATE / 10
    assert {str(each["state1"].dtype) for each in ours.state.values()} == {"torch.uint8", "torch.float32"}
    assert sorted(float(each["step"]) for each in ours.state.values()) == [2.0, 4.0, 4.0]


def of_bitsandbytes(of: nn.Module) -> Any:
    optim = pytest.importorskip("bitsandbytes").optim
    return optim.AdamW(groups(of), lr=RATE, betas=BETAS, eps=EPSILON, optim_bits=8, weight_decay=0.0)


def test_each_goes_on_with_what_the_other_began() -> None:
    theirs_model, mine = model(), model()
    theirs, ours = of_bitsandbytes(theirs_model), ours_of(mine)
    for number in range(3):
        for of, optimizer in ((theirs_model, theirs), (mine, ours)):
            fill(of, number, alike=True)  # on a CPU theirs takes all that is small for one share above 0
            optimizer.step()
    kept = [ParameterState.of(ours.state[p], p) for p in mine.parameters()]
    for one, two, state in zip(mine.parameters(), theirs_model.parameters(), kept, strict=True):
        assert torch.allclose(one, two, atol=RATE / 1000)
        ours.state[one] = ParameterState.of(theirs.state[two], two).restored(one)
        state.fill(theirs.state[two])
        assert type(theirs.state[two]["step"]) is int
    for of, optimizer in ((theirs_model, theirs), (mine, ours)):
        fill(of, 3, alike=True)
        optimizer.step()
    assert torch.allclose(weights(mine), weights(theirs_model), atol=RATE / 1000)
    assert {float(ours.state[p]["step"]) for p in mine.parameters()} == {2.0, 4.0}


def test_it_is_made_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, whose states are in 32 bits, by torch's fused AdamW, which decides on the device, too."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for ours, theirs in zip(shares(), (functional.create_dynamic_map(signed=s) for s in (True, False)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6)
    of, given = model(), {"learning_rate": RATE, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": EPSILON}
    given |= {"weight_decay": 0.0, "warmup_steps": 0, "optim_args": None}
    embeddings = [of["late"].weight]  # type: ignore[index, union-attr]

    def made() -> list[Any]:
        return optimizer_names.make_optimizers("adamw_bnb_8bit", groups(of), embeddings, given, torch.tensor(RATE))

    assert [type(each).__module__.split(".")[0] for each in made()] == ["bitsandbytes", "torch"]
    monkeypatch.setattr(rounded_kernels, "can_launch", lambda device, betas: True)
    ours, fused = made()
    assert isinstance(ours, BitsandbytesAdamW)
    assert fused.defaults["fused"] is True
    assert all(each._step_supports_amp_scaling for each in (ours, fused))
    assert [group["weight_decay"] for group in ours.param_groups] == [DECAY, 0.0]


@pytest.mark.parametrize("begins", [False, True], ids=["theirs", "ours"])
def test_a_run_is_gone_on_with_by_either(monkeypatch: pytest.MonkeyPatch, begins: bool) -> None:
    """Embeddings' states with it, which torch's AdamW has in another form each."""
    pytest.importorskip("bitsandbytes")
    found = {}
    for goes_on in (begins, not begins):
        monkeypatch.setattr(rounded_kernels, "can_launch", lambda device, betas: begins)
        stopped = make_step("adamw_bnb_8bit", FAMILIES["bert"].model(hidden_size=64))
        assert stopped.update.on_device == begins
        for number in range(4):
            stopped.run(ROWS.batch(number)).read()
        saved = snapshot(stopped)
        monkeypatch.setattr(rounded_kernels, "can_launch", lambda device, betas, ours=goes_on: ours)
        resumed = make_step("adamw_bnb_8bit", FAMILIES["bert"].model(3, hidden_size=64))
        resumed.load_state(saved)
        found[goes_on] = [resumed.run(ROWS.batch(number)).read().loss for number in range(4, 8)]
    assert found[True] == pytest.approx(found[False], rel=2e-2)
    assert "fused" not in saved.groups[-1]


def test_weights_in_another_order_of_memory_are_those_of_their_gradients() -> None:
    found = []
    for turned in (False, True):
        torch.manual_seed(0)
        drawn, gradient = torch.randn(80, 90), torch.randn(80, 90)
        weight = nn.Parameter(drawn.t().contiguous().t() if turned else drawn)
        optimizer = BitsandbytesAdamW([weight], torch.tensor(RATE), betas=BETAS, eps=EPSILON, shares=shares())
        for _ in range(3):
            weight.grad = gradient.clone()
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)
