"""Products in fp8: casts against plain references, layers against exact ones and against layers of rounded operands.

On the CPU products are emulated; `tests/gpu/test_float8_on_gpu.py` runs the matrix units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from brimful.kernels import float8, float8_cast
from brimful.kernels.float8 import Plan, Products, Scaled, cast, columns_of, rows_of
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers import postnorm_ops
from kernels.layers.test_postnorm_ops import HEADS, LENGTHS, SHAPE
from tolerances import FLOAT8_LAYER, FLOAT8_ROUNDING, difference

ALL = Products(True, True, True)
T, K, N = 160, 64, 48


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def representable(rows: int, columns: int) -> Tensor:
    """Numbers that e4m3 has, subnormal ones among them, and in each row 448."""
    x = (random(rows, columns) * 20).to(float8.DTYPE).float()
    x[:, 1], x[:, 2] = 2.0**-9, -3 * 2.0**-9
    x[:, 0] = float8.LARGEST
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (70, 80), (128, 200)])
def test_kernels_cast_as_their_references(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Bit for bit, on numbers that need no rounding: Triton's interpreter does not round to e4m3 as GPUs do."""
    scales = 2.0 ** torch.randint(-30, 30, (rows, 1), generator=torch.Generator().manual_seed(0))
    x = (representable(rows, columns) * scales).to(dtype)
    for kernel, reference, given in (
        (float8_cast.rows, rows_of, x),
        (float8_cast.columns, columns_of, x.t().contiguous()),
    ):
        found = Scaled(torch.empty(rows, columns, dtype=float8.DTYPE), torch.empty(rows, 1))
        kernel(given, *found, float8.SMALLEST, float8.LARGEST)
        expected = reference(given)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(found.restored(), x.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = random(32, 48)
    x[5, 7] = value
    by_rows, by_columns = (
        Scaled(torch.empty(s, dtype=float8.DTYPE), torch.empty(s[0], 1)) for s in ((32, 48), (48, 32))
    )
    float8_cast.rows(x, *by_rows, float8.SMALLEST, float8.LARGEST)
    float8_cast.columns(x, *by_columns, float8.SMALLEST, float8.LARGEST)
    for found in (by_rows, rows_of(x)):
        assert (~found.restored().isfinite()).any(1).nonzero().flatten().tolist() == [5]
    for found in (by_columns, columns_of(x)):
        assert (~found.restored().isfinite()).any(1).nonzero().flatten().tolist() == [7]
    product = float8.product(rows_of(x), rows_of(random(16, 48)), torch.float32)
    assert (~product.isfinite()).all(1).nonzero().flatten().tolist() == [5]


def test_rows_of_zeros_and_of_tiny_numbers() -> None:
    x = random(16, 32)
    x[3], x[4], x[5] = 0, x[4] * 1e-38, x[5] * 1e35
    found = cast(x).restored()
    assert not found[3].any()
    assert found.isfinite().all()
    assert difference(found[5], x[5]) < FLOAT8_ROUNDING
    assert not cast(torch.zeros(16, 32), transposed=True).restored().any()


@pytest.mark.parametrize("transposed", [False, True])
def test_rounding_is_that_of_three_bits_of_mantissa(transposed: bool) -> None:
    x = random(64, 64) * torch.logspace(-6, 6, 64)[:, None]
    found = cast(x, transposed=transposed).restored()
    if not transposed:
        assert difference(found, x) < FLOAT8_ROUNDING
        assert ((found - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) / 448 / 512).all()
    assert difference(found.t() if transposed else found, x) < FLOAT8_ROUNDING


def layer(kind: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """A fused piece, the same by a given `linear`, and its leaves."""
    x, w, b = random(1, T, K), random(N, K, seed=1) * K**-0.5, random(N, seed=2) * 0.5
    if kind == "linear":
        return postnorm_ops.linear, lambda linear, x, w, b: linear(x, w, b), [x, w, b]
    if kind == "gelu":
        return postnorm_ops.linear_gelu, lambda linear, x, w, b: F.gelu(linear(x, w, b)), [x, w, b]
    if kind == "norm":
        residual, gain, shift = random(1, T, N, seed=3), random(N, seed=4), random(N, seed=5)
        return (
            lambda *leaves: postnorm_ops.linear_dropout_add_norm(*leaves, 1e-12, 0.0),
            lambda linear, x, w, b, r, gain, shift: F.layer_norm(linear(x, w, b) + r, (N,), gain, shift, 1e-12),
            [x, w, b, residual, gain, shift],
        )
    return attention()


def attention() -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    lengths = [*LENGTHS, T - sum(LENGTHS)]
    cu_seqlens_N = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        settings = (SHAPE.max_length, 30, 0.25, False, 0, 0.0, 0.0)
        return postnorm_ops.projected_attention(x, w.chunk(3), b.chunk(3), cu_seqlens_N, HEADS, settings)

    def plain(linear: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        q, k, v = linear(x[0], w, b).view(T, 3, HEADS, -1).transpose(0, 2).unbind(1)
        scores = (q @ k.transpose(1, 2) * 0.25).masked_fill(segment_T[:, None] != segment_T, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return ours, plain, [random(1, T, K), random(3 * K, K, seed=1) * K**-0.5, random(3 * K, seed=2) * 0.5]


def run(function: Callable[..., Tensor], leaves: list[Tensor], plan: Plan | None = None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients, the latter of a fixed direction; the context is active in the forward pass alone."""
    given = [leaf.clone().requires_grad_(True) for leaf in leaves]
    with ForwardContext(float8=plan).active():
        out = function(*given)
    return out.detach(), list(torch.autograd.grad((out * random(*out.shape, seed=9)).sum(), given))


def together(gradients: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["linear", "gelu", "norm", "attention"])
def test_a_fused_piece_in_fp8(kind: str) -> None:
    """As near to the exact one as three bits allow, and the same as one whose operands are rounded."""
    ours, plain, leaves = layer(kind)
    plan = Plan()
    found, gradients = run(ours, leaves, plan)
    rounded, rounded_gradients = run(lambda *given: plain(float8.linear, *given), leaves)
    exact, exact_gradients = run(lambda *given: plain(F.linear, *given), leaves)
    assert list(plan.met) == [tuple(leaves[1].shape)]
    assert 0.001 < difference(found, exact) < FLOAT8_LAYER
    assert 0.001 < difference(together(gradients), together(exact_gradients)) < FLOAT8_LAYER
    assert difference(found, rounded) < 1e-3  # a rounding that falls the other way is an eighth of a number
    assert difference(together(gradients), together(rounded_gradients)) < 5e-3
    again, same_gradients = run(ours, leaves, Plan())
    assert torch.equal(found, again)
    assert all(torch.equal(one, other) for one, other in zip(gradients, same_gradients, strict=True))


@pytest.mark.parametrize("product", Products._fields)
def test_only_products_of_the_plan_are_in_fp8(product: str) -> None:
    ours, _, leaves = layer("linear")
    exact, exact_gradients = run(ours, leaves)
    plan = Plan({(N, K): Products(**{product: True})})
    found, gradients = run(ours, leaves, plan)
    changed = [not torch.equal(*pair) for pair in ((found, exact), *zip(gradients, exact_gradients, strict=True))]
    places = {"output": 0, "input_gradient": 1, "weight_gradient": 2}
    assert changed == [place == places[product] for place in range(4)]


@pytest.mark.parametrize(("shape", "num_tokens", "chosen"), [
    ((48, 64), 160, ALL), ((48, 64), 150, ALL._replace(weight_gradient=False)), ((48, 64), 0, Products()),
    ((40, 64), 160, Products()), ((48, 60), 160, Products()),
])  # fmt: skip
def test_sizes_that_matrix_units_take(shape: tuple[int, int], num_tokens: int, chosen: Products) -> None:
    assert Plan().products(num_tokens, shape) == chosen
    assert Plan({}).products(num_tokens, shape) == Products()


def kept(plan: Plan, weight: Tensor, **options: Any) -> Scaled:
    return plan.weight(weight, transposed=False, **{"keep": True, **options})


def test_weights_are_cast_once_between_updates() -> None:
    plan, weight = Plan(), random(N, K).requires_grad_(True)
    first = kept(plan, weight)
    assert kept(plan, weight).values is first.values
    assert kept(plan, weight, keep=False).values is not first.values
    with torch.no_grad():
        weight.mul_(2)  # seen by its version
    assert torch.equal(kept(plan, weight).restored(), rows_of(weight).restored())
    weight.data.mul_(-1)  # as a kernel does it: not seen
    assert not torch.equal(first.restored(), rows_of(weight).restored())
    plan.renew()
    assert torch.equal(first.restored(), rows_of(weight).restored())
    assert kept(plan, weight).values is first.values  # where a captured graph reads it
    plan.forget()
    assert kept(plan, weight).values is not first.values


def test_weights_that_do_not_fit_side_by_side_are_not_kept() -> None:
    """Queries, keys and values in storages of their own are copied for one use; the copy's place is anyone's next."""
    ours, _, (x, w, b) = layer("attention")
    plan = Plan()
    with ForwardContext(float8=plan).active():
        settings = (SHAPE.max_length, 30, 0.25, False, 0, 0.0, 0.0)
        cu_seqlens_N = torch.tensor([0, T], dtype=torch.int32)
        postnorm_ops.projected_attention(
            x, [each.clone() for each in w.chunk(3)], b.chunk(3), cu_seqlens_N, HEADS, settings
        )
    assert not plan._copies
    with ForwardContext(float8=plan).active():
        ours(x, w, b)
    assert len(plan._copies) == 1
