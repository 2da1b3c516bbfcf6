"""Captured steps of I-BERT, which begins its ranges of activations otherwise than it goes on, and replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from brimful.levers.optimizer import Optimizer
from brimful.models.packed import packed_forward
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.graphs import cache, captured_step
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from models.packed.test_host_decisions import without_dropout
from models.packed.test_host_reads import ibert
from step.graphs.test_captured_together import Later, Pool, Replayed
from step.test_step import CPU, TASK, Rows

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


def started() -> Any:
    torch.manual_seed(0)
    return without_dropout(ibert())


def trained(model: Any, make: Callable[..., Step]) -> list[float]:
    precision = Precision(value="fp32", device=CPU, reason="a test")
    schedule = make_schedule("linear", 2e-3, STEPS, 3)
    update = Optimizer(value="adamw_torch").update(model, schedule, precision, max_grad_norm=1.0)
    execution = PaddedModel(model, "eager")
    if make is not Step:
        execution.decisions = HostDecisions()
    step = make(execution, TASK, update, precision, seed=0)
    batches = [ROWS.batch(number, packed=False).sent(CPU) for number in range(STEPS)]
    return [step.run(batch).read().loss for batch in batches]


def test_what_is_decided_otherwise_at_first_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and buffers are those of eager steps, and buffers stay where graphs read them."""
    monkeypatch.setattr(captured_step, "GraphPool", Telling)
    monkeypatch.setattr(cache, "Graph", Replayed)
    notes, steps = list[str](), list[Any]()

    def make(*arguments: Any, **options: Any) -> Step:
        steps.append(CapturedStep(*arguments, **options, most_tokens=96, precompile=False, note=notes.append))
        return steps[0]

    plain, model = started(), started()
    there = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    expected, found = trained(plain, Step), trained(model, make)
    assert notes == []
    assert steps[0].num_graphs > 0
    assert found == pytest.approx(expected, rel=1e-6)
    expected_buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected_buffers[name])
        assert buffer.data_ptr() == there[name]
    assert any(float(buffer.max()) > 1e-3 for name, buffer in model.named_buffers() if name.endswith("x_max"))
