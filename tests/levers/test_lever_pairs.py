"""Every pair of levers: the plain step within what they declare, resumed bit for bit, or refused with the reason."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from brimful.core.errors import OptionError
from brimful.core.records import Recipe
from brimful.data.batches.batch import make_batch
from brimful.engine.assemble import LEVERS as ALL
from brimful.levers.checkpointing import Checkpointing
from brimful.levers.lever import Assembly
from brimful.levers.packing import Packing
from brimful.step.step import Step
from levers.assemblies import EQUIVALENCE, assembly_of
from levers.pairs import FREEZING, LEVERS, PLAIN, REFUSED, learning, pairs, tolerances_of
from levers.test_named_optimizers import learned
from step.test_step import ROWS, TASK, same, snapshot
from tiny import FAMILIES
from tolerances import difference

NUM_STEPS = 3
EQUAL = dataclasses.replace(EQUIVALENCE, pooling="first", first_position=0, short=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny tensors too, something is moved, and in several buckets."""
    monkeypatch.setattr("brimful.models.packed.offload.LEAST_BYTES", 1)
    monkeypatch.setattr("brimful.step.updates.bucketed_adamw.BUCKET", 2000)
    monkeypatch.setattr("brimful.step.updates.bucketed_adamw.LEAST_IN_8_BITS", 1)


def made(seed: int = 0, **asked: Any) -> tuple[Step, Assembly, Recipe]:
    model = FAMILIES["bert"].model(seed=seed, num_hidden_layers=4).train()
    assembly = assembly_of(
        model, equivalence=EQUAL, function="grouped_attention", warn=lambda _: None,
        lengths=tuple(ROWS.lengths[0]), **{"batch_size": 6} | PLAIN | asked,
    )  # fmt: skip
    recipe = assembly.recipe(ALL, "cpu")
    execution, update = assembly.execution, assembly.update
    assert execution is not None
    assert update is not None
    return Step(execution, TASK, update, assembly.precision, seed=0), assembly, recipe


def course(step: Step, assembly: Assembly, start: int = 0, stop: int = NUM_STEPS) -> list[Any]:
    found = []
    for number in range(start, stop):
        assert assembly.layout is not None
        given = (ROWS.samples(number), ROWS.ids(number), None, ROWS.targets(number))
        found.append(step.run(make_batch(number, *given, TASK, assembly.layout)).read())
    return found


@cache
def plain(**learns: Any) -> tuple[list[float], torch.Tensor]:
    step, assembly, _ = made(**learns)
    losses = [each.loss for each in course(step, assembly)]
    step.release()  # to the averages that some optimizers are judged by
    return losses, learned(step.execution.model)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_two_levers(one: str, other: str) -> None:
    asked = LEVERS[one] | LEVERS[other]
    if (reason := REFUSED.get(frozenset((one, other)))) is not None:
        with pytest.raises(OptionError, match=reason) as error:
            made(**asked)
        assert error.value.hint
        return
    step, assembly, recipe = made(**asked)
    if "activations offloaded" in (one, other) and "frozen in part" not in (one, other):  # whose first layer keeps none
        assert assembly.lever(Checkpointing).offloaded
    outcomes = course(step, assembly, stop=2)
    saved = snapshot(step)
    outcomes += course(step, assembly, start=2)
    losses, expected = plain(**learning(asked))
    of_loss, of_weights = tolerances_of(recipe)
    assert all(each.applied for each in outcomes)
    assert [each.loss for each in outcomes] == pytest.approx(losses, rel=of_loss)
    resumed, again, _ = made(seed=int(not asked.keys() & FREEZING), **asked)  # what is frozen is in no checkpoint
    resumed.load_state(saved)
    assert course(resumed, again, start=2) == outcomes[2:]
    assert same(snapshot(resumed), snapshot(step))
    step.release()
    assert difference(learned(step.execution.model), expected) < of_weights


def test_no_pair_is_refused_that_cannot_be_asked_for() -> None:
    assert set(REFUSED) <= {frozenset(pair) for pair in pairs()}
    _, assembly, recipe = made(**LEVERS["packed"])
    assert assembly.lever(Packing).packed
    assert {lever.arithmetic for lever in recipe.levers} == {"exact"}
