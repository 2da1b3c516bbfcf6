"""Fused pieces of layers on a GPU: the same checks as on the CPU, and in half precision."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

import kernels.layers.test_prenorm_ops as pre
from brimful.kernels.layers import gelu, matmul_gelu, postnorm_ops
from brimful.kernels.precompile import precompiled
from kernels.layers.test_postnorm_ops import (
    Case,
    check_adapter,
    check_add_norm,
    check_attention,
    check_embeddings,
    check_linear,
    check_linear_gelu,
    check_two_readers,
)
from kernels.layers.test_selective_scan import check_kept, check_kernels
from kernels.test_part_adamw import check_steps
from kernels.test_part_sums import check_sums

pytestmark = pytest.mark.gpu

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=PRECISIONS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case("cuda", request.param)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("count", "size"), [(2, 1_000_003), (4, 4096)])
def test_sums_of_processes_parts(dtype: torch.dtype, count: int, size: int) -> None:
    check_sums("cuda", dtype, count, size)


@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.9, 0.999)])  # of the last 1 - beta has four digits in fp32
@pytest.mark.parametrize("size", [1_000_003, 4096])
def test_adamw_of_a_part(size: int, betas: tuple[float, float]) -> None:
    check_steps("cuda", size, 0.1, betas)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(
    "shape", [(2, 5, 7, 3), (32, 1000, 32, 16), (4, 96, 500, 16), (2, 70, 1025, 16), (1, 6, 4096, 16)]
)
def test_a_selective_scan(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_kernels(shape, dtype, "cuda")


@pytest.mark.parametrize("step", [1.0, 5.0])
def test_a_selective_scan_that_keeps_little(step: float) -> None:
    check_kept(step, "cuda")


@pytest.mark.parametrize("bias", [True, False])
def test_linear(case: Case, bias: bool) -> None:
    check_linear(case, bias)


def test_an_adapter(case: Case) -> None:
    check_adapter(case)


def test_linear_gelu(case: Case) -> None:
    check_linear_gelu(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "depth", "width"), [(1, 64, 256), (1000, 384, 1536), (4103, 768, 3072)])
def test_a_product_activated_in_its_own_kernel(dtype: torch.dtype, num_rows: int, depth: int, width: int) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(rows, depth, device="cuda", generator=random).to(dtype) for rows in (num_rows, width))
    w, bias = w * depth**-0.5, torch.randn(width, device="cuda", generator=random)
    wanted = gelu.bias_gelu(x.double() @ w.double().t(), bias.double())
    assert matmul_gelu.suits(x, w)
    with torch.no_grad():
        found = postnorm_ops.linear_gelu(x[None], w, bias)[0]
        few = postnorm_ops.linear_gelu(x[-9:].contiguous(), w, bias)
    assert (found.double() - wanted).norm() <= (2e-3 if dtype == torch.bfloat16 else 3e-4) * wanted.norm()
    assert torch.equal(found[-9:], few)  # rows do not depend on one another, nor on their number


def test_a_kernel_of_descriptors_is_compiled_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(300, 64, device="cuda").bfloat16(), torch.randn(256, 64, device="cuda").bfloat16()
    matmul_gelu.gelu_product.device_caches.clear()
    with precompiled():
        matmul_gelu.fused(x, w, torch.zeros(256, device="cuda"))
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, key, **told: compiled.append(key))
    matmul_gelu.fused(x, w, torch.zeros(256, device="cuda"))
    assert not compiled


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_linear_dropout_add_norm(case: Case, p: float) -> None:
    check_add_norm(case, p)


@pytest.mark.parametrize("half", [False, True])
def test_rows_have_two_readers(case: Case, half: bool) -> None:
    check_two_readers(case, half=half)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("typical_length", [30, 300])
def test_projected_attention(case: Case, p: float, typical_length: int) -> None:
    check_attention(case, p, typical_length=typical_length)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_embeddings_norm(case: Case, p: float, half: bool) -> None:
    check_embeddings(case, p, 3, 0, half=half)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_norm_of_the_stream(case: Case, p: float, centred: bool) -> None:
    pre.check_norm(case, centred=centred)
    pre.check_add_norm(case, p, centred=centred)
    pre.check_add(case, p)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_linear_gated(case: Case, activation: pre.gated.Activation, p: float) -> None:
    pre.check_gated(case, activation, p)


@pytest.mark.parametrize("keys", [4, 1])
@pytest.mark.parametrize("normed", [False, True])
def test_heads(case: Case, keys: int, normed: bool) -> None:
    pre.check_heads(case, keys, normed=normed)


@pytest.mark.parametrize("kind", pre.ATTENTION)
def test_rotary_attention(case: Case, kind: str) -> None:
    pre.check_attention(case, **{"p": 0.0} | pre.ATTENTION[kind])


def test_a_stream_of_residuals(case: Case) -> None:
    pre.check_chain(case)
