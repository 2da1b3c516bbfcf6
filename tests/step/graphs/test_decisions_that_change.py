"""Captured steps of models that decide otherwise in the course of a run.

I-BERT begins its ranges of activations otherwise than it goes on, and replaces them; T5 counts end tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from brimful.data.batches.batch import Batch, Layout, make_batch
from brimful.levers.optimizer import Optimizer
from brimful.models.model_stats import layers_of
from brimful.models.packed import packed_forward
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.recompute import recompute
from brimful.step.graphs import cache, captured_step
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.step import Pending, Step, make_schedule
from heads.tiny_heads import tiny_model
from models.packed.test_host_decisions import END, without_dropout
from models.packed.test_host_reads import ibert, t5
from step.graphs.test_captured_together import Later, Pool, Replayed
from step.test_step import CPU, PADDED, TASK, Rows

STEPS = 8
ROWS = Rows([[9, 14, 7, 12]] * STEPS)


class Telling(Pool):
    """Records nothing: what is captured is computed at each replay, and told that it is in a capture."""

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        def captured() -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(packed_forward, "is_capturing", lambda: True)
                return compute()

        return Later(captured), None


def started(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return without_dropout(make())


def step_of(model: Any, make: Callable[..., Step]) -> Step:
    precision = Precision(value="fp32", device=CPU, reason="a test")
    update = Optimizer(value="adamw_torch").update(
        model, make_schedule("linear", 2e-3, STEPS, 3), precision, max_grad_norm=1.0
    )
    execution = PaddedModel(model, "eager")
    if make is not Step:
        execution.decisions = HostDecisions()
    return make(execution, TASK, update, precision, seed=0)


def trained(model: Any, make: Callable[..., Step], batches: list[Batch], in_flight: int = 0) -> list[float]:
    """Losses of steps whose outcomes are read when so many more have been launched."""
    step, flying, losses = step_of(model, make), deque[Pending](), list[float]()
    for batch in batches:
        flying.append(step.run(batch.sent(CPU)))
        if len(flying) > in_flight:
            losses.append(flying.popleft().read().loss)
    return losses + [pending.read().loss for pending in flying]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CapturedStep]:
    """Makes a step whose `notes` are its own."""
    monkeypatch.setattr(captured_step, "GraphPool", Telling)
    monkeypatch.setattr(cache, "Graph", Replayed)

    def make(*arguments: Any, **options: Any) -> CapturedStep:
        notes.append([])
        steps.append(CapturedStep(*arguments, **options, most_tokens=96, precompile=False, note=notes[-1].append))
        return steps[-1]

    notes, steps = list[list[str]](), list[CapturedStep]()
    made: Any = make
    made.notes, made.steps = notes, steps
    return made


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("in_flight", [0, 2])
@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_decided_otherwise_at_first_is_recorded_anew(captured: Any, in_flight: int, recomputed: bool) -> None:
    """Losses and buffers are those of eager steps, and buffers stay where graphs read them."""
    batches = [ROWS.batch(number, packed=False) for number in range(STEPS)]
    plain, model = started(ibert), started(ibert)
    for each in (plain, model) if recomputed else ():
        recompute(layers_of(each), {0, 1})
    there = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    expected, found = trained(plain, Step, batches), trained(model, captured, batches, in_flight)
    assert captured.notes == [[]]
    [step] = captured.steps
    assert step.num_graphs > 0
    assert step._renewed == 1
    if not in_flight:
        assert found == pytest.approx(expected, rel=1e-6)
        expected_buffers = dict(plain.named_buffers())
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, expected_buffers[name])
    assert all(buffer.data_ptr() == there[name] for name, buffer in model.named_buffers())
    assert any(float(buffer.max()) > 1e-3 for name, buffer in model.named_buffers() if name.endswith("x_max"))


def scaled() -> Any:
    """A model that divides by a buffer, whose gradient needs it as it was, and replaces it."""
    model = tiny_model("mra")
    model.register_buffer("scale", torch.ones(()))

    def divide(module: Any, _: object, output: Any) -> None:
        output.logits = output.logits / module.scale
        module.scale = 0.9 * module.scale + 0.1 * output.logits.detach().abs().mean()

    model.register_forward_hook(divide)
    return model


def test_buffers_are_written_when_no_gradient_needs_them_as_they_were(captured: Any) -> None:
    batches = [ROWS.batch(number, packed=False) for number in range(STEPS)]
    plain, model = started(scaled), started(scaled)
    assert trained(model, captured, batches) == pytest.approx(trained(plain, Step, batches), rel=1e-6)
    torch.testing.assert_close(model.scale, plain.scale)
    assert captured.steps[0].num_graphs > 0


def test_a_first_batch_is_probed_by_its_graph(captured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph finds ranges as its warm-up has found them."""
    batch = ROWS.batch(0, packed=False)
    expected = step_of(started(ibert), Step).probe(batch)
    step = step_of(started(ibert), captured)
    monkeypatch.setattr(Step, "_probed", lambda *_: pytest.fail("it is probed eagerly"))
    np.testing.assert_allclose(step.probe(batch.sent(CPU)).losses_N, expected.losses_N, rtol=1e-6)


def test_a_first_batch_of_two_micro_batches_is_probed_with_decisions_that_hold(captured: Any) -> None:
    """The second one finds ranges that the first has begun."""
    layout = replace(PADDED, shapes=replace(PADDED.shapes, num_tokens=64, num_rows=4))
    batch = batch_of(0, ends=1, lengths=(9, 9, 9, 9, 9, 9, 9, 9), layout=layout)
    assert len({micro.shape for micro in batch.micro_batches}) == 1 < len(batch.micro_batches)
    expected = step_of(started(ibert), Step).probe(batch)
    model = started(ibert)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = step_of(model, captured).probe(batch.sent(CPU))
    np.testing.assert_allclose(found.losses_N, expected.losses_N, rtol=1e-6)
    torch.testing.assert_close(found.gradients, expected.gradients)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("odd", "num_notes"), [({5}, 0), ({3, 12, 21, 30}, 0), (range(2, 40, 2), 1)], ids=["once", "seldom", "often"]
)
def test_a_batch_with_other_decisions_is_learned_and_graphs_are_given_up_where_there_are_many(
    captured: Any, odd: Collection[int], num_notes: int
) -> None:
    batches = [batch_of(number, ends=1 + (number in odd)) for number in range(40)]
    expected = trained(started(t5), Step, batches)
    found = trained(started(t5), captured, batches)
    assert found == pytest.approx(expected, rel=1e-6)
    [notes], [step] = captured.notes, captured.steps
    assert len(notes) == num_notes
    assert (step.num_graphs == 0) == bool(num_notes)
    assert all("what the model's code decides on the host is not the same" in note for note in notes)


def batch_of(number: int, *, ends: int, lengths: tuple[int, ...] = (9, 14, 7, 12), layout: Layout = PADDED) -> Batch:
    random, count = np.random.default_rng(number), len(lengths)
    ids = [np.append(random.integers(5, 99, length - ends), [END] * ends) for length in lengths]
    return make_batch(number, np.arange(count), ids, None, random.integers(0, 3, count), TASK, layout)
