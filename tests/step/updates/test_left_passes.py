"""Passes that are left in their midst, as captures that are refused are, while weights are in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from brimful.core.place import Place
from brimful.hardware.ranks import ALONE, Ranks, joined
from brimful.levers.optimizer import Optimizer
from brimful.models.model_stats import layers_of
from brimful.models.tensor_plan import together
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.step.updates.update import used_by_all
from forked_ranks import Forked
from step.test_ranks import CPU, part_of, tasks
from step.test_step import PACKED, execution_of
from tiny import FAMILIES


class _LeftError(Exception):
    """A capture's refusal."""


def learned(ranks: Ranks, left_in: str | None) -> tuple[Any, Any]:
    """Losses and norms of three steps, and the weights then. left_in: what a pass before the second one is left in."""
    torch.set_num_threads(1)
    model = FAMILIES["llama"].model(3, num_hidden_layers=6).train()
    task, targets = tasks()["single_label"]
    precision = Precision(value="fp32", device=CPU, reason="a test")
    update = Optimizer(value="sgd", sharding="parameters").update(
        model, torch.full((9,), 0.1), precision, max_grad_norm=1.0
    )
    step = Step(execution_of(model, "llama"), task, update, precision, seed=0, ranks=ranks)
    step.meet()
    told = [step.run(part_of(0, ranks, task, targets, PACKED)).read()]
    if left_in is not None:
        layers = layers_of(model)
        assert layers is not None

        def leave(*_: Any) -> None:
            raise _LeftError

        def leave_backward(_: Any, __: Any, output: Tensor) -> None:
            output.register_hook(leave)

        hook = layers[2].mlp.register_forward_hook(leave if left_in == "forward" else leave_backward)
        with pytest.raises(_LeftError):
            step.run(part_of(1, ranks, task, targets, PACKED))
        hook.remove()
        update.abandon()
    told += [step.run(part_of(number, ranks, task, targets, PACKED)).read() for number in (1, 2)]
    weights = torch.cat([together(p.detach()).flatten() for p in model.parameters()]).numpy()
    step.release()
    return [(each.loss, each.grad_norm) for each in told], weights


def test_an_evaluation_leaves_nothing_whole(tmp_path: Path) -> None:
    """A graph that is captured after it would take that for whole ever after, and read weights of that time."""

    def work(place: Place) -> Any:
        with joined(place, CPU) as ranks:
            torch.set_num_threads(1)
            model = FAMILIES["llama"].model(3).train()
            task, targets = tasks()["single_label"]
            precision = Precision(value="fp32", device=CPU, reason="a test")
            lever = Optimizer(value="sgd", sharding="parameters")
            update = lever.update(model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
            step = Step(execution_of(model, "llama"), task, update, precision, seed=0, ranks=ranks)
            step.meet()
            batch = part_of(0, ranks, task, targets, PACKED)
            step.run(batch).read()
            with torch.inference_mode():
                step.execution(batch.arrived(0).inputs, precision.context())
            left_whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
            step.release()
            return left_whole

    assert Forked(tmp_path, 2, work).results() == [[], []]


def test_nobody_is_asked_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have been refused by then."""
    used, so_far = [index != 1 for index in range(5)], set[int]()
    assert used_by_all(ALONE, used, so_far) == used
    monkeypatch.setattr("brimful.step.updates.update.is_capturing", lambda: True)
    monkeypatch.setattr(Ranks, "any", lambda *_: pytest.fail("another process is asked"))
    assert used_by_all(ALONE, [False] * len(used), so_far) == used
    with pytest.raises(RuntimeError, match="used that no step before has used"):
        used_by_all(ALONE, [True] * len(used), so_far)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("left_in", ["forward", "backward"])
def test_a_pass_that_was_left_leaves_nothing(left_in: str, tmp_path: Path) -> None:
    """Layers are in groups of two: some are whole, in the backward pass some of whose gradients were summed."""

    def work(place: Place) -> Any:
        with joined(place, CPU) as ranks:
            return learned(ranks, None), learned(ranks, left_in)

    for (told, weights), (told_then, weights_then) in Forked(tmp_path, 2, work).results():
        assert told_then == told
        np.testing.assert_array_equal(weights_then, weights)
