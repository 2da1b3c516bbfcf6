"""Products that run in fp8, and the reason if none does. On the CPU fp8 is emulated, and never faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from brimful.core.cache import write_cached
from brimful.core.errors import OptionError
from brimful.kernels.layers import float8
from brimful.kernels.layers.float8 import Products
from brimful.levers.execution import choose_execution
from brimful.levers.float8 import MARGIN, choose_float8, faster_products, time_products, time_shapes, timing_path
from brimful.levers.precision import choose_precision
from brimful.models.packed.equivalence import Equivalence
from brimful.step.precision import Precision
from tiny import FAMILIES

CPU = torch.device("cpu")
FP8 = Precision(value="fp8", device=CPU, reason="asked for")
PROOF = Equivalence(
    packed=True, independent=True, reason="a test", float8_error=0.5, float8_shapes=((48, 32), (32, 48))
)  # fmt: skip


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
    first = time_shapes(CPU, PROOF.float8_shapes, 64)
    assert list(first) == list(PROOF.float8_shapes)
    assert all(seconds > 0 for timing in first.values() for pair in timing.values() for seconds in pair)
    assert time_shapes(CPU, PROOF.float8_shapes, 64) == first
    assert time_shapes(CPU, PROOF.float8_shapes, 80) != first
    assert time_shapes(CPU, PROOF.float8_shapes, 64, cache=False) != first
    assert time_products(CPU, (16, 16), 16).keys() == set(Products._fields)


def test_an_activated_output_is_timed_with_its_activation_where_nothing_else_is_asked_for() -> None:
    equivalence = replace(PROOF, float8_activated=((48, 32),))
    for shape, activated, output in (((48, 32), False, 2.0), ((48, 32), True, 0.9), ((32, 48), False, 0.8)):
        path = timing_path(CPU, shape, 64, activated=activated)
        assert path is not None
        write_cached(path, {name: [output, 1.0] for name in Products._fields})
    with_gradients = choose_float8(FP8, equivalence, num_tokens=64, fused=True)
    assert with_gradients.plan is not None
    assert with_gradients.plan.products(64, (48, 32)).output
    assert choose_float8(FP8, equivalence, num_tokens=64, fused=True, forward_only=True).value == "bf16"
    assert time_products(CPU, (16, 16), 16, activated=True).keys() == set(Products._fields)


def keep_timings(factors: dict[tuple[int, int], list[float]]) -> None:
    """Leaves in the cache that fp8 is so many times as fast, by shape of the weight and product."""
    for shape, found in factors.items():
        path = timing_path(CPU, shape, 64)
        assert path is not None
        write_cached(path, {name: [factor, 1.0] for name, factor in zip(Products._fields, found, strict=True)})


def test_the_plan_has_what_is_faster_and_says_what_is_not() -> None:
    keep_timings({(48, 32): [1.5, 1.2, 0.8], (32, 48): [1.1, 1.0, 1.3]})
    found = choose_float8(FP8, PROOF, num_tokens=64, fused=True)
    assert found.value == "fp8"
    assert found.arithmetic == "rounding"
    assert found.dtype == torch.bfloat16
    assert found.plan is not None
    assert found.plan.products(64, (48, 32)) == Products(True, True, False)
    assert found.plan.products(64, (32, 48)) == Products(True, False, True)
    assert found.plan.products(64, (64, 64)) == Products()
    assert found.plan.products(4, (48, 32)) == Products()  # far fewer tokens than were timed
    assert found.lever().reason == (
        "asked for; 4 of 6 products of layers are faster in it here at 64 tokens; bf16 stays in "
        "48x32 weight gradient 0.8x; 32x48 input gradient 1x"
    )
    with found.autocast():
        assert float8.active_plan() is found.plan
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert float8.active_plan() is None


def test_where_no_product_is_faster_bf16_runs_and_says_so() -> None:
    keep_timings({(48, 32): [0.5, 0.5, 0.5], (32, 48): [0.5, 0.5, 0.5]})
    found = choose_float8(FP8, PROOF, num_tokens=64, fused=True)
    assert (found.value, found.plan) == ("bf16", None)
    assert found.reason.startswith("fp8 was asked for, but no product is faster in it here: 48x32 output 0.5x, input")


@pytest.mark.parametrize(("equivalence", "fused", "said"), [
    (replace(PROOF, packed=False), True, "does not run packed"),
    (PROOF, False, "which this execution does not have"),
    (replace(PROOF, float8_error=None), True, "our fused kernels do not cover the model's layers"),
    (replace(PROOF, float8_error=1.7), True, "loses 1.7 times what is allowed"),
    (replace(PROOF, float8_error=float("nan")), True, "loses nan times what is allowed"),
])  # fmt: skip
def test_what_cannot_be_in_fp8_is_in_bf16(equivalence: Equivalence, fused: bool, said: str) -> None:
    found = choose_float8(FP8, equivalence, num_tokens=64, fused=fused)
    assert found.value == "bf16"
    assert said in found.lever().reason


def test_other_precisions_are_left_alone() -> None:
    bf16 = Precision(value="bf16", device=CPU, reason="asked for")
    assert choose_float8(bf16, PROOF, num_tokens=64, fused=True) is bf16


@pytest.mark.parametrize(("family", "value"), [("bert", "compiled"), ("albert", "captured")])
def test_layers_are_fused_where_fp8_is_asked_for(family: str, value: str) -> None:
    """However short the run is; layers that are shared cannot be."""
    found = choose_execution(
        "auto", torch.device("cuda"), FAMILIES[family].model(), num_tokens=1000, packed=True, fixed=None, float8=True
    )
    assert found.value == value
