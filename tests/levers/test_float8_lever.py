"""Products that run in fp8, and the reason if none does. On the CPU fp8 is emulated, and never faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from brimful.core.cache import write_cached
from brimful.core.errors import OptionError
from brimful.kernels.float8 import Products
from brimful.levers.execution import ExecutionMode
from brimful.levers.float8 import (
    MARGIN,
    Float8,
    choose_products,
    faster_products,
    supports_float8,
    time_products,
    time_shapes,
    timing_path,
)
from brimful.levers.lever import Assembly, StepWork
from brimful.levers.precision import PrecisionLever, choose_precision
from brimful.levers.token_budget import TokenBudget
from brimful.models.packed.equivalence import Equivalence
from levers.assemblies import EQUIVALENCE, assembly_of
from tiny import FAMILIES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_fp8_needs_a_gpu() -> None:
    with pytest.raises(OptionError, match="--precision fp8 does not work here: fp8 is a format of NVIDIA's") as caught:
        choose_precision("fp8", CPU)
    assert caught.value.hint == "use fp32 or bf16"


def test_a_product_must_win_by_the_margin() -> None:
    timing = {"output": (2.0, 1.0), "input_gradient": (MARGIN, 1.0), "weight_gradient": (1.0, 2.0)}
    assert faster_products(timing) == Products(output=True)


def test_timings_are_kept_by_shape_and_tokens() -> None:
    first = time_shapes(CPU, EQUIVALENCE.float8_shapes, 64)
    assert list(first) == list(EQUIVALENCE.float8_shapes)
    assert all(seconds > 0 for timing in first.values() for pair in timing.values() for seconds in pair)
    assert time_shapes(CPU, EQUIVALENCE.float8_shapes, 64) == first
    assert time_shapes(CPU, EQUIVALENCE.float8_shapes, 80) != first
    assert time_shapes(CPU, EQUIVALENCE.float8_shapes, 64, cache=False) != first
    assert time_products(CPU, (16, 16), 16).keys() == set(Products._fields)


def test_an_activated_output_is_timed_with_its_activation_where_nothing_else_is_asked_for() -> None:
    equivalence = replace(EQUIVALENCE, float8_activated=((48, 32),))
    for shape, activated, output in (((48, 32), False, 2.0), ((48, 32), True, 0.9), ((32, 48), False, 0.8)):
        path = timing_path(CPU, shape, 64, activated=activated)
        assert path is not None
        write_cached(path, {name: [output, 1.0] for name in Products._fields})
    with_gradients = choose_products(CPU, equivalence, num_tokens=64)
    assert with_gradients.plan is not None
    assert with_gradients.plan.products(64, (48, 32)).output
    assert choose_products(CPU, equivalence, num_tokens=64, forward_only=True).value == "off"
    assert time_products(CPU, (16, 16), 16, activated=True).keys() == set(Products._fields)


def keep_timings(factors: dict[tuple[int, int], list[float]]) -> None:
    """Leaves in the cache that fp8 is so many times as fast, by shape of the weight and product."""
    for shape, found in factors.items():
        path = timing_path(CPU, shape, 64)
        assert path is not None
        write_cached(path, {name: [factor, 1.0] for name, factor in zip(Products._fields, found, strict=True)})


def in_fp8(**settings: Any) -> Assembly:
    """A model in training whose layers are fused, with micro-batches of 64 tokens."""
    assembly = assembly_of(FAMILIES["bert"].model(), precision="fp8", **settings)
    assembly.levers[ExecutionMode] = ExecutionMode(value="compiled", reason="a test")
    assembly.levers[TokenBudget] = TokenBudget(value="64", reason="a test", tokens=64, token_bytes=0)
    assembly.budget = 64
    return assembly


def test_the_plan_has_what_is_faster_and_says_what_is_not() -> None:
    keep_timings({(48, 32): [1.5, 1.2, 0.8], (32, 48): [1.1, 1.0, 1.3]})
    assembly = in_fp8()
    lever, found = assembly.lever(Float8), assembly.precision
    assert (lever.value, lever.arithmetic) == ("4 of 6 products", "rounding")
    assert lever.reason == (
        "asked for; these products of layers are faster in it here at 64 tokens; bf16 stays in "
        "48x32 weight gradient 0.8x; 32x48 input gradient 1x"
    )
    assert (found.value, found.dtype) == ("fp8", torch.bfloat16)
    assert found.plan is not None
    assert found.plan.products(64, (48, 32)) == Products(True, True, False)
    assert found.plan.products(64, (32, 48)) == Products(True, False, True)
    assert found.plan.products(64, (64, 64)) == Products()
    assert found.plan.products(4, (48, 32)) == Products()  # far fewer tokens than were timed
    with found.autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert found.context().float8 is found.plan


def test_where_no_product_is_faster_bf16_runs_and_says_so() -> None:
    keep_timings({(48, 32): [0.5, 0.5, 0.5], (32, 48): [0.5, 0.5, 0.5]})
    said: list[str] = []
    assembly = in_fp8(warn=said.append)
    lever = assembly.lever(Float8)
    assert (assembly.precision.value, assembly.precision.plan) == ("bf16", None)
    assert (lever.value, lever.arithmetic) == ("off", "exact")
    assert lever.reason.startswith("fp8 was asked for, but no product is faster in it here: 48x32 output 0.5x, input")
    assert said == [f"products run in bf16: {lever.reason}"]


def test_seconds_and_bytes_are_those_of_the_chosen_products() -> None:
    keep_timings({(48, 32): [1.5, 1.2, 0.8], (32, 48): [1.1, 1.0, 1.3]})
    lever = in_fp8().lever(Float8)
    model = FAMILIES["bert"].model(hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    work = StepWork.of(model, np.array([64]), flops_per_s=1.0, bytes_per_s=1.0)
    saved_s = (1.5 - 1) + (1.2 - 1) + (1.1 - 1) + (1.3 - 1)
    assert lever.cost(work).step_s == pytest.approx(-2 * saved_s)
    assert lever.cost(work).resident_bytes == 2 * 48 * 32 * (2 + 1)  # rows and columns; rows alone


@pytest.mark.parametrize(("equivalence", "fused", "said"), [
    (replace(EQUIVALENCE, packed=False), True, "does not run packed"),
    (EQUIVALENCE, False, "which this execution does not have"),
    (replace(EQUIVALENCE, float8_error=None), True, "our fused kernels do not cover the model's layers"),
    (replace(EQUIVALENCE, float8_error=1.7), True, "loses 1.7 times what is allowed"),
    (replace(EQUIVALENCE, float8_error=float("nan")), True, "loses nan times what is allowed"),
])  # fmt: skip
def test_what_cannot_be_in_fp8(equivalence: Equivalence, fused: bool, said: str) -> None:
    verdict = supports_float8(equivalence, fused=fused)
    assert not verdict.ok
    assert said in verdict.because


def test_what_cannot_be_in_fp8_is_in_bf16() -> None:
    said: list[str] = []
    assembly = assembly_of(FAMILIES["bert"].model(), precision="fp8", warn=said.append)
    recipe = assembly.recipe([PrecisionLever, Float8], "CPU")
    assert (recipe.value("precision"), recipe.value("fp8"), assembly.precision.value) == ("bf16", "off", "bf16")
    assert "which this execution does not have" in said[0]


def test_other_precisions_have_no_such_lever() -> None:
    assembly = assembly_of(FAMILIES["bert"].model(), precision="bf16")
    assert assembly.recipe([PrecisionLever, Float8], "CPU").value("fp8") is None
