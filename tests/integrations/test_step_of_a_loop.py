"""A loop's own optimizer, schedule, accumulation and Accelerate around the step: what the plain loop learns."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import get_scheduler

import brimful
from brimful.core.records import FirstBatch
from brimful.engine import first_batch
from brimful.integrations import custom_loop
from plain import padded
from tiny import FAMILIES, sequences
from tolerances import RUN_LOSS_FP32, difference

NUM_UPDATES, ACCUMULATION = 3, 2
SETTINGS: dict[str, Any] = {"batch_size": 4, "max_length": 40, "device": "cpu", "precision": "fp32"}
Optimizer = torch.optim.Optimizer


def batch_of(number: int, size: int = 4) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(number)
    ids = sequences(random.integers(1, 30, size=size).tolist(), seed=number)
    return padded(ids, None, 0) | {"labels": torch.from_numpy(random.integers(0, 3, size=size))}


def together(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(batch["input_ids"].shape[1] for batch in batches)

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value if value.ndim == 1 else torch.nn.functional.pad(value, (0, longest - value.shape[1]))

    return {name: torch.cat([wide(batch[name]) for batch in batches]) for name in batches[0]}


def adamw(model: Any) -> Optimizer:
    head, body = list(model.classifier.parameters()), list(model.bert.parameters())
    return torch.optim.AdamW([{"params": head, "lr": 1e-2}, {"params": body, "weight_decay": 0.1}], lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "groups": adamw,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "key.bias" not in n])


def plain_loop(model: Any, optimizer: Optimizer, num_updates: int) -> list[float]:
    """Losses of a plain loop on batches as large as an update's; the model is trained."""
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=5)
    losses = []
    for number in range(num_updates):
        rows = [batch_of(number * ACCUMULATION + part, size=4 - part) for part in range(ACCUMULATION)]
        loss = model(**together(rows)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_and_a_schedule_of_ones_own(name: str) -> None:
    """With accumulation over batches of different sizes, by the rates that the scheduler sets."""
    plain = FAMILIES["bert"].model().train()
    model = copy.deepcopy(plain)
    expected = plain_loop(plain, OPTIMIZERS[name](plain), NUM_UPDATES)
    optimizer = OPTIMIZERS[name](model)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=5)
    step = brimful.Step(model, optimizer, accumulation=ACCUMULATION, max_grad_norm=0.5, **SETTINGS)
    assert step.packed
    losses, updated, rates = [], [], []
    for number in range(NUM_UPDATES * ACCUMULATION):
        rate = optimizer.param_groups[0]["lr"]
        outcome = step(batch_of(number, size=4 - number % ACCUMULATION))
        updated.append(outcome.updated)
        if outcome.updated:
            scheduler.step()
            losses.append(outcome.loss)
            rates.append((outcome.learning_rate, rate))
    assert updated == [False, True] * NUM_UPDATES
    assert all(found == pytest.approx(expected) for found, expected in rates)
    assert losses == pytest.approx(expected, rel=10 * RUN_LOSS_FP32)
    assert difference(weights(step.release()), weights(plain)) < 1e-4
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert step.first_batch is not None
    assert step.first_batch.passed


