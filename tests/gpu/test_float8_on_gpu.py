"""fp8 on a GPU: casts against their twins, products against emulated ones, fused pieces, whole steps, their capture."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from brimful.core.errors import BrimfulError
from brimful.data.batches.prefetch import Feed
from brimful.kernels.float8 import Plan, Products, Scaled, cast, columns_of, product, rows_of
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers import postnorm_ops
from brimful.levers.float8 import choose_products, time_shapes
from brimful.levers.precision import choose_precision
from brimful.models.packed.equivalence import check_equivalence
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.precision import Precision
from brimful.step.step import Step
from gpu.test_captured_on_gpu import make_step, source
from gpu.waits import no_waiting
from kernels.test_float8 import attention, layer, run, together
from tolerances import FLOAT8_LAYER, difference

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
#: Tokens, outputs, inputs: small ones, no multiples of a kernel's tile, and those of BERT-large.
SIZES = [(32, 48, 64), (1040, 768, 3072), (336, 2304, 768), (4096, 4096, 1024)]


@pytest.fixture(autouse=True)
def _has_fp8() -> None:
    try:
        choose_precision("fp8", GPU)
    except BrimfulError as refusal:
        pytest.skip(str(refusal))


def rows(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers on the GPU, of which rows differ in size by six decades; a row and a column of zeros."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    made *= torch.logspace(-6, 0, shape[0])[:, None]
    made[3], made[:, 5] = 0, 0
    return made.to(GPU, torch.bfloat16)


def same(found: Scaled, expected: Scaled) -> None:
    """But for the last bit of a division, which now and then makes a number round the other way."""
    assert torch.allclose(found.scales, expected.scales, rtol=1e-6, atol=0.0)
    found_bits, bits = (each.values.view(torch.uint8) for each in (found, expected))
    assert (found_bits != bits).float().mean() < 1e-3
    assert difference(found.restored().cpu(), expected.restored().cpu()) < 1e-3


@pytest.mark.parametrize("shape", [(16, 16), (1000, 768), (4096, 3072), (70, 1030)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = rows(*shape).to(dtype)
    same(cast(x), rows_of(x))
    same(cast(x, transposed=True), columns_of(x))
    assert torch.equal(
        cast(x, transposed=True).values.view(torch.uint8), cast(x, transposed=True).values.view(torch.uint8)
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x, w = rows(64, 128), rows(32, 128, seed=1)
    x[7, 9] = value
    found = product(cast(x), cast(w), torch.bfloat16)
    assert (~found.isfinite()).all(1).nonzero().flatten().tolist() == [7]
    found = product(cast(x, transposed=True), cast(rows(64, 32), transposed=True), torch.bfloat16)
    assert (~found.isfinite()).all(1).nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SIZES)
def test_products(tokens: int, outputs: int, inputs: int) -> None:
    """Of the same fp8 numbers, in fp32; and near those of the bf16 numbers."""
    x, w, g = rows(tokens, inputs), rows(outputs, inputs, seed=1), rows(tokens, outputs, seed=2)
    bias = rows(outputs, 16, seed=3)[:, 0].contiguous()
    with no_waiting():
        transposed = [cast(each, transposed=True) for each in (x, w, g)]
        found = {
            "output": product(cast(x), cast(w), torch.bfloat16, quick=True),
            "with bias": product(cast(x), cast(w), torch.bfloat16, bias, quick=True),
            "input_gradient": product(cast(g), transposed[1], torch.bfloat16),
            "weight_gradient": product(transposed[2], transposed[0], torch.bfloat16),
        }
    emulated = {
        "output": cast(x).restored() @ cast(w).restored().t(),
        "with bias": cast(x).restored() @ cast(w).restored().t() + bias.float(),
        "input_gradient": cast(g).restored() @ transposed[1].restored().t(),
        "weight_gradient": transposed[2].restored() @ transposed[0].restored().t(),
    }
    exact = {
        "output": x.double() @ w.double().t(),
        "with bias": x.double() @ w.double().t() + bias.double(),
        "input_gradient": g.double() @ w.double(),
        "weight_gradient": g.double().t() @ x.double(),
    }
    for name in found:
        assert difference(found[name].cpu(), emulated[name].cpu()) < 1e-2, name
        assert difference(found[name].cpu(), exact[name].cpu()) < FLOAT8_LAYER, name


@pytest.mark.parametrize("kind", ["linear", "gelu", "norm"])
@pytest.mark.parametrize(
    "chosen", [Products(True, True, True), Products(True, True, False), Products(False, False, True)]
)
def test_fused_pieces(kind: str, chosen: Products) -> None:
    """In bf16 with products in fp8, against fp32 on the CPU."""
    ours, plain, leaves = layer(kind)
    linear = torch.nn.functional.linear
    exact, exact_gradients = run(lambda *given: plain(linear, *given), leaves)
    plan = Plan({tuple(leaves[1].shape): chosen})  # type: ignore[dict-item]
    on_gpu = [leaf.to(GPU) for leaf in leaves]
    with torch.autocast("cuda", torch.bfloat16):
        found, gradients = run_on_gpu(ours, on_gpu, plan)
    assert difference(found.float().cpu(), exact) < FLOAT8_LAYER
    assert difference(together(gradients).cpu(), together(exact_gradients)) < FLOAT8_LAYER


def run_on_gpu(function: Any, leaves: list[Tensor], plan: Plan) -> tuple[Tensor, list[Tensor]]:
    given = [leaf.clone().requires_grad_(True) for leaf in leaves]
    with ForwardContext(float8=plan).active():
        out = function(*given)
    direction = torch.randn(*out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return out.detach(), [each.float() for each in torch.autograd.grad((out * direction).sum(), given)]


def test_projected_attention() -> None:
    _, plain, (x, w, b) = attention()
    exact, exact_gradients = run(lambda *given: plain(torch.nn.functional.linear, *given), [x, w, b])
    cu_seqlens_N = torch.tensor([0, 5, 75, 76, 109, 160], dtype=torch.int32, device=GPU)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        settings = (80, 30, 0.25, False, 0, 0.0, 0.0)
        return postnorm_ops.projected_attention(x, w.chunk(3), b.chunk(3), cu_seqlens_N, 4, settings)

    with torch.autocast("cuda", torch.bfloat16):
        found, gradients = run_on_gpu(ours, [each.to(GPU) for each in (x, w, b)], Plan())
    assert difference(found.float().cpu(), exact) < FLOAT8_LAYER
    assert difference(together(gradients).cpu(), together(exact_gradients)) < 1.5 * FLOAT8_LAYER


def with_plan(step: Step) -> Step:
    """The step, with all that can be in fp8 in it."""
    step.precision = Precision(value="fp8", device=GPU, reason="a test", plan=Plan())
    return step


def losses(step: Step, token_budget: int) -> list[float]:
    batches = source(token_budget)
    batches.layout = dataclasses.replace(batches.layout, typical_length=60)  # type: ignore[type-var]  # our attention
    with Feed(batches, GPU, stop=40) as feed:
        outcomes = [step.run(batch).read() for batch in feed]
    assert all(outcome.applied for outcome in outcomes)
    return [outcome.loss for outcome in outcomes]


@pytest.mark.parametrize("token_budget", [2048, 512], ids=["whole", "pieces"])
def test_captured_steps_in_fp8(token_budget: int) -> None:
    """The same as one after another, and near those in bf16: copies of weights are those of the last update."""
    eager = losses(with_plan(make_step(Step, dropout=0.0, compiled=True)), token_budget)
    step = with_plan(make_step(CapturedStep, dropout=0.0, compiled=True))
    captured = losses(step, token_budget)
    in_bf16 = losses(make_step(CapturedStep, dropout=0.0, compiled=True), token_budget)
    assert step.num_graphs > 0  # type: ignore[attr-defined]
    assert step.precision.plan is not None
    assert len(step.precision.plan.met) == 4
    assert captured[:20] == pytest.approx(eager[:20], rel=3e-2)
    assert captured[:20] == pytest.approx(in_bf16[:20], rel=6e-2)
    assert captured != in_bf16


def test_the_check_and_the_choice() -> None:
    """Measured on this GPU; what was found is printed."""
    step = make_step(Step, dropout=0.0)
    assert choose_precision("fp8", GPU).value == "fp8"
    equivalence = check_equivalence(
        step.execution.model, max_length=128, device=GPU, precision="fp8", typical_length=60, cache=False
    )
    print(equivalence)
    assert equivalence.packed
    assert equivalence.float8_error is not None
    assert equivalence.float8_error <= 1
    assert set(equivalence.float8_shapes) == {(384, 128), (128, 128), (256, 128), (128, 256)}
    print(choose_products(GPU, equivalence, num_tokens=8192).line())
    for tokens, shapes in ((1344, ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
                           (16384, ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)))):  # fmt: skip
        for shape, timing in time_shapes(GPU, shapes, tokens, cache=False).items():
            text = ", ".join(f"{name} {1e6 * a:.0f} us, fp8 {1e6 * b:.0f} us" for name, (a, b) in timing.items())
            print(f"{tokens} tokens, {shape[0]}x{shape[1]}: {text}")
