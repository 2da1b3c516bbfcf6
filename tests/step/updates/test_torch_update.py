"""Optimizers that take neither the loss scale nor whether to skip from the device, and keep more than tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brimful.step.graphs.cache import GraphCache
from brimful.step.precision import Precision
from brimful.step.state import ParameterState, Part
from brimful.step.step import Step, make_schedule
from brimful.step.updates.torch_update import TorchUpdate
from recorder import CpuRecorder, OperationRecorder
from step.test_step import CPU, FAMILIES, ROWS, STEPS, TASK, execution_of, plain_run, same, snapshot, spoiled, weights
from tolerances import RUN_LOSS_FP32, RUN_WEIGHTS_FP32, difference


class Halving(torch.optim.Optimizer):
    """Keeps numbers and text, a step in halves of the learning rate, and a table of 8 bits in host memory."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["said"] = f"step {state['count']}"
                state["signs"] = (parameter.grad > 0).to(torch.uint8).cpu()
                factor = group["lr"] / 2 ** (state["count"] % 3)
                parameter.sub_(parameter.grad + 1e-4 * (state["signs"].to(parameter.device) - 0.5), alpha=factor)


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw, one parameter after another": lambda m: torch.optim.AdamW(m.parameters(), lr=0.0, foreach=False),
    "adamw on lists": lambda m: torch.optim.AdamW(m.parameters(), lr=0.0, foreach=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.0),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.0, momentum=0.9),
    "halving": lambda m: Halving(m.parameters(), lr=0.0),
}


def make_step(name: str, model: Any, *, precision: str = "fp32", max_grad_norm: float = 0.05) -> Step:
    chosen = Precision(value=precision, device=CPU, reason="a test")
    schedule = make_schedule("linear", 2e-3, STEPS, 3)
    update = TorchUpdate(
        model, lambda _: MAKERS[name](model), schedule, max_grad_norm=max_grad_norm, scaled=chosen.scaled
    )
    assert not update.on_device
    return Step(execution_of(model), TASK, update, chosen, seed=0)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MAKERS)
def test_ten_steps_are_those_of_a_plain_loop(name: str) -> None:
    model = FAMILIES["bert"].model(initializer_range=0.02)
    plain = copy.deepcopy(model)
    optimizer = MAKERS[name](plain)
    for group in optimizer.param_groups:
        group["lr"] = 2e-3
    expected = plain_run(plain, optimizer, 0.05)
    step = make_step(name, model)
    outcomes = [step.run(ROWS.batch(number)).read() for number in range(STEPS)]
    assert [o.loss for o in outcomes] == pytest.approx(expected, rel=RUN_LOSS_FP32)
    assert difference(weights(model), weights(plain)) < RUN_WEIGHTS_FP32


