"""Calls of a packed model that are replayed: what a loop learns is what it learns kernel by kernel."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import brimful
from brimful.integrations import packed, packed_graphs, padded_batch
from brimful.kernels.attention.dispatch import reference_attention
from brimful.models.packed import packed_forward
from plain import gradient, padded
from recorder import CpuRecorder
from tiny import FAMILIES, pair_types, sequences
from tolerances import difference

#: Lengths of rows of two shapes, each in two batches.
BATCHES = ([7, 20, 3, 30, 11], [9, 9, 9, 9, 30], [40, 41, 42, 43, 44], [44, 43, 42, 41, 40])


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CpuRecorder]]:
    """Graphs on the CPU; those that have been made."""
    made: list[CpuRecorder] = []

    def make(*_: Any) -> CpuRecorder:
        made.append(CpuRecorder())
        return made[-1]

    monkeypatch.setattr(packed, "captures", lambda _: True)
    monkeypatch.setattr(packed, "_groups", lambda *_: False)
    monkeypatch.setattr(packed_graphs, "make_recorder", make)
    monkeypatch.setitem(padded_batch._MULTIPLE, "cpu", 64)
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *_: reference_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # peft's own calls
        yield made


def batch_of(model: Any, lengths: list[int], seed: int = 0, *, labels: bool = True) -> dict[str, Tensor]:
    ids = sequences(lengths, seed=seed)
    types = pair_types(ids) if model.config.model_type == "bert" else None
    made = padded(ids, types, model.config.pad_token_id)
    return made | ({"labels": torch.arange(len(lengths)) % model.config.num_labels} if labels else {})


def captured(model: Any) -> int:
    return vars(model)["_brimful_packed"].num_captured


def both(family: str = "bert", **options: Any) -> tuple[Any, Any]:
    """A model whose calls are captured, and one whose calls are not."""
    model = FAMILIES[family].model(**options).train()
    return brimful.packed(copy.deepcopy(model)), brimful.packed(copy.deepcopy(model), graphs=False)


def learn(model: Any, batches: list[dict[str, Tensor]], accumulation: int = 1) -> list[float]:
    """Losses of a plain loop. Draws numbers of its own between steps, as loops do."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number, batch in enumerate(batches):
        loss = model(**batch).loss
        loss.backward()
        torch.rand(3)
        losses.append(float(loss.detach()))
        if (number + 1) % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("family", "accumulation"), [("bert", 1), ("bert", 3), ("modernbert-mean", 1), ("qwen3", 1)])
def test_a_loop_learns_the_same(family: str, accumulation: int) -> None:
    """With dropout, by the same masks; two shapes in turn; gradients of several calls add up."""
    ours, plain = both(family, dropout=0.1) if family == "bert" else both(family)
    batches = [batch_of(ours, lengths, seed) for seed in range(3) for lengths in BATCHES]
    assert learn(ours, batches, accumulation) == learn(plain, batches, accumulation)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert captured(ours) == 10
    assert captured(plain) == 0


def met(model: Any, *batches: dict[str, Tensor]) -> None:
    """Make calls of these shapes captured from the next one on."""
    for batch in batches:
        model(**batch)


def test_a_call_between_a_call_and_its_backward_pass() -> None:
    ours, plain = both()
    first, second = (batch_of(ours, lengths) for lengths in BATCHES[:2])
    met(ours, first)
    (ours(**first).loss + ours(**second).loss).backward()
    assert captured(ours) == 1
    (plain(**first).loss + plain(**second).loss).backward()
    assert difference(gradient(ours), gradient(plain)) < 1e-6
    ours(**second).loss.backward()
    assert captured(ours) == 2


def test_a_call_that_nobody_takes_the_gradient_of() -> None:
    ours, _ = both()
    batch = batch_of(ours, BATCHES[0])
    met(ours, batch)
    for expected in (1, 2):
        ours(**batch)
        assert captured(ours) == expected
    kept = ours(**batch).loss
    ours(**batch)
    assert captured(ours) == 3
    del kept
    ours(**batch)
    assert captured(ours) == 4


