"""Linear layers with reordered weights against plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.models.reordered import can_reorder, reorder_linears

pytestmark = pytest.mark.skipif(not can_reorder(torch.float32), reason="this torch has no oneDNN")


def linears(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200, bias=bias), nn.Linear(200, 64, bias=bias), nn.Linear(64, 3))


def reorder(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    return reorder_linears(model, dtype, 32, unchanged=lambda: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 96), (2, 5, 96), (0, 96)])
def test_outputs_of_fp32_are_those_of_plain_layers(shape: tuple[int, ...], bias: bool) -> None:
    model, x = linears(bias), torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        assert reorder(model)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_lie_together() -> None:
    model, x = linears(), torch.randn(96, 9).t()
    with torch.inference_mode():
        expected = model(x)
        assert reorder(model)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_outputs_of_bf16_are_those_of_autocast() -> None:
    layer = nn.Sequential(nn.Linear(96, 200))
    x, weight = torch.randn(40, 96), layer[0].weight.detach()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        assert reorder(layer, torch.bfloat16)
        found = layer(x)
    assert found.dtype == torch.bfloat16
    exact = F.linear(x.double(), weight.double())
    assert (found - expected).abs().max() <= 2**-8 * exact.abs().max()


def test_shapes_are_still_told_and_small_layers_are_left() -> None:
    model = linears()
    assert reorder(model)
    assert [tuple(p.shape) for p in model.parameters()] == [(200, 96), (200,), (64, 200), (64,), (3, 64), (3,)]
    assert [type(each) is nn.Linear for each in model] == [False, False, True]
    assert model[0].weight.isnan().all()  # nobody computes with what stands for it unseen


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert reorder(model)
    assert model[0][0] is model[1][0]  # type: ignore[index]
    assert model[0][0] is not shared  # type: ignore[index]


def test_a_layer_with_a_hook_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].register_forward_hook(lambda *_: None)
    assert reorder(model)
    assert type(model[0]) is nn.Linear


def test_plain_layers_come_back_where_the_model_computes_something_else() -> None:
    model = linears()
    layers = list(model)
    assert not reorder_linears(model, torch.float32, 32, unchanged=lambda: False)
    assert all(one is other for one, other in zip(model, layers, strict=True))

    def fails() -> bool:
        raise RuntimeError("no such product")

    assert not reorder_linears(model, torch.float32, 32, unchanged=fails)
    assert all(one is other for one, other in zip(model, layers, strict=True))
