"""Captured steps of models that decide otherwise in the course of a run.

I-BERT begins its ranges of activations otherwise than it goes on, and replaces them; T5 counts end tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from brimful.data.batches.batch import Batch, make_batch
from brimful.levers.optimizer import Optimizer
from brimful.models.packed import packed_forward
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.graphs import cache, captured_step
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
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


def trained(model: Any, make: Callable[..., Step], batches: list[Batch]) -> list[float]:
    precision = Precision(value="fp32", device=CPU, reason="a test")
    schedule = make_schedule("linear", 2e-3, STEPS, 3)
    update = Optimizer(value="adamw_torch").update(model, schedule, precision, max_grad_norm=1.0)
    execution = PaddedModel(model, "eager")
    if make is not Step:
        execution.decisions = HostDecisions()
    step = make(execution, TASK, update, precision, seed=0)
    return [step.run(batch.sent(CPU)).read().loss for batch in batches]


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


def test_what_is_decided_otherwise_at_first_is_recorded_anew(captured: Any) -> None:
    """Losses and buffers are those of eager steps, and buffers stay where graphs read them."""
    batches = [ROWS.batch(number, packed=False) for number in range(STEPS)]
    plain, model = started(ibert), started(ibert)
    there = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    expected, found = trained(plain, Step, batches), trained(model, captured, batches)
    assert captured.notes == [[]]
    assert captured.steps[0].num_graphs > 0
    assert found == pytest.approx(expected, rel=1e-6)
    expected_buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected_buffers[name])
        assert buffer.data_ptr() == there[name]
    assert any(float(buffer.max()) > 1e-3 for name, buffer in model.named_buffers() if name.endswith("x_max"))


@pytest.mark.parametrize(("odd", "num_notes"), [({5}, 0), (range(2, 14, 2), 1)], ids=["once", "again and again"])
def test_a_batch_with_other_decisions_is_learned_and_graphs_are_given_up_where_there_are_many(
    captured: Any, odd: Collection[int], num_notes: int
) -> None:
    batches = [batch_of(number, ends=1 + (number in odd)) for number in range(14)]
    expected = trained(started(t5), Step, batches)
    found = trained(started(t5), captured, batches)
    assert found == pytest.approx(expected, rel=1e-6)
    [notes], [step] = captured.notes, captured.steps
    assert len(notes) == num_notes
    assert (step.num_graphs == 0) == bool(num_notes)
    assert all("what the model's code decides on the host is not the same" in note for note in notes)


def batch_of(number: int, *, ends: int) -> Batch:
    random = np.random.default_rng(number)
    ids = [np.append(random.integers(5, 99, length - ends), [END] * ends) for length in (9, 14, 7, 12)]
    return make_batch(number, np.arange(4), ids, None, random.integers(0, 3, 4), TASK, PADDED)
