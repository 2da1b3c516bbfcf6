"""Linear layers with reordered weights against plain ones, and whole models against themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.models import onednn_prepack
from brimful.models.half_weights import halve_linears
from brimful.models.onednn_prepack import _ReorderedLinear, can_reorder, reorder_linears
from processor import in_bf16
from tiny import FAMILIES

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def test_this_torch_has_the_operators() -> None:
    """They are not public: were they gone, weights would stay as they are, and nobody would hear of it."""
    assert all(can_reorder(dtype) for dtype in (torch.float32, torch.bfloat16))
    assert not can_reorder(torch.float16)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of tf32 besides
    try:
        assert not can_reorder(torch.float32)
    finally:
        torch._C._set_mkldnn_enabled(True)


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 200, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 96), (2, 5, 96), (0, 96), (300, 96)])
def test_outputs_of_fp32_are_those_of_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, x = layer(bias), torch.randn(shape)
    with torch.inference_mode():
        found = _ReorderedLinear(plain, torch.float32, 32)(x)
        torch.testing.assert_close(found, plain(x), atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_lie_together() -> None:
    plain, x = layer(), torch.randn(96, 9).t()
    with torch.inference_mode():
        torch.testing.assert_close(_ReorderedLinear(plain, torch.float32, 32)(x), plain(x), atol=1e-5, rtol=1e-5)


@in_bf16
def test_outputs_of_bf16_are_those_of_autocast() -> None:
    plain, x = layer(), torch.randn(40, 96)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(x), _ReorderedLinear(plain, torch.bfloat16, 32)(x)
    assert found.dtype == torch.bfloat16
    exact = F.linear(x.double(), plain.weight.double())
    assert (found - expected).abs().max() <= 2**-8 * exact.abs().max()


@in_bf16
def test_the_weight_tells_its_shape_and_nothing_else() -> None:
    found = _ReorderedLinear(layer().eval(), torch.bfloat16, 32)
    assert {name: tuple(p.shape) for name, p in found.named_parameters()} == {"weight": (200, 96), "bias": (200,)}
    assert found.weight.isnan().all()
    assert found.weight.untyped_storage().nbytes() == 2
    assert not found.training


# Whole models


@pytest.fixture
def bert(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny one whose layers are all large enough."""
    monkeypatch.setattr(onednn_prepack, "_LEAST", 1)
    return FAMILIES["bert"].model(3).eval().requires_grad_(False)


def reorder(model: Any, dtype: torch.dtype = torch.float32) -> bool:
    return reorder_linears(model, dtype, rows=32, max_length=60)


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear)}


def test_all_layers_of_a_model(bert: Any) -> None:
    assert reorder(bert)
    assert kinds(bert) == {_ReorderedLinear}


def test_small_layers_are_left_and_are_no_reason_to_say_that_it_was_done() -> None:
    model = FAMILIES["bert"].model(3).eval()
    assert not reorder(model)
    assert kinds(model) == {nn.Linear}


def test_a_layer_in_two_places_stays_one(bert: Any) -> None:
    bert.bert.encoder.layer[1].output.dense = bert.bert.encoder.layer[0].output.dense
    assert reorder(bert)
    one, other = (bert.bert.encoder.layer[i].output.dense for i in (0, 1))
    assert one is other
    assert type(one) is _ReorderedLinear


def test_layers_that_somebody_changed_are_left(bert: Any) -> None:
    first, second, third = (
        bert.bert.encoder.layer[0].attention.self.get_submodule(n) for n in ("query", "key", "value")
    )
    first.register_forward_hook(lambda *_: None)
    second.forward = lambda x: F.linear(x, second.weight, second.bias)
    third.scale = 2.0
    assert reorder(bert)
    assert [type(each) for each in (first, second, third)] == [nn.Linear] * 3
    assert kinds(bert) == {nn.Linear, _ReorderedLinear}


class _Reading(nn.Module):
    """A Linear layer that is not called: its weight is read, as a model's own code may do."""

    def __init__(self, inner: nn.Linear, *, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.fails = inner, fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and type(self.inner) is not nn.Linear:
            raise AttributeError("no such attribute")
        return F.linear(x, self.inner.weight, self.inner.bias)


@pytest.mark.parametrize("fails", [False, True])
def test_plain_layers_come_back_where_the_model_reads_one(bert: Any, fails: bool) -> None:
    inside = bert.bert.encoder.layer[0].intermediate
    inside.dense = _Reading(inside.dense, fails=fails)
    before = {name: module for name, module in bert.named_modules() if isinstance(module, nn.Linear)}
    assert not reorder(bert)
    assert {name: module for name, module in bert.named_modules() if isinstance(module, nn.Linear)} == before


@in_bf16
def test_nothing_keeps_the_plain_weights(bert: Any) -> None:
    """Halves lie in one memory: of the layers that are left, and none of the others."""
    assert reorder(bert, torch.bfloat16)
    halve_linears(bert, torch.bfloat16)
    largest = max(
        p.untyped_storage().nbytes() for m in bert.modules() if isinstance(m, nn.Linear) for p in m.parameters()
    )
    assert largest <= 2 * max(m.out_features for m in bert.modules() if isinstance(m, nn.Linear)) + 64
