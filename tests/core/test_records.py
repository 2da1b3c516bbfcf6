"""Records to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.records import (
    Gpu,
    LabelSpace,
    Lever,
    Machine,
    PeakMemory,
    Recipe,
    Run,
    from_json,
    to_json,
)

LEVER = Lever(name="precision", value="bf16", arithmetic="rounding", reason="the GPU has it")
GPU = Gpu(name="H200", total_bytes=150_754_820_096, compute_capability=(9, 0))
RUN = Run(
    run="20260101-abc",
    status="finished",
    model="bert-base-uncased",
    options={"seed": 1, "nested": {"a": [1, None]}},
    command="brimful train reviews.csv",
    labels=LabelSpace(task="single_label", names=("neg", "pos"), values={"0": 0, "é\u2028": 1}),
    recipe=Recipe(device="cuda", levers=(LEVER,)),
    machine=Machine(cpu=None, num_cores=2, memory_bytes=None, gpus=(GPU, Gpu(name="?")), versions={"torch": "2.13"}),
    data_fingerprint="sha256:0",
    data={"rows": 10},
    metrics={"f1_macro": 0.1 + 0.2},
    steps=3,
    train_s=1.5,
    peak_bytes=PeakMemory(allocated=1),
    packed=True,
)


def test_a_run_comes_back_equal() -> None:
    back = from_json(Run, to_json(RUN))
    assert back == RUN
    assert isinstance(back.recipe.levers[0], Lever)
    assert isinstance(back.peak_bytes, PeakMemory)
    assert back.machine.gpus[0].compute_capability == (9, 0)
    assert back.machine.gpus[1].total_bytes is None
    assert back.train_s == 1.5


def test_json_is_strict_readable_and_in_the_order_of_the_fields() -> None:
    text = to_json(RUN)
    assert text.endswith("}\n")
    assert "é" in text
    assert list(json.loads(text)) == [field.name for field in dataclasses.fields(Run)]


def test_defaults_stand_for_what_is_not_there() -> None:
    machine = from_json(Machine, '{"cpu": "x", "num_cores": null, "memory_bytes": 1}')
    assert machine == Machine(cpu="x", num_cores=None, memory_bytes=1)


def test_keys_of_a_newer_version_are_left_out_at_every_depth() -> None:
    body = json.loads(to_json(RUN))
    body["new"] = body["machine"]["new"] = body["machine"]["gpus"][0]["new"] = body["peak_bytes"]["new"] = {"a": 1}
    assert from_json(Run, json.dumps(body)) == RUN


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ValueError),
        ("{", ValueError),
        ("{}", TypeError),
        ("[]", TypeError),
        ("null", TypeError),
        ('{"device": "cpu", "levers": [null]}', TypeError),
        ('{"device": "cpu"}', TypeError),
        ('{"device": "cpu", "levers": [{"name": "x"}]}', TypeError),
    ],
)
def test_what_is_no_recipe(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        from_json(Recipe, text)


def test_a_pair_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        from_json(Gpu, '{"name": "x", "compute_capability": [9]}')


def test_records_cannot_be_changed_and_want_names() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.steps = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        Gpu("H200")  # type: ignore[misc]


def test_values_of_a_recipe_by_name() -> None:
    assert RUN.recipe.value("precision") == "bf16"
    assert RUN.recipe.value("compile") is None


def test_number_of_outputs() -> None:
    assert RUN.labels.num_outputs == 2
    assert LabelSpace(task="regression", names=()).num_outputs == 0


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
COUNT = st.none() | st.integers(0, 2**63)


@given(
    st.builds(
        Machine,
        cpu=st.none() | TEXT,
        num_cores=COUNT,
        memory_bytes=COUNT,
        gpus=st.lists(
            st.builds(
                Gpu,
                name=TEXT,
                total_bytes=COUNT,
                compute_capability=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 9)),
            ),
            max_size=3,
        ).map(tuple),
        versions=st.dictionaries(TEXT, TEXT, max_size=3),
    )
)
def test_any_machine_comes_back_equal(machine: Machine) -> None:
    assert from_json(Machine, to_json(machine)) == machine


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(dataclasses.replace(RUN, metrics={"loss": value}))
