"""Layers with low-rank adapters on our kernels: the plain step's losses and gradients, of the adapters alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from brimful.kernels.layers import postnorm_ops, prenorm_ops
from brimful.models import fusion
from models.fusion.test_fusion import SHORT, compiled, graph_of, our_attention, settings_of
from step.test_step import make_step
from tiny import FAMILIES
from tolerances import difference

peft = pytest.importorskip("peft")

__all__ = ["our_attention"]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own calls


def adapted(family: str, targets: Any, **settings: Any) -> Any:
    """A model whose adapters are at work: peft's second matrices begin as zeros."""
    model: Any = FAMILIES[family].model(**settings_of(family))
    torch.manual_seed(0)
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules=targets, **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.2)
    return model


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "targets", "precision"),
    [
        ("bert", None, "fp32"), ("bert", "all-linear", "fp32"), ("llama", None, "fp32"),
        ("qwen3", "all-linear", "fp32"), ("qwen3", "all-linear", "bf16"), ("modernbert", "all-linear", "fp32"),
    ],
)  # fmt: skip
def test_a_fused_step_is_the_plain_one(
    family: str, targets: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient of a frozen weight is computed."""
    model = adapted(family, targets, lora_alpha=5, use_rslora=family == "llama")
    plain = make_step(copy.deepcopy(model), family=family, precision=precision)
    fused = make_step(model, family=family, precision=precision)
    covered = compiled(model)
    for ops in (postnorm_ops, prenorm_ops):
        monkeypatch.setattr(ops, "_weight_gradients", None)
    expected, found = plain.run(SHORT).read(), fused.run(SHORT).read()
    near = 2e-2 if precision == "bf16" else 1e-4
    assert found.loss == pytest.approx(expected.loss, rel=near)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=near)
    assert all(covered)
    weights = plain.state().weights
    assert any("lora_A" in name for name in weights)
    for name, weight in fused.state().weights.items():
        assert difference(weight, weights[name]) < near, name


def test_an_adapter_of_other_rows_is_left_alone() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.down, self.up = nn.Linear(16, 8), nn.Linear(16, 3, bias=False), nn.Linear(3, 8, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            added: torch.Tensor = self.whole(x) + self.up(self.down(y)) * 2.0
            return added

    x, y = torch.randn(2, 1, 20, 16).unbind()
    assert fusion.fuse(graph_of(Other(), x, x)) is not None
    assert fusion.fuse(graph_of(Other(), x, y)) is None


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("family", "settings"), [("llama", {"lora_dropout": 0.1}), ("bert", {"lora_bias": True})])
def test_other_adapters_run_as_they_are(family: str, settings: dict[str, Any]) -> None:
    """With dropout before the matrices, or a bias behind them."""
    model = adapted(family, None, **settings)
    covered = compiled(model)
    expected = make_step(copy.deepcopy(model), family=family).run(SHORT).read()
    assert make_step(model, family=family).run(SHORT).read().loss == pytest.approx(expected.loss, rel=1e-4)
    assert not all(covered)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("family", ["qwen3", "llama", "bert"])
def test_inputs_of_frozen_products_are_not_kept(family: str) -> None:
    """Of each layer at least the widest, of the last product, which a model keeps whose other weights learn, too."""
    kept = []
    for learned in (False, True):
        model = adapted(family, None, lora_alpha=5)
        if learned:
            model.requires_grad_(True)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        step, covered, storages = make_step(model, family=family), compiled(model), dict[int, int]()

        def pack(x: torch.Tensor, weights: set[int] = weights, storages: dict[int, int] = storages) -> torch.Tensor:
            if (storage := x.untyped_storage()).data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            rows_S = step.accumulate(SHORT, 0)
        assert all(covered)
        assert rows_S.isfinite().all()
        kept.append(sum(storages.values()))
    config, tokens = model.config, SHORT.micro_batches[0].inputs.num_tokens
    assert kept[1] - kept[0] >= 4 * tokens * config.intermediate_size * config.num_hidden_layers
