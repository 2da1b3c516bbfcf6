"""Ten steps against a plain loop; what a step does when numbers are not finite; going on as if never stopped."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from brimful.core.options.choices import ScheduleChoice
from brimful.core.records import LabelSpace
from brimful.data.batches.batch import Batch, PackedLayout, PaddedLayout, make_batch
from brimful.data.batches.packing import Budgets
from brimful.data.batches.padding import PaddedShapes
from brimful.levers.optimizer import Optimizer, decayed_names, parameter_groups
from brimful.models.packed.packed_forward import LayoutModel, PackedForm, PackedModel, PaddedModel
from brimful.step.precision import Precision
from brimful.step.state import ParameterState, StepState
from brimful.step.step import Outcome, Pending, Step, make_schedule
from brimful.tasks.task import SingleLabel, Task
from plain import padded, plain_loss
from tiny import FAMILIES, LONGEST, sequences
from tolerances import LEARNING_RATE, RUN_LOSS_FP32, RUN_WEIGHTS_FP32, difference

CPU = torch.device("cpu")
TASK = SingleLabel(LabelSpace(task="single_label", names=("a", "b", "c")), np.array([1, 2, 0.5], dtype=np.float32), 0.1)
STEPS = 10
PACKED = PackedLayout(
    budgets=Budgets(tokens=(48, 80), fill=1.0), num_slots=6, max_length=LONGEST, padding_id=0, groups=True
)
PADDED = PaddedLayout(shapes=PaddedShapes(lengths=(16, 32, 64), num_tokens=96, num_rows=6), max_length=64, padding_id=0)


@dataclass(frozen=True)
class Rows:
    """Samples of ten batches, ragged at the end, and their layouts."""

    lengths: list[list[int]] = field(
        default_factory=lambda: [*np.random.default_rng(1).integers(1, 40, (STEPS - 1, 6)).tolist(), [7, 30]]
    )

    def samples(self, number: int) -> np.ndarray:
        return np.arange(len(self.lengths[number])) + 10 * number

    def ids(self, number: int) -> list[np.ndarray]:
        return sequences(self.lengths[number], seed=number)

    def targets(self, number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, 3, len(self.lengths[number]))

    def batch(self, number: int, *, packed: bool = True, task: Task = TASK) -> Batch:
        layout = PACKED if packed else PADDED
        return make_batch(number, self.samples(number), self.ids(number), None, self.targets(number), task, layout)


ROWS = Rows()


def execution_of(model: Any, family: str = "bert", *, packed: bool = True) -> LayoutModel:
    known = FAMILIES[family]
    form = PackedForm(pooling=known.pooling, first_position=known.first_position)
    return PackedModel(model, form) if packed else PaddedModel(model)


def make_step(
    model: Any,
    *,
    family: str = "bert",
    packed: bool = True,
    optimizer: Optimizer | None = None,
    precision: str = "fp32",
    max_grad_norm: float = 1.0,
    schedule: Tensor | None = None,
    seed: int = 0,
) -> Step:
    chosen = Precision(value=precision, device=CPU, reason="a test")
    update = (optimizer or Optimizer(value="adamw_torch", weight_decay=0.1)).update(
        model,
        make_schedule("linear", 2e-3, STEPS, 3) if schedule is None else schedule,
        chosen,
        max_grad_norm=max_grad_norm,
    )
    return Step(execution_of(model, family, packed=packed), TASK, update, chosen, seed=seed)


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def snapshot(step: Step) -> StepState:
    return copy.deepcopy(step.state())


def same(one: StepState, other: StepState, *parts: str) -> bool:
    """Bit for bit."""
    return all(_same(getattr(one, part), getattr(other, part)) for part in parts or [f.name for f in fields(StepState)])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, ParameterState):
        return one.values == other.values and _same(one.tensors, other.tensors)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)


@pytest.mark.sampled
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_batch_that_was_sent_is_the_same_step(packed: bool) -> None:
    here, there = (make_step(FAMILIES["bert"].model(3).train(), packed=packed) for _ in range(2))
    for number in range(STEPS):
        batch = ROWS.batch(number, packed=packed)
        one, other = here.run(batch).read(), there.run(batch.sent(CPU)).read()
        assert one == other
    assert same(snapshot(here), snapshot(there))


# --- against a plain loop -------------------------------------------------------------------------------------------


def plain_run(model: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> list[float]:
    """Ten steps as tutorials write them: padded batches, eager attention, a mean loss, a scheduler."""
    model.set_attn_implementation("eager")
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    losses = []
    for number in range(STEPS):
        loss = plain_loss(TASK, model(**padded(ROWS.ids(number), None, 0)).logits, ROWS.targets(number))
        loss.backward()
        if max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "optim", "max_grad_norm", "packed"),
    [
        ("bert", "adamw_torch", 1.0, True),
        ("bert", "adamw_torch", 0.05, True),
        ("bert", "adamw_torch_fused", 0.0, True),
        ("bert", "adamw_torch_fused", 1e9, False),
        ("bert", "adamw_torch_fused", 0.05, False),
        ("bert", "sgd", 0.0, False),
        ("bert", "sgd", 0.05, True),
        ("llama", "adamw_torch_fused", 0.05, True),
        ("llama", "adamw_torch_fused", 1.0, False),
        ("llama", "sgd", 1e9, True),
    ],
)
def test_ten_steps_are_those_of_a_plain_loop(family: str, optim: Any, max_grad_norm: float, packed: bool) -> None:
    model = FAMILIES[family].model(initializer_range=0.02)
    plain = copy.deepcopy(model)
    groups = parameter_groups(plain, decayed_names(plain), 0.1)
    expected = plain_run(
        plain,
        torch.optim.SGD(groups, lr=2e-3) if optim == "sgd" else torch.optim.AdamW(groups, lr=2e-3),
        max_grad_norm,
    )
    step = make_step(
        model,
        family=family,
        packed=packed,
        optimizer=Optimizer(value=optim, weight_decay=0.1),
        max_grad_norm=max_grad_norm,
    )
    before = weights(model).clone()
    outcomes = [step.run(ROWS.batch(number, packed=packed)).read() for number in range(STEPS)]
    assert [o.loss for o in outcomes] == pytest.approx(expected, rel=RUN_LOSS_FP32)
    assert difference(weights(model), weights(plain)) < RUN_WEIGHTS_FP32
    assert difference(weights(model) - before, weights(plain) - before) < 1e-3  # what was learned, not what was there
    assert [o.number for o in outcomes] == list(range(STEPS))
    assert all(o.applied and not o.overflow and o.bad_samples == () and o.scale == 1 for o in outcomes)
    assert [o.num_samples for o in outcomes] == [6] * 9 + [2]
    assert [o.num_tokens for o in outcomes] == [sum(lengths) for lengths in ROWS.lengths]
    assert int(step.update.applied) == STEPS


def test_readings_are_those_of_the_gradient_before_clipping() -> None:
    model = FAMILIES["bert"].model()
    plain = copy.deepcopy(model)
    outcome = make_step(model, max_grad_norm=0.01).run(ROWS.batch(0)).read()
    plain_loss(TASK, plain(**padded(ROWS.ids(0), None, 0)).logits, ROWS.targets(0)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert outcome.learning_rate == 0.0  # the first of a warm-up


def test_what_a_model_does_not_use_is_left_alone() -> None:
    check_what_a_model_does_not_use(fused=False)


def check_what_a_model_does_not_use(*, fused: bool) -> None:
    """No gradient, no weight decay: as a plain loop has it."""
    model = FAMILIES["bert"].model()
    model.register_module("unused", nn.Linear(4, 4))
    frozen = model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    before = [frozen.clone(), *(p.detach().clone() for p in model.unused.parameters())]
    step = make_step(model, optimizer=Optimizer(value="adamw_torch", weight_decay=0.5, fused=fused))
    for number in range(3):
        step.run(ROWS.batch(number))
    after = [frozen, *model.unused.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any("unused" in name for name in step.state().optimizer)


def test_biases_and_norms_do_not_decay() -> None:
    model = FAMILIES["bert"].model()
    decayed, others = parameter_groups(model, decayed_names(model), 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("LayerNorm" not in names[id(p)] and "bias" not in names[id(p)] for p in decayed["params"])
    assert all("LayerNorm" in names[id(p)] or "bias" in names[id(p)] for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_a_step_beyond_the_schedule_keeps_its_last_rate() -> None:
    step = make_step(FAMILIES["bert"].model(), schedule=torch.tensor([1e-3, 5e-4]))
    assert [step.run(ROWS.batch(n)).read().learning_rate for n in range(4)] == pytest.approx([1e-3, 5e-4, 5e-4, 5e-4])


# --- the schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps", "num_warmup_steps"), [(1, 0), (20, 0), (20, 6), (7, 7), (10, 15), (300, 30)])
@pytest.mark.parametrize("name", get_args(ScheduleChoice))
def test_the_table_is_transformers_schedule(name: str, num_steps: int, num_warmup_steps: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps)
    expected = []
    for _ in range(num_steps):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        with contextlib.suppress(ZeroDivisionError):  # the step after the last of a polynomial that is all warm-up
            scheduler.step()
    found = make_schedule(name, 3e-4, num_steps, num_warmup_steps)
    assert found.dtype == torch.float32
    assert len(found) == num_steps + 1
    assert torch.isfinite(found).all()
    assert found.tolist()[:num_steps] == pytest.approx(expected, rel=LEARNING_RATE, abs=1e-12)


# --- steps that are not finite --------------------------------------------------------------------------------------


@contextmanager
def spoiled(execution: LayoutModel, batch: Batch, samples: set[int], value: float) -> Iterator[None]:
    """The logits of some samples of a batch replaced by `value`, in its one pass through the micro-batches."""
    micros = iter(batch.micro_batches)
    head = execution.head  # type: ignore[attr-defined]

    def spoil(states_SH: Tensor) -> Tensor:
        logits_SC: Tensor = head(states_SH)
        here = next(micros).samples
        hit_S = torch.tensor([s < len(here) and int(here[s]) in samples for s in range(len(logits_SC))])
        return logits_SC * torch.where(hit_S, value, 1.0)[:, None]

    execution.head = spoil  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del execution.head  # type: ignore[attr-defined]


@pytest.mark.sampled
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad_samples", [{23}, {20, 25}])
def test_samples_that_are_not_finite_are_named_and_cost_one_step(bad_samples: set[int], value: float) -> None:
    step = make_step(FAMILIES["bert"].model())
    for number in (0, 1):
        assert step.run(ROWS.batch(number)).read().applied
    before, batch = snapshot(step), ROWS.batch(2)
    assert len(batch.micro_batches) > 1
    with spoiled(step.execution, batch, bad_samples, value):
        outcome = step.run(batch).read()
    assert not outcome.applied
    assert not outcome.overflow
    assert not math.isfinite(outcome.loss)
    assert set(outcome.bad_samples) == bad_samples
    assert len(outcome.bad_samples) == len(bad_samples)
    assert same(snapshot(step), before)
    assert int(step.update.applied) == 2
    clean = make_step(copy.deepcopy(step.execution.model))
    clean.load_state(before)
    after, expected = step.run(ROWS.batch(3)).read(), clean.run(ROWS.batch(3)).read()
    assert after.applied
    assert (after.loss, after.learning_rate) == (expected.loss, expected.learning_rate)
    assert same(snapshot(step), snapshot(clean))


def test_a_sequence_that_is_not_finite_spoils_no_other() -> None:
    """One whose hidden states are: nothing of it reaches the sequences beside it in the row."""
    model = FAMILIES["bert"].model()
    batch = ROWS.batch(2)
    rare = 4  # an id that no sequence has
    ids = [i.copy() for i in ROWS.ids(2)]
    ids[3][0] = rare
    batch = make_batch(
        2,
        ROWS.samples(2),
        ids,
        None,
        ROWS.targets(2),
        TASK,
        PackedLayout(
            budgets=Budgets(tokens=(256,), fill=1.0), num_slots=8, max_length=LONGEST, padding_id=0, groups=True
        ),
    )
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[rare] = float("nan")
    outcome = make_step(model).run(batch).read()
    assert not outcome.applied
    assert outcome.bad_samples == (23,)


def test_a_gradient_that_is_not_finite_names_the_whole_batch() -> None:
    """The loss is fine: no sample is worse than another."""
    model = FAMILIES["bert"].model()
    model.classifier.weight.register_hook(lambda gradient: gradient * float("inf"))
    step = make_step(model)
    before = snapshot(step)
    outcome = step.run(ROWS.batch(4)).read()
    assert not outcome.applied
    assert math.isfinite(outcome.loss)
    assert not math.isfinite(outcome.grad_norm)
    assert sorted(outcome.bad_samples) == ROWS.samples(4).tolist()
    assert same(snapshot(step), before, "weights")


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_an_overflow_in_fp16_lowers_the_scale_and_nothing_else(optim: Any) -> None:
    step = make_step(FAMILIES["bert"].model(), precision="fp16", optimizer=Optimizer(value=optim, weight_decay=0.1))
    first = step.run(ROWS.batch(0)).read()
    while not first.applied:  # the first scales may be too large for this model
        first = step.run(ROWS.batch(0)).read()
    before = snapshot(step)
    scale = float(step.update.scale)
    step.update.scale.fill_(2.0**40)
    outcome = step.run(ROWS.batch(1)).read()
    assert (outcome.applied, outcome.overflow, outcome.scale) == (False, True, 2.0**40)
    assert math.isfinite(outcome.loss)
    assert float(step.update.scale) == 2.0**39
    after = snapshot(step)
    assert same(after, before, "weights", "optimizer")
    assert int(step.update.applied) == before.counters.applied
    step.update.scale.fill_(scale)
    again = step.run(ROWS.batch(1)).read()
    assert again.applied
    assert again.learning_rate == float(make_schedule("linear", 2e-3, STEPS, 3)[before.counters.applied])
    assert int(step.update.applied) == before.counters.applied + 1


def test_the_scale_is_that_of_torchs_grad_scaler() -> None:
    """Start, growth after 2,000 good steps, backoff: its own constants."""
    step = make_step(FAMILIES["bert"].model(), precision="fp16", schedule=torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu")
    assert float(step.update.scale) == scaler.get_scale() == scaler._init_scale
    step.update.scale.fill_(8.0)
    step.update.growth.fill_(scaler.get_growth_interval() - 1)
    assert step.run(ROWS.batch(0)).read().scale == 8.0
    assert float(step.update.scale) == 8.0 * scaler.get_growth_factor()
    assert int(step.update.growth) == 0
    step.update.scale.fill_(2.0**40)
    step.run(ROWS.batch(0))
    assert float(step.update.scale) == 2.0**40 * scaler.get_backoff_factor()


def test_a_sample_that_is_not_finite_is_no_overflow_in_fp16() -> None:
    step = make_step(FAMILIES["bert"].model(), precision="fp16")
    step.update.scale.fill_(64.0)
    batch = ROWS.batch(2)
    with spoiled(step.execution, batch, {21}, math.nan):
        outcome = step.run(batch).read()
    assert (outcome.applied, outcome.overflow, outcome.bad_samples) == (False, False, (21,))


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_the_loss_scale_is_taken_out_of_gradients(max_grad_norm: float) -> None:
    """Of their norm, and before they are clipped; AdamW would not notice."""
    moved, norms = [], []
    for precision in ("fp32", "fp16"):
        model = FAMILIES["bert"].model()
        before, sgd = weights(model), Optimizer(value="sgd")
        step = make_step(model, precision=precision, optimizer=sgd, max_grad_norm=max_grad_norm, schedule=torch.ones(2))
        step.update.scale.fill_(64.0 if precision == "fp16" else 1.0)
        norms.append(step.run(ROWS.batch(0)).read().grad_norm)
        moved.append(weights(model) - before)
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert difference(moved[1], moved[0]) < 0.05


def test_fp16_learns_what_fp32_learns() -> None:
    losses = []
    for precision in ("fp32", "fp16", "bf16"):
        step = make_step(FAMILIES["bert"].model(), precision=precision)
        step.update.scale.fill_(64.0 if precision == "fp16" else 1.0)
        outcomes = [step.run(ROWS.batch(number)).read() for number in range(STEPS)]
        assert all(o.applied for o in outcomes)
        assert all(p.dtype == torch.float32 for p in step.update.parameters)
        losses.append([o.loss for o in outcomes])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[2] == pytest.approx(losses[0], rel=0.05)


# --- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_continued_run_is_bit_equal_with_dropout_on(optim: Any, packed: bool) -> None:
    def fresh(seed: int) -> Step:
        model = FAMILIES["bert"].model(dropout=0.2, seed=seed).train()
        return make_step(model, packed=packed, optimizer=Optimizer(value=optim, weight_decay=0.1))

    def go(step: Step, numbers: range) -> list[Outcome]:
        return [step.run(ROWS.batch(number, packed=packed)).read() for number in numbers]

    through = fresh(0)
    whole = go(through, range(STEPS))
    stopped = fresh(0)
    assert go(stopped, range(4)) == whole[:4]
    saved = snapshot(stopped)
    go(stopped, range(4, 6))  # goes on after saving: what was saved stays as it was
    torch.manual_seed(999)
    resumed = fresh(7)
    resumed.load_state(saved)
    assert go(resumed, range(4, STEPS)) == whole[4:]
    assert same(snapshot(resumed), snapshot(through))
    twice = fresh(8)
    twice.load_state(saved)  # the same tensors again: loading copied them
    assert go(twice, range(4, STEPS)) == whole[4:]


def test_a_run_goes_back_to_where_it_was() -> None:
    step = make_step(FAMILIES["bert"].model(dropout=0.2).train())
    begun = snapshot(step)
    first = [step.run(ROWS.batch(n)).read() for n in range(3)]
    step.load_state(begun)
    assert [step.run(ROWS.batch(n)).read() for n in range(3)] == first


def test_the_scale_goes_on_growing_where_it_was() -> None:
    step, resumed = (make_step(FAMILIES["bert"].model(), precision="fp16") for _ in range(2))
    step.update.growth.fill_(7)
    resumed.load_state(snapshot(step))
    assert int(resumed.update.growth) == 7


def test_statistics_of_batches_come_back() -> None:
    """Buffers are state, too."""

    def fresh() -> tuple[Step, nn.BatchNorm1d]:
        model = FAMILIES["bert"].model().train()
        norm = nn.BatchNorm1d(model.config.hidden_size)
        model.classifier = nn.Sequential(norm, model.classifier)
        return make_step(model), norm

    (step, norm), (resumed, its_norm) = fresh(), fresh()
    step.run(ROWS.batch(0))
    resumed.load_state(snapshot(step))
    assert bool(norm.running_mean.any())
    assert torch.equal(its_norm.running_mean, norm.running_mean)


def test_dropout_differs_by_seed_batch_and_micro_batch() -> None:
    model = FAMILIES["bert"].model(dropout=0.3).train()
    batch = ROWS.batch(0)
    other = make_batch(
        1,
        ROWS.samples(0),
        ROWS.ids(0),
        None,
        ROWS.targets(0),
        TASK,
        PACKED,
    )

    def loss(seed: int, given: Batch) -> float:
        return make_step(copy.deepcopy(model), seed=seed).run(given).read().loss

    assert loss(0, batch) == loss(0, batch)
    assert len({loss(0, batch), loss(1, batch), loss(0, other)}) == 3


def test_micro_batches_have_masks_of_their_own() -> None:
    """Two that hold the same text and label."""
    model = FAMILIES["bert"].model(dropout=0.3).train()
    twice = sequences([40]) * 2
    batch = make_batch(0, np.arange(2), twice, None, np.zeros(2, dtype=np.int64), TASK, PACKED)
    assert len(batch.micro_batches) == 1
    layout = PackedLayout(
        budgets=Budgets(tokens=(48,), fill=1.0), num_slots=2, max_length=48, padding_id=0, groups=True
    )
    batch = make_batch(0, np.arange(2), twice, None, np.zeros(2, dtype=np.int64), TASK, layout)
    step = make_step(model)
    first, second = (step.accumulate(batch, index)[0] for index in range(2))
    assert first != second
    assert step.accumulate(batch, 0)[0] == first


def test_state_has_what_a_continuation_needs() -> None:
    step = make_step(FAMILIES["bert"].model(), precision="fp16")
    step.update.scale.fill_(64.0)
    step.run(ROWS.batch(0))
    state = step.state()
    names = {name for name, _ in step.execution.model.named_parameters()}
    assert state.weights.keys() == state.optimizer.keys() == set(state.counters.used) == names
    assert all({"step", "exp_avg", "exp_avg_sq"} == kept.tensors.keys() for kept in state.optimizer.values())
    assert (state.counters.applied, state.counters.scale) == (1, 64.0)
    assert not any(tensor.requires_grad for tensor in state.weights.values())


def test_a_step_that_must_run_again_has_the_outcome_of_that() -> None:
    """Run it again if its loss is not finite, not if only its gradient is, as when fp16 overflows."""
    batch, expected = ROWS.batch(0), Outcome(
        number=0, loss=1.0, grad_norm=1.0, learning_rate=1.0, scale=1.0, applied=True, overflow=False, bad_samples=(),
        num_samples=1, num_tokens=1,
    )  # fmt: skip
    rows = [torch.zeros(len(micro.samples)) for micro in batch.micro_batches]
    lost, overflowed = torch.tensor([np.nan, 1, 1, 1, 1.0]), torch.tensor([2.0, np.inf, 1, 1, 1])
    room = Pending.room(CPU)
    assert Pending(batch, lost, rows, False, room, lambda _: expected).read() == expected
    assert not Pending(batch, overflowed, rows, False, room, lambda _: expected).read().applied
    assert not Pending(batch, lost, rows, False, room).read().applied