def test_a_second_backward_pass_of_a_call() -> None:
    ours, _ = both()
    batch = batch_of(ours, BATCHES[0])
    met(ours, batch)
    loss = ours(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"this call of the model has had its backward pass; hint: .*graphs=False"):
        loss.backward()


def test_a_loss_of_the_loops_own() -> None:
    ours, plain = both()
    batch = batch_of(ours, BATCHES[0], labels=False)
    met(ours, batch)
    for model in (ours, plain):
        model(**batch).logits.logsumexp(1).sum().backward()
    assert captured(ours) == 1
    assert difference(gradient(ours), gradient(plain)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_answers(mode: Callable[[], Any]) -> None:
    """Also between a call and its backward pass, which they leave as it was."""
    ours, plain = both()
    batch, other = (batch_of(ours, lengths) for lengths in (BATCHES[0], BATCHES[2]))
    met(ours, batch)
    loss = ours(**batch).loss
    for _ in range(3):
        with mode():
            found, expected = (model.eval()(**other) for model in (ours, plain))
        assert torch.equal(found.logits, expected.logits)
        assert not found.logits.requires_grad
    assert captured(ours) == 3
    loss.backward()
    plain.train()(**batch).loss.backward()
    assert difference(gradient(ours), gradient(plain)) < 1e-6


def test_weights_that_are_frozen_or_replaced_are_looked_at_each_time() -> None:
    ours, plain = both()
    batch = batch_of(ours, BATCHES[0])
    for model in (ours, plain):
        frozen = next(model.base_model.parameters())
        for trains in (False, True):
            frozen.requires_grad_(trains)
            for _ in range(3):
                model.zero_grad()
                model(**batch).loss.backward()
            assert (frozen.grad is None) != trains
        model.classifier.weight.data = torch.full_like(model.classifier.weight, 0.1)
        for _ in range(3):
            model.zero_grad()
            model(**batch).loss.backward()
    assert captured(ours) == 6
    assert torch.equal(gradient(ours), gradient(plain))


def test_what_looks_into_a_call_sees_it() -> None:
    ours, _ = both()
    batch, seen = batch_of(ours, BATCHES[0]), []
    hook = ours.base_model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="there is a hook on its modules"):
        ours(**batch)
    assert len(seen) == 1
    hook.remove()
    met(ours, batch)
    with torch.autograd.graph.save_on_cpu():
        ours(**batch).loss.backward()
    warnings.filterwarnings("ignore", "Anomaly")
    with torch.autograd.detect_anomaly(check_nan=False):
        ours(**batch).loss.backward()
    assert captured(ours) == 0
    ours(**batch).loss.backward()
    assert captured(ours) == 1


class _Wrong(CpuRecorder):
    """Replays leave one number of each output out."""

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        recorded, outputs = super().record(compute)
        replay = recorded.replay

        def wrong() -> None:
            replay()
            for output in outputs:
                output.flatten()[-1:] += 0.5

        recorded.replay = wrong
        return recorded, outputs


@pytest.mark.slow
@pytest.mark.parametrize("learns", [True, False])
def test_graphs_that_compute_something_else_are_not_used(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_graphs, "make_recorder", lambda *_: _Wrong())
    ours, plain = both()
    batch = batch_of(ours, BATCHES[0])
    with torch.set_grad_enabled(learns):
        expected = plain(**batch).logits
        met(ours, batch)
        with pytest.warns(UserWarning, match="captured ones differ from those launched kernel by kernel"):
            found = ours(**batch).logits
        assert difference(found, expected) < 1e-6
        ours(**batch)
    assert captured(ours) == 0


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0, math.nan])
def test_gradients_that_are_wrong_are_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both()
    batch = batch_of(ours, BATCHES[0])
    met(ours, batch)
    copies = packed_graphs.Weights.copies
    monkeypatch.setattr(packed_graphs.Weights, "copies", lambda self: [factor * each for each in copies(self)])
    with pytest.warns(UserWarning, match="calls run eagerly: captured ones differ"):
        ours(**batch)