def test_steps_that_read_the_device_alone_are_replayed() -> None:
    """Eager at first, then as a graph of operations alone, and anew once a state was loaded."""

    class Squares(torch.optim.Optimizer):
        """All its numbers are tensors."""

        def __init__(self, parameters: Any, rate: Any) -> None:
            super().__init__(parameters, {"lr": rate})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in (p for p in group["params"] if p.grad is not None):
                    state = self.state[parameter]
                    if not state:
                        state |= {"count": torch.zeros(()), "squares": torch.zeros_like(parameter)}
                    state["count"] += 1
                    state["squares"] += parameter.grad.square()
                    parameter -= group["lr"] / state["count"] * parameter.grad / (state["squares"].sqrt() + 1e-3)

    def losses(rate: Any, recorder: CpuRecorder | None) -> list[float]:
        model = FAMILIES["bert"].model()
        schedule = make_schedule("linear", 2e-3, STEPS, 3)
        update = TorchUpdate(
            model, lambda _: Squares(model.parameters(), rate), schedule, max_grad_norm=0.05, scaled=False,
            own_states=True, is_recordable=lambda each: isinstance(each, Squares),
        )  # fmt: skip
        update._keeps_gradients = True  # as on a GPU: where they are does not change
        if recorder is not None:
            update.record_with(GraphCache(recorder, what="the optimizer's steps", note=pytest.fail))
        step = Step(execution_of(model), TASK, update, Precision(value="fp32", device=CPU, reason="a test"), seed=0)
        told = [step.run(ROWS.batch(number)).read() for number in range(3)]
        saved = snapshot(step)
        told += [step.run(ROWS.batch(number)).read() for number in range(3, 5)]
        step.load_state(saved)
        return [each.loss for each in told] + [step.run(ROWS.batch(number)).read().loss for number in range(3, STEPS)]

    recorder = OperationRecorder()
    assert losses(torch.zeros(()), recorder) == pytest.approx(losses(0.0, None), rel=RUN_LOSS_FP32)
    assert recorder.num_recorded == 2


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_not_finite_is_skipped(name: str) -> None:
    step = make_step(name, FAMILIES["bert"].model())
    for number in (0, 1):
        assert step.run(ROWS.batch(number)).read().applied
    before, batch = snapshot(step), ROWS.batch(2)
    with spoiled(step.execution, batch, {23}, math.nan):
        outcome = step.run(batch).read()
    assert (outcome.applied, outcome.bad_samples) == (False, (23,))
    assert same(snapshot(step), before)
    assert step.run(ROWS.batch(3)).read().applied


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["adamw on lists", "halving"])
def test_an_overflow_in_fp16_lowers_the_scale(name: str) -> None:
    step = make_step(name, FAMILIES["bert"].model(), precision="fp16")
    exact = make_step(name, FAMILIES["bert"].model())
    found, expected = [], []
    for number, scale in enumerate((64.0, 2.0**40, 64.0)):
        step.update.scale.fill_(scale)
        outcome = step.run(ROWS.batch(number)).read()
        assert (outcome.applied, outcome.overflow) == (scale == 64.0, scale != 64.0)
        assert float(step.update.scale) == (2.0**39 if outcome.overflow else 64.0)
        if outcome.applied:
            found.append(outcome.grad_norm)
            expected.append(exact.run(ROWS.batch(number)).read().grad_norm)
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MAKERS)
def test_a_continued_run_is_bit_equal(name: str) -> None:
    through = make_step(name, FAMILIES["bert"].model())
    whole = [through.run(ROWS.batch(number)).read() for number in range(STEPS)]
    stopped = make_step(name, FAMILIES["bert"].model())
    for number in range(4):
        stopped.run(ROWS.batch(number))
    saved = snapshot(stopped)
    resumed = make_step(name, FAMILIES["bert"].model(3))
    resumed.load_state(saved)
    assert [resumed.run(ROWS.batch(number)).read() for number in range(4, STEPS)] == whole[4:]
    assert same(snapshot(resumed), snapshot(through))
    if name == "halving":
        kept = saved.optimizer["classifier.weight"]
        assert (kept.values, kept.tensors.keys()) == ({"count": 4, "said": "step 4"}, {"signs"})


def test_what_was_kept_in_host_memory_goes_back_there() -> None:
    weight = torch.empty(2, device="meta")
    kept = ParameterState.of({"step": torch.tensor(3.0), "m": torch.empty(2, device="meta"), "n": 3}, weight)
    assert (kept.on_host, kept.values) == (("step",), {"n": 3})
    loaded = ParameterState(
        tensors={"step": torch.tensor(3.0), "m": torch.ones(2)}, values=kept.values, on_host=("step",)
    )
    restored: dict[str, Tensor] = loaded.restored(weight)
    assert {name: getattr(value, "device", None) for name, value in restored.items()} == {
        "step": CPU, "m": torch.device("meta"), "n": None,
    }  # fmt: skip


def test_part_of_a_state_is_refused() -> None:
    step = make_step("momentum", FAMILIES["bert"].model())
    with pytest.raises(ValueError, match="a whole state is needed"):
        step.load_state(replace(step.state(), parts={"weights/x": Part(shape=(4,), starts=(2,))}))
