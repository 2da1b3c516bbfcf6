"""The product that is activated in its own kernel against the product and the activation one after the other.

On the CPU by Triton's interpreter in fp16 and fp32; `tests/gpu/test_layers_on_gpu.py` has what GPUs run.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from brimful.kernels.float8 import Plan, Products
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers import matmul_gelu, postnorm_ops
from brimful.kernels.layers.gelu import bias_gelu

WIDTH = 512


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-4), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("num_rows", "depth"), [(1, 8), (150, 64), (300, 136)])
def test_as_one_after_the_other(num_rows: int, depth: int, dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, depth, generator=random).to(dtype) for rows in (num_rows, WIDTH))
    w, bias = w * depth**-0.5, torch.randn(WIDTH, generator=random)
    found = matmul_gelu.fused(x, w, bias)
    wanted = bias_gelu(x.double() @ w.double().t(), bias.double())
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()


def test_a_row_does_not_depend_on_the_others() -> None:
    """Operands whose sums are exact: numpy's products round by the place of a row in some processors' code."""
    random = torch.Generator().manual_seed(1)
    shapes = ((200, 16), (WIDTH, 16), (WIDTH,))
    x, w, bias = (torch.randint(-8, 9, shape, generator=random) / 16 for shape in shapes)
    assert torch.equal(matmul_gelu.fused(x, w, bias)[131:140], matmul_gelu.fused(x[131:140].contiguous(), w, bias))


def activated(values_T: torch.Tensor) -> torch.Tensor:
    """The kernel's gelu of fp32 values: products of them with one."""
    x = F.pad(values_T[:, None], (0, 7))
    w = F.pad(torch.ones(256, 1), (0, 7))
    return matmul_gelu.fused(x, w, torch.zeros(256))[:, 0]


def test_gelu_is_within_what_half_precision_rounds() -> None:
    values = torch.cat([torch.linspace(-14, 14, 6000), torch.tensor([0.0, 1e-6, -1e-6, 100.0, -100.0, 1e6, -1e6])])
    found, wanted = activated(values).double(), F.gelu(values.double())
    assert torch.all((found - wanted).abs() <= 3e-5 * wanted.abs() + 1e-7)


def test_what_is_no_number_stays_none() -> None:
    assert activated(torch.tensor([float("nan"), 1.0])).isnan().tolist() == [True, False]


def operands(num_rows: int = 20, depth: int = 16, width: int = WIDTH) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    shapes = ((num_rows, depth), (width, depth), (width,))
    return [torch.randn(*shape, generator=random).half() for shape in shapes]


@pytest.mark.parametrize("asked", ["with gradients", "without", "in fp8", "in fp8 for other shapes"])
def test_where_layers_take_it(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fused = matmul_gelu.fused
    monkeypatch.setattr(matmul_gelu, "suits", matmul_gelu.takes)
    monkeypatch.setattr(matmul_gelu, "fused", lambda *given: calls.append(1) or fused(*given))
    choices = {(WIDTH, 16): Products(output=True)} if asked == "in fp8" else {}
    context = ForwardContext(float8=Plan(choices) if "fp8" in asked else None)
    x, w, bias = operands()
    with torch.set_grad_enabled(asked == "with gradients"), context.active():
        found = postnorm_ops.linear_gelu(x[None], w.requires_grad_(True), bias)
    assert found.shape == (1, 20, WIDTH)
    assert found.requires_grad == (asked == "with gradients")
    assert len(calls) == (asked in ("without", "in fp8 for other shapes"))
    wanted = F.gelu(F.linear(x.double(), w.double(), bias.double()))
    assert (found[0].double() - wanted).norm() <= (5e-2 if asked == "in fp8" else 1e-3) * wanted.norm()


def test_what_it_takes() -> None:
    x, w, _ = operands()
    assert matmul_gelu.takes(x, w)
    assert not matmul_gelu.suits(x, w)  # it was measured on GPUs
    assert not matmul_gelu.takes(x.float(), w.float())
    assert not matmul_gelu.takes(x[:0], w)
    assert not matmul_gelu.takes(x, w[:300])  # no whole tiles
    assert not matmul_gelu.takes(x[:, :12].contiguous(), w[:, :12].contiguous())  # rows of 24 bytes
    assert not matmul_gelu.takes(x[:, :8], w[:, :8].contiguous())  # rows apart
    assert not matmul_gelu.takes(F.pad(x, (0, 8))[:1, :16], w)  # one row, whose pitch is another
    assert not matmul_gelu.takes(x.flatten()[1:161].view(10, 16), w)  # 2 bytes from where it could begin
