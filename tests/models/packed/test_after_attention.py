"""The end of the last layer for the tokens that the head reads: where the model is changed, or somebody looks on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from brimful.kernels.layout import PackedShape, packed_inputs
from brimful.models.packed.equivalence import check_equivalence
from brimful.models.packed.packed_forward import PackedModel
from plain import padded
from tiny import FAMILIES, LONGEST, sequences
from tolerances import MODEL_FP32, difference

LENGTHS = [5, 17, 2, 9]
LLAMA = FAMILIES["llama"]


def logits(run: PackedModel) -> Tensor:
    ids = sequences(LENGTHS)
    shape = PackedShape(num_tokens=64, num_slots=6, max_length=LONGEST)
    return run(packed_inputs(ids, shape, padding_id=0, groups=True)).logits[: len(ids)]


def distance(run: PackedModel) -> float:
    plain = copy.deepcopy(run.model)
    plain.set_attn_implementation("eager")
    return difference(logits(run), plain(**padded(sequences(LENGTHS), None, 0)).logits)


def other_part(model: Any) -> None:
    model.model.layers[-1].mlp = LLAMA.model(seed=1).model.layers[-1].mlp


def other_layer(model: Any) -> None:
    model.model.layers[-1] = layer = copy.deepcopy(model.model.layers[0])
    layer.self_attn.config, layer.self_attn.layer_idx = model.config, 1


def other_norm(model: Any) -> None:
    model.model.layers[-1].post_feedforward_layernorm = nn.Identity()


def fewer_layers(model: Any) -> None:
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1


@pytest.mark.parametrize("change", [other_part, other_layer, other_norm, fewer_layers])
def test_a_model_that_was_changed_is_run_as_it_is(change: Callable[[Any], None]) -> None:
    """By the execution that was made before, and by a new one."""
    model = FAMILIES["gemma2" if change is other_norm else "llama"].model()
    run = PackedModel(model, LLAMA.form)
    assert distance(run) < MODEL_FP32
    assert run.left_out.parameters > 0
    kept = run.model.model.layers[-1].mlp  # alive, and called no more
    change(model)
    assert distance(run) < MODEL_FP32
    assert distance(PackedModel(model, LLAMA.form)) < MODEL_FP32
    del kept


def test_a_part_that_draws_in_a_layer_that_does_not_train_is_given_all_tokens() -> None:
    model = LLAMA.model().eval()
    run = PackedModel(model, LLAMA.form)
    assert run.left_out.parameters > 0
    model.model.layers[-1].behind = nn.Dropout(0.5).train()
    assert run.left_out.parameters == 0


def test_a_layer_that_is_looked_at_is_run_whole() -> None:
    model, seen = LLAMA.model(), list[Tensor]()
    run = PackedModel(model, LLAMA.form)
    hook = model.model.layers[-1].mlp.register_forward_hook(lambda *given: seen.append(given[2]))
    assert distance(run) < MODEL_FP32
    assert seen[0].shape[1] == 64
    hook.remove()
    assert run.left_out.parameters > 0


class Scaled(LlamaDecoderLayer):
    """A layer with a scale behind the sum, which is 1 in all but the last."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * self.scale


@pytest.mark.parametrize("trained", [False, True])
def test_the_last_layer_itself_decides(trained: bool) -> None:
    model = LLAMA.model(num_hidden_layers=4)
    for number, layer in enumerate(model.model.layers):
        layer.__class__ = Scaled
        scale = torch.full((16,), 0.5 if number == 3 and not trained else 1.0)
        layer.scale = nn.Parameter(scale) if trained else scale
        if not trained:
            del layer.scale
            layer.register_buffer("scale", scale)
    found = check_equivalence(model, max_length=LONGEST, device=torch.device("cpu"), precision="fp32", cache=False)
    assert found.packed, found.reason
    assert found.form is not None
    assert not found.form.short
    assert distance(PackedModel(model, found.form)) < MODEL_FP32
