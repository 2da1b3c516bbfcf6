"""Dropout drawn by sites against its reference, and in the place of torch's own, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers.seeded_dropout import SeededDropout, seeded_dropout, seeded_dropout_reference


@pytest.mark.parametrize("shape", [(19, 300), (2, 9, 40), (7,)])
def test_values_and_gradients_are_the_references(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, requires_grad=True)
    context, num_rows = ForwardContext(), x.numel() // shape[-1]
    with context.active():
        context.dropout_site(x, num_rows, 0.3)  # one before it
        found = seeded_dropout(x, 0.3)
    seed, _ = context.dropout_site(x, num_rows, 0.3)
    flat = x.detach().reshape(-1, shape[-1]).requires_grad_()
    expected = seeded_dropout_reference(flat, 0.3, seed, 1)
    weights = torch.randn(shape)
    found.backward(weights)
    expected.backward(weights.reshape(flat.shape))
    assert torch.equal(found.reshape(flat.shape), expected)
    assert x.grad is not None
    assert flat.grad is not None
    assert torch.equal(x.grad.reshape(flat.shape), flat.grad)
    assert 0 < int((found == 0).sum()) < found.numel()


def test_it_stands_where_torchs_dropout_stands() -> None:
    x, module = torch.ones(8, 64), nn.Dropout(0.5)
    context = ForwardContext()
    with context.active(), SeededDropout():
        found = [module(x), F.dropout(x, p=0.5), F.dropout(x, 0.5, training=False), module.eval()(x)]
    seed, _ = context.dropout_site(x, 8, 0.5)
    for site in (0, 1):
        assert torch.equal(found[site], seeded_dropout_reference(x, 0.5, seed, site))
    assert found[2] is x
    assert found[3] is x
