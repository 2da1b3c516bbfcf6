"""Layers on padded rows that torch compiles: the plain model's numbers, from one compilation for all of a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from transformers import AutoModelForSequenceClassification

from brimful.kernels.layout import PaddedInputs
from brimful.levers.compiled_layers import compile_padded_layers
from brimful.models import fusion
from brimful.models.model_stats import layer_lists
from brimful.models.packed.packed_forward import PaddedModel
from heads.tiny_heads import tiny_config


def logits_and_gradient(execution: PaddedModel, length: int) -> list[torch.Tensor]:
    ids_RL = torch.randint(5, 90, (3, length), generator=torch.Generator().manual_seed(length))
    mask_RL = torch.ones_like(ids_RL)
    mask_RL[1, 9:] = 0
    logits = execution(PaddedInputs(ids_RL=ids_RL * mask_RL, mask_RL=mask_RL, types_RL=None)).logits
    given = [parameter for parameter in execution.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(logits.square().sum(), given, allow_unused=True)
    return [logits.detach(), *(gradient for gradient in gradients if gradient is not None)]


def model_of_four_layers(kind: str) -> Any:
    torch.manual_seed(0)
    config: Any = tiny_config(kind)
    config.num_hidden_layers, config.pad_token_id = 4, 0
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types * 2
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("kind", "kinds", "lengths"), [("nystromformer", 1, (24, 32, 40)), ("qwen3_5_text", 2, (24, 32))]
)
def test_layers_of_one_kind_are_compiled_once(
    kind: str, kinds: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the first length, and once more for any other: a model of 24 layers is not compiled 24 times."""
    compiled = list[GraphModule]()

    def backend(graph: GraphModule, inputs: Sequence[Any], *, note: Callable[[str], None]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(fusion, "inductor_backend", backend)
    torch._dynamo.reset()
    execution = PaddedModel(model_of_four_layers(kind))
    assert sum(map(len, layer_lists(execution.model))) == 4
    expected = [logits_and_gradient(PaddedModel(execution.model, plain=True), length) for length in lengths]
    compile_padded_layers(execution, note=pytest.fail)
    for length, plain in zip(lengths, expected, strict=True):
        for found, wanted in zip(logits_and_gradient(execution, length), plain, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        assert len(compiled) == kinds * (1 if length == lengths[0] else 2)