def test_a_capture_that_is_refused(recorders: list[CpuRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = both()
    batch = batch_of(ours, BATCHES[0])
    met(ours, batch)
    recorders[0].refusal = "a number was read"
    with pytest.warns(UserWarning, match="brimful.packed: calls run eagerly: a number was read"):
        ours(**batch).loss.backward()
    ours.zero_grad()
    for model in (ours, plain):
        model(**batch).loss.backward()
    assert captured(ours) == 0
    assert difference(gradient(ours), gradient(plain)) < 1e-6


@pytest.mark.slow
def test_autocast_and_labels_of_other_kinds_have_graphs_of_their_own() -> None:
    ours, plain = both(problem_type="regression")
    batch = batch_of(ours, BATCHES[0]) | {"labels": torch.linspace(-1, 1, 15).view(5, 3)}
    for model in (ours, plain):
        for enabled in (False, True, False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = model(**batch).loss
            loss.backward()
    assert captured(ours) == 2
    assert difference(gradient(ours), gradient(plain)) < 1e-6


def same(ours: Any, plain: Any, batch: dict[str, Tensor], *, by_graphs: int) -> None:
    """Three calls of each give the same, so many of them of ours by graphs."""
    before = captured(ours)
    for _ in range(3):
        with torch.no_grad():
            found, expected = (model(**batch) for model in (ours, plain))
        assert difference(found.logits, expected.logits) < 1e-6
    assert captured(ours) - before == by_graphs


@pytest.mark.slow
def test_adapters_that_are_turned_off_or_merged() -> None:
    ours, plain = both()
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(ours, config).eval()
    torch.manual_seed(0)
    other = peft.get_peft_model(plain, config).eval()
    batch = batch_of(ours, BATCHES[0])
    for model in (wrapped, other):
        model.requires_grad_(False)
    inner, plain_inner = wrapped.base_model.model, other.base_model.model
    same(inner, plain_inner, batch, by_graphs=2)
    with wrapped.disable_adapter(), other.disable_adapter():
        same(inner, plain_inner, batch, by_graphs=2)
    same(inner, plain_inner, batch, by_graphs=2)  # peft has its weights learn again
    for model in (wrapped, other):
        model.merge_adapter()
    same(inner, plain_inner, batch, by_graphs=2)


def test_weights_that_other_objects_take_the_place_of() -> None:
    ours, plain = both()
    batch, other = batch_of(ours, BATCHES[0]), FAMILIES["bert"].model(seed=5).state_dict()
    same(ours, plain, batch, by_graphs=2)
    for model in (ours, plain):
        model.load_state_dict(copy.deepcopy(other), assign=True)
    same(ours, plain, batch, by_graphs=2)
    for model in (ours, plain, ours, plain):
        model.zero_grad()
        model(**batch).loss.backward()
    assert captured(ours) == 5
    assert difference(gradient(ours), gradient(plain)) < 1e-6


def test_dropout_that_is_changed_and_numbers_of_items() -> None:
    ours, plain = both(dropout=0.1)
    batch = batch_of(ours, BATCHES[0])
    for dropout in (0.1, 0.0):
        for model in (ours, plain):
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = dropout
        for items in (5, 3, 7):
            losses = []
            for model in (ours, plain):
                torch.manual_seed(items)
                losses.append(model(**batch, num_items_in_batch=items).loss)
            assert torch.equal(*losses)
    assert captured(ours) == 4


def test_memory_that_runs_out_for_graphs(recorders: list[CpuRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = both()
    batch = batch_of(ours, BATCHES[0])
    met(ours, batch)
    recorders[0].refusal = "CUDA out of memory"
    with pytest.warns(UserWarning, match="there is no memory for their graphs"):
        ours(**batch).loss.backward()
    plain(**batch).loss.backward()
    assert captured(ours) == 0
    assert difference(gradient(ours), gradient(plain)) < 1e-6


@pytest.mark.slow
def test_a_copy_has_graphs_of_its_own() -> None:
    ours, _ = both()
    batch = batch_of(ours, BATCHES[0])
    met(ours, batch)
    ours(**batch)
    other = copy.deepcopy(ours)
    met(other, batch)
    other(**batch).loss.backward()
    assert (captured(ours), captured(other)) == (1, 1)
    assert all(parameter.grad is None for parameter in ours.parameters())
