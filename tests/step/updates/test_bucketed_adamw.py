"""AdamW by buckets: torch's own update bit for bit where nothing is rounded, and each way to do with less memory."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from brimful.levers.lever import StepWork
from brimful.levers.optimizer import Optimizer
from brimful.step.step import Step
from brimful.step.updates import bucketed_adamw
from brimful.step.updates.bucketed_adamw import Savings
from brimful.step.updates.rounding import mix, stochastic_bf16
from step.test_step import ROWS, STEPS, make_step, same, snapshot, weights
from tiny import FAMILIES
from tolerances import difference

PLAIN = Optimizer(value="adamw_torch", weight_decay=0.1)
SMALL = {"max_grad_norm": 0.05}  # every step is clipped


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucketed_adamw, "BUCKET", 1500)
    monkeypatch.setattr(bucketed_adamw, "LEAST_IN_8_BITS", 200)


def saving(**savings: Any) -> Optimizer:
    return dataclasses.replace(PLAIN, savings=Savings(**savings))


def model_of(seed: int = 0) -> Any:
    return FAMILIES["bert"].model(dropout=0.1, seed=seed).train()


def course(step: Step, start: int = 0) -> list[Any]:
    return [step.run(ROWS.batch(number)).read() for number in range(start, STEPS)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("savings", "settings"),
    [
        ({"on_host": True}, SMALL),
        ({"in_backward": True}, {"max_grad_norm": 0.0}),
        ({"in_backward": True, "on_host": True}, {"max_grad_norm": 0.0}),
    ],
    ids=["host", "backward", "both"],
)
def test_nothing_changes_bit_for_bit(savings: Any, settings: Any) -> None:
    """Of batches of one micro-batch and of several, ragged at the end."""
    plain, saved = model_of(), model_of()
    one = make_step(plain, optimizer=PLAIN, **settings)
    other = make_step(saved, optimizer=saving(**savings), **settings)
    assert len(other.update._buckets) > 3  # type: ignore[attr-defined]
    expected, found = course(one), course(other)
    assert [o.loss for o in found] == [o.loss for o in expected]
    assert [o.grad_norm for o in found] == pytest.approx([o.grad_norm for o in expected], rel=1e-6)
    assert torch.equal(weights(saved), weights(plain))
    assert same(snapshot(other), snapshot(one), "optimizer")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    "savings",
    [
        {"on_host": True},
        {"in_backward": True, "late_clipping": True},
        {"states": torch.bfloat16, "in_backward": True, "on_host": True, "late_clipping": True},
        {"weights": torch.bfloat16, "states": torch.bfloat16},
        {"weights": torch.bfloat16, "states": torch.uint8, "on_host": True},
    ],
    ids=["host", "late", "bf16 states", "bf16 weights", "8 bits"],
)
def test_a_continued_run_is_bit_equal(savings: Any) -> None:
    precision = "bf16" if "weights" in savings else "fp32"
    through = make_step(model_of(), optimizer=saving(**savings), precision=precision, **SMALL)
    whole = course(through)
    stopped = make_step(model_of(), optimizer=saving(**savings), precision=precision, **SMALL)
    for number in range(4):
        stopped.run(ROWS.batch(number))
    saved = snapshot(stopped)
    resumed = make_step(model_of(3), optimizer=saving(**savings), precision=precision, **SMALL)
    resumed.load_state(saved)
    assert course(resumed, 4) == whole[4:]
    assert same(snapshot(resumed), snapshot(through))


def test_gradients_are_gone_when_the_backward_pass_is_done() -> None:
    step = make_step(model_of(), optimizer=saving(in_backward=True), max_grad_norm=0.0, packed=False)
    kept: list[int] = []
    most = sum(p.nbytes for p in step.update.parameters)
    for parameter in step.update.parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: kept.append(sum(p.grad.nbytes for p in step.update.parameters if p.grad is not None))
        )
    batch = ROWS.batch(STEPS - 1, packed=False)
    assert len(batch.micro_batches) == 1
    step.update.whole = True
    step.accumulate(batch, 0)
    assert max(kept) < 0.6 * most  # a table of embeddings is most of it
    assert all(p.grad is None for p in step.update.parameters if p.ndim > 1)


def test_clipping_is_by_the_norm_of_the_step_before() -> None:
    """By hand, in a plain loop with torch's AdamW, of batches in one micro-batch and in several; the first step is not
    clipped."""
    model, late = model_of(), copy.deepcopy(model_of())
    model.eval(), late.eval()
    step = make_step(late, optimizer=saving(in_backward=True, late_clipping=True), **SMALL)
    plain = make_step(model, optimizer=PLAIN, max_grad_norm=0.0)
    norm = None
    for number in (STEPS - 1, 0, STEPS - 1, 1, STEPS - 1):
        batch = ROWS.batch(number)
        assert (len(batch.micro_batches) == 1) == (number == STEPS - 1)
        found = step.run(batch).read()
        expected = plain.update
        for index in range(len(batch.micro_batches)):
            plain.accumulate(batch, index)
        gradients = [p.grad for p in expected.parameters if p.grad is not None]
        now = float(torch.nn.utils.get_total_norm(gradients))
        if norm is not None:
            torch._foreach_mul_(gradients, min(1.0, 0.05 / (norm + 1e-6)))
        norm = now
        plain.update.apply(gathered=False)
        assert found.grad_norm == pytest.approx(now, rel=1e-5)
        assert difference(weights(late), weights(model)) < 1e-5


def test_a_gradient_that_is_not_finite_is_said_and_stops_there() -> None:
    model = model_of()
    step = make_step(model, optimizer=saving(in_backward=True), max_grad_norm=0.0)
    step.run(ROWS.batch(STEPS - 1))
    first = next(iter(step.update.parameters))
    before = weights(model)
    hook = first.register_hook(lambda g: g * float("nan"))
    outcome = step.run(ROWS.batch(STEPS - 1)).read()
    hook.remove()
    assert not outcome.applied
    assert torch.equal(first, before[: first.numel()].view(first.shape))
    assert not torch.equal(weights(model), before)  # buckets before it were updated
    assert step.run(ROWS.batch(STEPS - 1)).read().applied


def test_weights_in_bf16_learn_as_those_with_masters() -> None:
    """Rounded to the nearest, updates this small would all be lost."""
    plain, small = model_of(), model_of()
    schedule = torch.full((STEPS + 1,), 1e-5)
    course(make_step(plain, optimizer=PLAIN, precision="bf16", schedule=schedule))
    step = make_step(small, optimizer=saving(weights=torch.bfloat16), precision="bf16", schedule=schedule)
    assert {p.dtype for p in step.update.parameters} == {torch.bfloat16, torch.float32}
    course(step)
    half = {name for name, kept in step.state().weights.items() if kept.dtype == torch.bfloat16}
    assert "bert.encoder.layer.0.intermediate.dense.weight" in half
    step.release()
    assert {p.dtype for p in small.parameters()} == {torch.float32}

    def moved(model: Any, dtype: torch.dtype) -> torch.Tensor:
        began = model_of().to(dtype).float()
        pairs = [(model.get_parameter(name), began.get_parameter(name)) for name in sorted(half)]
        return torch.cat([(now - before).detach().flatten() for now, before in pairs])

    found, expected = moved(small, torch.bfloat16), moved(plain, torch.float32)
    assert float(found @ expected / (expected @ expected)) == pytest.approx(1.0, abs=0.2)


def test_numbers_are_rounded_up_with_a_chance_of_their_share() -> None:
    x = torch.full((200_000,), 1.0 + 2.0**-7 * 0.3)  # between two neighbours
    rounded = stochastic_bf16(x, mix(torch.tensor(5), 3))
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    share = float((rounded > 1).float().mean())
    assert share == pytest.approx(0.3, abs=0.005)
    assert not torch.equal(rounded, stochastic_bf16(x, mix(torch.tensor(5), 4)))
    edges = torch.tensor([0.0, -1.0, float("inf"), float("-inf"), 3.0e38])
    assert torch.equal(stochastic_bf16(edges[:4], mix(torch.tensor(1))), edges[:4].bfloat16())
    assert stochastic_bf16(torch.tensor([float("nan")]), mix(torch.tensor(1))).isnan()
    assert torch.equal(rounded, stochastic_bf16(rounded.float(), mix(torch.tensor(9))))


def test_losses_with_bf16_states_are_near() -> None:
    expected = course(make_step(model_of(), optimizer=PLAIN))
    found = course(make_step(model_of(), optimizer=saving(states=torch.bfloat16)))
    assert found[0].loss == expected[0].loss
    assert [o.loss for o in found] == pytest.approx([o.loss for o in expected], rel=0.02)


def test_states_in_8_bits_are_those_of_linear_weights() -> None:
    """A byte for each of their moments, and 8 for a block's scales; losses stay near."""
    step = make_step(model_of(), optimizer=saving(states=torch.uint8))
    kept = {name: step.update._moments(i) for i, name in enumerate(step.update.named)}  # type: ignore[attr-defined]
    in_8_bits = {name for name, moments in kept.items() if moments.first.dtype == torch.uint8}
    assert "bert.encoder.layer.0.attention.self.query.weight" in in_8_bits
    assert not any("embeddings" in name or "bias" in name or "LayerNorm" in name for name in in_8_bits)
    assert {kept[name].first.dtype for name in kept.keys() - in_8_bits} == {torch.float32}
    found, expected = course(step), course(make_step(model_of(), optimizer=PLAIN))
    assert [o.loss for o in found] == pytest.approx([o.loss for o in expected], rel=0.02)
    assert found != expected