@pytest.mark.thorough
def test_weights_that_are_released_and_frozen_midway() -> None:
    """They learn what they do in a plain loop, and the optimizer goes on with the states that it had."""
    plain = FAMILIES["bert"].model().train()
    plain.bert.requires_grad_(False)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, model)]
    step = brimful.Step(model, optimizers[1], max_grad_norm=0.5, **SETTINGS)
    for number, trained in enumerate([False, True, True, False, True]):
        for each in (plain, model):
            each.bert.requires_grad_(trained)
        loss = plain(**batch_of(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert step(batch_of(number)).loss == pytest.approx(loss.item(), rel=10 * RUN_LOSS_FP32)
        assert step.first_batch is not None
        assert step.first_batch.passed
    steps = [[state["step"] for state in each.state_dict()["state"].values()] for each in optimizers]
    assert steps[0] == steps[1]
    assert step.state().counters.batches == 5
    assert difference(weights(step.release()), weights(plain)) < 1e-4


@pytest.mark.slow
def test_weights_that_are_frozen_midway_are_in_the_state() -> None:
    """Those that were trained before: of a fresh model a resumed loop would have others. The rest is the model's."""
    start = FAMILIES["bert"].model().train()
    start.bert.encoder.requires_grad_(False)

    def step_of(model: Any) -> brimful.Step:
        return brimful.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), **SETTINGS)

    model = copy.deepcopy(start)
    midway, saved = step_of(model), io.BytesIO()
    midway(batch_of(0))
    model.bert.embeddings.requires_grad_(False)
    midway(batch_of(1))
    torch.save(midway.state_dict(), saved)
    midway(batch_of(2))
    for _ in range(2):  # a state of a loop that was resumed has them, too
        again = copy.deepcopy(start)
        again.bert.embeddings.requires_grad_(False)
        resumed = step_of(again)
        resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
        saved = io.BytesIO()
        torch.save(resumed.state_dict(), saved)
    assert not any("encoder" in name for name in resumed.state_dict()["weights"])
    resumed(batch_of(2))
    assert torch.equal(weights(resumed.release()), weights(midway.release()))


def test_a_group_that_is_added_midway() -> None:
    plain = FAMILIES["bert"].model().train()
    model, optimizers = copy.deepcopy(plain), []
    for each in (plain, model):
        optimizers.append(torch.optim.SGD(each.classifier.parameters(), lr=0.1, momentum=0.9))
    step = brimful.Step(model, optimizers[1], **SETTINGS)
    for number in range(3):
        if number == 1:
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.add_param_group({"params": list(each.bert.parameters()), "lr": 0.01})
        plain(**batch_of(number)).loss.backward()
        optimizers[0].step()
        plain.zero_grad()
        step(batch_of(number))
    assert difference(weights(step.release()), weights(plain)) < 1e-5


def test_a_hook_on_a_gradient_is_called_with_all_of_it() -> None:
    """Once for each update, however its rows are laid out; the comparison with the plain model is without it."""
    plain, calls = FAMILIES["bert"].model().train(), list[int]()
    model = copy.deepcopy(plain)

    def cut(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient.clamp(-1e-3, 1e-3)

    for each in (plain, model):
        each.classifier.weight.register_hook(cut)
    plain(**batch_of(0, size=16)).loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    calls.clear()
    step = brimful.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), token_budget=64, **SETTINGS | {"batch_size": 16}
    )
    assert len(step.batch(batch_of(0, size=16), number=0).micro_batches) > 1
    step(batch_of(0, size=16))
    assert len(calls) == 1
    assert step.first_batch is not None
    assert step.first_batch.passed
    assert difference(weights(step.release()), weights(plain)) < 1e-5
    with pytest.raises(brimful.OptionError, match=r"a hook on the gradient of classifier\.weight, and a step sums"):
        brimful.Step(model, "sgd", num_steps=4, **SETTINGS)


def test_an_optimizer_by_name() -> None:
    model = FAMILIES["bert"].model().train()
    step = brimful.Step(model, "sgd", num_steps=4, learning_rate=1e-2, **SETTINGS)
    outcome = step(batch_of(0))
    assert outcome.updated
    assert outcome.applied
    assert step.recipe.value("optimizer") == "sgd"
    before = model.bert.embeddings.word_embeddings.weight.detach().clone()
    model.bert.requires_grad_(False)
    assert step(batch_of(1)).applied
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, before)
    assert step.state().counters.applied == 2
    with pytest.raises(brimful.OptionError, match="num_steps is missing"):
        brimful.Step(model, "sgd", **SETTINGS)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("given", [[0.5, 2.0, 1.0], torch.tensor([0.5, 2.0, 1.0]), {"LABEL_0": 0.5, "LABEL_1": 2.0}])
