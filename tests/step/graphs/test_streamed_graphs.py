"""Steps whose weights are streamed, as graphs: what the host launches, whatever waits from one to the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from brimful.data.batches.batch import Batch, make_batch
from brimful.levers.lever import Assembly
from brimful.step.graphs import captured_step
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Step
from levers.pairs import LEVERS
from levers.test_lever_pairs import made
from operator_graphs import OperatorPool
from step.test_step import ROWS, TASK, same, snapshot

#: Batches of one micro-batch, each of a shape of its own, and one of two.
SINGLE, DOUBLE = (0, 2, 3), 1
CLIPPED = {"max_grad_norm": 0.1}


@pytest.fixture(autouse=True)
def _graphs_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_step, "GraphPool", OperatorPool)
    monkeypatch.setattr("brimful.levers.streaming.TRAINED", 2)  # pieces, of three layers: they take turns


def step_of(captures: bool, **asked: Any) -> tuple[Any, Assembly, list[str]]:
    """A step without dropout, whose masks a graph of operators would draw anew. Captured ones note why they are not."""
    step, assembly, _ = made(**{"stream_weights": "host", "packing": "auto"} | asked)
    for module in assembly.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    notes = list[str]()
    if captures:
        parts = (assembly.execution, TASK, assembly.update, assembly.precision)
        step = CapturedStep(*parts, seed=0, most_tokens=256, precompile=False, note=notes.append)
    return step, assembly, notes


def batch_of(assembly: Assembly, number: int) -> Batch:
    assert assembly.layout is not None
    given = (ROWS.samples(number), ROWS.ids(number), None, ROWS.targets(number))
    return make_batch(number, *given, TASK, assembly.layout).sent(torch.device("cpu"))


def course(step: Step, assembly: Assembly, times: int, *, double: bool = False) -> list[Any]:
    """Outcomes of steps on the same batches again and again: met, captured and replayed."""
    numbers = (*SINGLE, *((DOUBLE,) if double else ())) * times
    return [step.run(batch_of(assembly, number)).read() for number in numbers]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("other", ["", "updated in backward", "frozen in part"])
def test_graphs_learn_what_the_host_launches(other: str) -> None:
    """A checkpoint in between updates all layers that are due, and one that is loaded drops them."""
    asked = ({} if other == "updated in backward" else CLIPPED) | LEVERS.get(other, {})
    found = []
    for captures in (False, True):
        step, assembly, notes = step_of(captures, **asked)
        told, states = course(step, assembly, 3, double=True), [snapshot(step)]
        told += course(step, assembly, 2)
        states.append(snapshot(step))
        step.load_state(states[0])
        again = course(step, assembly, 2)
        assert again == told[-6:]
        assert notes == []
        assert (step.num_graphs > 0) == captures
        found.append((told, states))
    (launched, one), (captured, other_one) = found
    assert captured == launched
    assert all(map(same, one, other_one))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:module forward hook with")  # it is refused all that follows
@pytest.mark.parametrize("refusal", ["not permitted", "the legacy stream depends on a capture"])
@pytest.mark.parametrize("refuse_at", [400, 2500])
@pytest.mark.sampled
def test_a_capture_that_is_refused_has_changed_nothing(refuse_at: int, refusal: str) -> None:
    """In the midst of the layers that are due, and in the backward pass. What may pass is captured the next time."""
    found = []
    for captures in (False, True):
        step, assembly, notes = step_of(captures, **CLIPPED)
        told = course(step, assembly, 1)
        if captures:
            step.pool.refuse_at, step.pool.refusal = refuse_at, refusal
        told += course(step, assembly, 2)
        for_good = captures and refusal == "not permitted"
        assert notes == (["steps run eagerly: not permitted"] if for_good else [])
        assert bool(step.num_graphs) == (captures and not for_good)
        found.append((told, snapshot(step)))
    (launched, one), (refused, other) = found
    assert refused == launched
    assert same(one, other)


@pytest.mark.thorough
def test_batches_of_several_micro_batches_are_launched() -> None:
    asked, found = CLIPPED | LEVERS["split by tokens"], []
    for captures in (False, True):
        step, assembly, notes = step_of(captures, **asked)
        found.append((course(step, assembly, 3), snapshot(step)))
        assert notes == []
    (launched, one), (captured, other) = found
    assert captured == launched
    assert same(one, other)


@pytest.mark.thorough
def test_a_probe_of_a_graph_gives_its_gradients_and_leaves_no_trace() -> None:
    found = []
    for captures in (False, True):
        step, assembly, _ = step_of(captures, **CLIPPED)
        told = course(step, assembly, 2)
        probed = step.probe(batch_of(assembly, SINGLE[1]))
        told += course(step, assembly, 2)
        found.append((told, probed, snapshot(step)))
    (launched, expected, one), (captured, probed, other) = found
    assert captured == launched
    assert torch.equal(probed.losses_N, expected.losses_N)
    assert all(map(torch.equal, probed.gradients, expected.gradients))
    assert any(gradient.abs().sum() > 0 for gradient in probed.gradients)
    assert same(one, other)