@pytest.mark.parametrize("on_host", [False, True])
def test_bytes_of_states_in_8_bits_are_those_that_the_lever_counts(on_host: bool) -> None:
    """But for scales, one in 32 bytes, small weights and the ends of parts."""
    model = FAMILIES["bert"].model(hidden_size=128, intermediate_size=256)
    work = StepWork.of(model, np.array([8]), flops_per_s=1.0, bytes_per_s=1.0)
    lever = saving(states=torch.uint8, on_host=on_host)
    update = make_step(model, optimizer=lever).update
    found = sum(arena.nbytes for arena in update._arenas)  # type: ignore[attr-defined]
    counted = lever.cost(work).resident_bytes
    assert counted == 0 if on_host else found == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("savings", [{}, {"in_backward": True, "late_clipping": True}, {"states": torch.bfloat16}])
def test_numbers_of_a_step_are_in_memory_of_the_updates_own(savings: Any) -> None:
    """A tensor that a step makes anew is in a graph's memory, and keeps all of that when the graph is gone."""
    step = make_step(model_of(), optimizer=saving(**savings), **SMALL)
    step.run(ROWS.batch(0)).read()
    tensors = {name: value for name, value in vars(step.update).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 5
    step.run(ROWS.batch(1)).read()
    assert not [name for name, tensor in tensors.items() if vars(step.update)[name] is not tensor]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("states", [torch.float32, torch.uint8])
def test_states_that_were_never_used_can_be_put_aside(states: torch.dtype) -> None:
    """And are zeros again; those that were used stay."""
    plain, aside = (make_step(model_of(), optimizer=saving(states=states), **SMALL) for _ in range(2))
    update: Any = aside.update
    update.put_states_aside()
    update.put_states_aside()  # memory ran out before they were restored
    assert not any(arena.untyped_storage().nbytes() for arena in update._arenas)
    update.restore_states()
    assert not any(arena.any() for arena in update._arenas)
    assert [o.loss for o in course(aside)] == [o.loss for o in course(plain)]
    update.put_states_aside()
    assert all(arena.any() for arena in update._arenas)
    assert same(snapshot(aside), snapshot(plain))