def test_weights_of_labels(given: Any) -> None:
    """The loss and the gradient are those of torch's weighted cross entropy of the whole update."""
    plain = FAMILIES["bert"].model(3).train()
    model = copy.deepcopy(plain)
    step = brimful.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=ACCUMULATION, class_weights=given,
        max_grad_norm=0.0, precision="fp32", device="cpu", batch_size=4,
    )  # fmt: skip
    batches = [batch_of(part, size=4 - part) for part in range(ACCUMULATION)]
    outcome = [step(batch) for batch in batches][-1]
    optimizer, whole = torch.optim.SGD(plain.parameters(), lr=0.1), together(batches)
    logits = plain(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits, whole["labels"], torch.tensor([0.5, 2.0, 1.0]))
    loss.backward()
    optimizer.step()
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
    step.release()
    assert difference(weights(model), weights(plain)) < 1e-5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0], r"has the shape \(2,\), and the model 3 labels"),
        ({"spam": 1.0}, "which is no label of the model"),
        ([1.0, -2.0, 1.0], "numbers that are no weights"),
        ("balanced", "class_weights is balanced"),
    ],
)
def test_weights_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(brimful.OptionError, match=said):
        brimful.Step(FAMILIES["bert"].model(3), num_steps=5, class_weights=given, device="cpu")


def test_the_last_batches_of_an_epoch() -> None:
    """`flush` makes an update of fewer batches, with the gradient of these."""
    plain = FAMILIES["bert"].model().train()
    model = copy.deepcopy(plain)
    plain(**batch_of(0)).loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = brimful.Step(model, optimizer, accumulation=8, max_grad_norm=0.0, **SETTINGS)
    assert not step.flush().updated
    assert step(batch_of(0)).loss is None
    with pytest.raises(brimful.OptionError, match="1 of 8 batches of an update are waiting"):
        step.state_dict()
    assert step.flush().updated
    assert difference(weights(model), weights(plain)) < 1e-5


