"""Fused pieces of layers on a GPU: the same checks as on the CPU, and in half precision."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import kernels.test_prenorm_blocks as pre
from kernels.test_blocks import (
    Case,
    check_add_norm,
    check_attention,
    check_embeddings,
    check_linear,
    check_linear_gelu,
    check_two_readers,
)

pytestmark = pytest.mark.gpu

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=PRECISIONS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case("cuda", request.param)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(case: Case, bias: bool) -> None:
    check_linear(case, bias)


def test_linear_gelu(case: Case) -> None:
    check_linear_gelu(case)


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
