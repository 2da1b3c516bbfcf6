"""A loop of one's own with the packed step: what a plain loop on padded batches learns, from the same rows."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, FNetConfig, get_scheduler

import brimful
from plain import padded
from tiny import FAMILIES, VOCABULARY, pair_types, sequences
from tolerances import MODEL_FP32

NUM_STEPS, LEARNING_RATE, MAX_GRAD_NORM = 4, 1e-2, 0.5
SETTINGS: dict[str, Any] = {
    "num_steps": NUM_STEPS, "batch_size": 8, "learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM,
    "max_length": 40, "device": "cpu", "precision": "fp32",
}  # fmt: skip
LABELS: dict[str, Any] = {"single_label": 1, "multi_label": [1.0, 0.0, 1.0], "regression": [0.5, -1.0, 2.0]}


def rows_of(number: int, task: str, *, with_types: bool) -> list[dict[str, Any]]:
    random = np.random.default_rng(number)
    ids = sequences(random.integers(1, 30, size=7).tolist(), seed=number)
    types = pair_types(ids)
    labels = [(index % 3 if task == "single_label" else np.roll(LABELS[task], index).tolist()) for index in range(7)]
    return [
        {"input_ids": each.tolist(), "labels": label} | ({"token_type_ids": kinds.tolist()} if with_types else {})
        for each, kinds, label in zip(ids, types, labels, strict=True)
    ]


def as_padded(rows: list[dict[str, Any]], padding_id: int) -> dict[str, torch.Tensor]:
    """The rows as a data collator batches them."""
    ids = [np.array(row["input_ids"]) for row in rows]
    types = [np.array(row["token_type_ids"]) for row in rows] if "token_type_ids" in rows[0] else None
    return padded(ids, types, padding_id) | {"labels": torch.tensor([row["labels"] for row in rows])}


def plain_loop(model: Any, batches: list[list[dict[str, Any]]]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of transformers' own loss on padded batches; the model is trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=NUM_STEPS)
    losses, norms = [], []
    for rows in batches:
        loss = model(**as_padded(rows, model.config.pad_token_id)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "task", "options"),
    [
        ("bert", "single_label", {}),
        ("bert", "multi_label", {"token_budget": 48}),
        ("roberta", "regression", {}),
        ("gpt2", "single_label", {}),
        ("bert", "single_label", {"packing": "off"}),
    ],
    ids=["packed", "several micro-batches", "roberta", "types are words", "padded"],
)
def test_it_learns_what_a_plain_loop_learns(family: str, task: str, options: dict[str, Any]) -> None:
    """Rows as dictionaries, and as padded tensors."""
    problem = "single_label_classification" if task == "single_label" else task
    problem = "multi_label_classification" if task == "multi_label" else problem
    model = FAMILIES[family].model(problem_type=problem).train()
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    batches = [rows_of(number, task, with_types=family == "bert") for number in range(NUM_STEPS)]
    expected, norms = plain_loop(plain, batches)
    step = brimful.Step(ours, **SETTINGS, **options)
    assert step.packed == (options.get("packing") != "off")
    given = [rows if number % 2 else as_padded(rows, model.config.pad_token_id) for number, rows in enumerate(batches)]
    with brimful.Feed(step, given) as feed:
        outcomes = [step.run(batch).read() for batch in feed]
    assert [each.loss for each in outcomes] == pytest.approx(expected, rel=1e-4)
    assert [each.grad_norm for each in outcomes] == pytest.approx(norms, rel=1e-3)
    found = step.predict(given[0])
    assert step.release() is ours
    assert all(module._compiled_call_impl is None for module in ours.modules())
    with torch.no_grad():
        inputs = {k: v for k, v in as_padded(batches[0], model.config.pad_token_id).items() if k != "labels"}
        np.testing.assert_allclose(ours.eval()(**inputs).logits.numpy(), found, atol=1e-4)
    one, other = (torch.cat([p.detach().flatten() for n, p in m.named_parameters() if "key.bias" not in n])
                  for m in (plain, ours))  # fmt: skip
    assert (one - other).norm() < 1e-3 * one.norm()


def test_rows_are_answered_as_alone_where_padding_is_read() -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    config = FNetConfig(**sizes, intermediate_size=24, max_position_embeddings=80, num_labels=3, initializer_range=0.5)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    rows = rows_of(0, "single_label", with_types=False)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([row["input_ids"]])).logits for row in rows])
    step = brimful.Step(copy.deepcopy(model), **SETTINGS)
    np.testing.assert_allclose(step.predict(rows), alone.numpy(), atol=1e-4)


def test_one_batch_has_the_gradient_of_the_plain_one() -> None:
    model = FAMILIES["bert"].model(num_labels=3)
    rows = rows_of(0, "single_label", with_types=True)
    plain = copy.deepcopy(model)
    plain(**as_padded(rows, 0)).loss.backward()
    step = brimful.Step(model, **SETTINGS)
    step._built.step.accumulate(step.batch(rows), 0)
    one, other = (
        torch.cat([parameter.grad.flatten() for parameter in each.parameters() if parameter.grad is not None])
        for each in (plain, model)
    )
    assert (one - other).norm() < MODEL_FP32 * one.norm()


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped() -> None:
    model = FAMILIES["bert"].model(dropout=0.3).train()
    batches = [rows_of(number, "single_label", with_types=False) for number in range(NUM_STEPS)]
    steps = [brimful.Step(copy.deepcopy(model), **SETTINGS) for _ in range(2)]
    with brimful.Feed(steps[0], batches[:2]) as feed:
        for batch in feed:
            steps[0].run(batch)
    steps[1].load_state(steps[0].state())
    losses = []
    for step in steps:
        with brimful.Feed(step, batches[2:]) as feed:
            losses.append([step.run(batch).read().loss for batch in feed])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_feeds_number_batches_on() -> None:
    """From the last that was run, not the last that was made ahead; a continuation from `state` too."""
    step, other = (brimful.Step(FAMILIES["bert"].model(), **SETTINGS) for _ in range(2))
    batches = [rows_of(number, "single_label", with_types=False) for number in range(NUM_STEPS)]

    def numbers(step: brimful.Step, stop: int, **start: int) -> list[int]:
        with brimful.Feed(step, batches, **start) as feed:
            return [step.run(batch).read().number for batch, _ in zip(feed, range(stop), strict=False)]

    assert numbers(step, 4) == [0, 1, 2, 3]
    assert numbers(step, 2) == [4, 5]
    other.load_state(step.state())
    assert numbers(step, 2) == numbers(other, 2) == [6, 7]
    assert step.run(step.batch(batches[0])).read().number == 8
    assert [step.batch(batches[0]).number for _ in range(2)] == [9, 10]
    assert numbers(step, 2, start=3) == [3, 4]
    assert numbers(step, 1) == [11]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_modules_keep_their_modes(training: bool) -> None:
    """Submodules in eval mode stay so in a model in train mode; a model in eval mode is put in train mode."""
    model = FAMILIES["bert"].model(dropout=0.3).train(training)
    frozen = model.bert.encoder.layer[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    rows = rows_of(0, "single_label", with_types=False)
    step = brimful.Step(model, **SETTINGS)
    for _ in range(2):
        step.run(step.batch(rows)).read()
        assert model.training
        assert {module.training for module in frozen.modules()} == {not training}
        step.predict(rows)
    step.release()
    assert {name: module.training for name, module in model.named_modules()} == before


def test_modes_that_the_loop_sets_meanwhile_stay() -> None:
    model = FAMILIES["bert"].model().train()
    step = brimful.Step(model, **SETTINGS)
    step.run(step.batch(rows_of(0, "single_label", with_types=False))).read()
    model.eval()
    assert not step.release().training


@pytest.mark.slow
def test_logits_on_the_way_change_nothing() -> None:
    model = FAMILIES["bert"].model(dropout=0.3).train()
    batches = [rows_of(number, "single_label", with_types=False) for number in range(NUM_STEPS)]
    losses = []
    for looks in (False, True):
        step = brimful.Step(copy.deepcopy(model), **SETTINGS)
        losses.append([])
        for rows in batches:
            losses[-1].append(step.run(step.batch(rows)).read().loss)
            if looks:
                assert step.predict(rows).shape == (7, 3)
    assert losses[0] == losses[1]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "row 0 has 0 tokens"),
        ({"input_ids": [5] * 41}, "row 0 has 41 tokens, and max_length is 40"),
        ({"input_ids": [5, VOCABULARY]}, "row 0 has a token outside of the model's vocabulary of 99"),
        ({"attention_mask": [0, 1]}, "attention_mask of row 0 is not ones, then zeros"),
        ({"labels": 3}, "row 0 has the label 3, and the model has 3, from 0 to 2"),
        ({"labels": [1.0, 0.0, 0.0]}, "labels are not one integer a row"),
        ({"labels": None}, "row 0 has no labels"),
    ],
)
def test_rows_that_cannot_be_taken(change: dict[str, Any], message: str) -> None:
    step = brimful.Step(FAMILIES["bert"].model(), **SETTINGS)
    row = {name: value for name, value in ({"input_ids": [5, 6], "labels": 0} | change).items() if value is not None}
    with pytest.raises(brimful.OptionError, match=re.escape(message)):
        step.batch([row])


def test_what_a_step_cannot_be() -> None:
    model = FAMILIES["bert"].model()
    with pytest.raises(brimful.OptionError, match="Step has no option 'eval_steps'"):
        brimful.Step(model, num_steps=1, eval_steps=3)
    with pytest.raises(brimful.OptionError, match="max_length is 4000") as refused:
        brimful.Step(model, num_steps=1, max_length=4000, device="cpu")
    assert refused.value.hint == "use at most 80"
    step = brimful.Step(model, **SETTINGS)
    with pytest.raises(brimful.OptionError, match="a batch has 9 rows, and batch_size is 8"):
        step.batch([{"input_ids": [5], "labels": 0}] * 9)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "steps.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    model = FAMILIES["bert"].model(num_labels=2)
    random = np.random.default_rng(0)
    ids = sequences(random.integers(2, 30, size=64).tolist())
    rows = [{"input_ids": each.tolist(), "labels": int(each[0] % 2)} for each in ids]
    exec(compile(code, str(page), "exec"), {"model": model, "rows": rows, "held_out": rows[:10]})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert model(torch.tensor([[5, 6]])).logits.shape == (1, 2)