@pytest.mark.slow
def test_it_goes_on_from_a_file() -> None:
    """Bit for bit, with the optimizer's states, its learning rate, and dropout masks that follow."""
    model = FAMILIES["bert"].model(dropout=0.3).train()
    steps, schedulers = [], []
    for _ in range(2):
        twin = copy.deepcopy(model)
        optimizer = adamw(twin)
        steps.append(brimful.Step(twin, optimizer, **SETTINGS))
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for number in range(2):
        steps[0](batch_of(number))
        schedulers[0].step()
    file = io.BytesIO()
    torch.save((steps[0].state_dict(), schedulers[0].state_dict()), file)
    file.seek(0)
    state, schedule = torch.load(file, weights_only=True)
    steps[1].load_state_dict(state)
    schedulers[1].load_state_dict(schedule)
    losses = [[step(batch_of(number)).loss for number in range(2, 5)] for step in steps]
    assert losses[0] == losses[1]
    with pytest.raises(brimful.OptionError, match="not the state of a step"):
        steps[1].load_state_dict({"weights": {}})


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_what_accelerate_prepared(mixed_precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    batches = [batch_of(number) for number in range(2)]
    losses = []
    for ours in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
        model = FAMILIES["bert"].model().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=2)
        rows = [{name: value[i] for name, value in batches[0].items()} for i in range(4)]
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, DataLoader(rows, batch_size=2), scheduler
        )
        step = brimful.Step(model, optimizer, max_grad_norm=0.0, max_length=40, device="cpu") if ours else None
        losses.append([])
        for batch in loader:
            if step is None:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
            else:
                losses[-1].append(step(batch).loss)
            scheduler.step()
    assert step is not None
    assert step.recipe.value("precision") == ("fp32" if mixed_precision == "no" else "bf16")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if mixed_precision == "no" else 2e-2)
    assert step.release() is model
    assert model(**batches[0]).loss.isfinite()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_a_first_batch_that_differs_goes_down_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on with the weights and states that were loaded before it."""
    real, made = first_batch.compare, []

    def compare(built: Any, rows: Any) -> FirstBatch:
        found = real(built, rows)
        made.append(built.packing.packed)
        return found if len(made) > 1 else FirstBatch(**{**vars(found), "passed": False, "reason": "made up"})

    monkeypatch.setattr(first_batch, "compare", compare)
    model = FAMILIES["bert"].model().train()
    twin = copy.deepcopy(model)
    before = brimful.Step(twin, adamw(twin), **SETTINGS | {"packing": "off"})
    monkeypatch.setattr(custom_loop.Step, "_compare", lambda *_: None)
    before(batch_of(0))
    monkeypatch.undo()
    monkeypatch.setattr(first_batch, "compare", compare)
    step = brimful.Step(model, adamw(model), **SETTINGS)
    step.load_state_dict(before.state_dict())
    with pytest.warns(UserWarning, match="differs from the plain model on the first batch: made up; .* padded rows"):
        found = step(batch_of(1)).loss
    assert made == [True, False]
    assert found == pytest.approx(before(batch_of(1)).loss, rel=1e-6)
    assert difference(weights(step.release()), weights(before.release())) < 1e-6


@pytest.mark.slow
def test_a_packed_model_is_packed_again_afterwards() -> None:
    model = brimful.packed(FAMILIES["bert"].model().train())
    step = brimful.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), **SETTINGS)
    step(batch_of(0))
    assert hasattr(step.release(), "unpacked")
    assert model(**batch_of(0)).loss.isfinite()


def test_what_it_cannot_take() -> None:
    model = FAMILIES["bert"].model()
    other = torch.optim.SGD(FAMILIES["bert"].model().parameters(), lr=0.1)
    frozen = FAMILIES["bert"].model().requires_grad_(False)
    cases: list[tuple[Any, Any, str]] = [
        (model, other, "parameters that are not the model's"),
        (model, [1], "the optimizer is a list"),
        (frozen, torch.optim.SGD(frozen.parameters()), "all weights of the model are frozen"),
        (torch.nn.DataParallel(model), other, "wrapped in DataParallel"),
        (torch.compile(model), other, "wrapped in OptimizedModule"),
    ]
    for given, optimizer, message in cases:
        with pytest.raises(brimful.OptionError, match=re.escape(message)):
            brimful.Step(given, optimizer, **SETTINGS)
    with pytest.raises(brimful.OptionError, match="accumulation is 0"):
        brimful.Step(model, torch.optim.SGD(model.parameters()), accumulation=0, **SETTINGS)
    step = brimful.Step(model, torch.optim.SGD(model.parameters()), **SETTINGS)
    with pytest.raises(brimful.OptionError, match="a batch has no input_ids"):
        step({"labels": torch.zeros(2)})
    batch = batch_of(0)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    with pytest.raises(brimful.OptionError, match="is not ones, then zeros"):
        step(batch)


@pytest.mark.slow
def test_rows_padded_on_the_left_where_the_model_answers_them_alike() -> None:
    """Positions of Qwen3 are distances, and its head reads the last token; BERT's reads the first column."""
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    left = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([0, 2])}
    rows = [{"input_ids": [5, 6], "labels": 0}, {"input_ids": [7, 8, 9, 10], "labels": 2}]
    losses = []
    for batch in (left, rows):
        step = brimful.Step(FAMILIES["qwen3"].model(), num_steps=5, batch_size=2, max_length=16, device="cpu")
        losses.append(step(batch).loss)
        step.release()
    assert losses[0] == losses[1]
    step = brimful.Step(FAMILIES["bert"].model(), num_steps=5, batch_size=2, max_length=16, device="cpu")
    with pytest.raises(brimful.OptionError, match="attention_mask of row 0 is not ones, then zeros"):
        step(left)
