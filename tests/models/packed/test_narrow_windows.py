"""Longformer on short rows: the plain model's logits and gradient, from fewer tokens, with its windows as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from brimful.kernels.layout import PaddedInputs
from brimful.models.model_stats import layers_of
from brimful.models.packed.narrow_windows import NarrowWindows
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.recompute import recompute
from heads.tiny_heads import tiny_config

WINDOW = 64


def longformer() -> Any:
    from transformers import AutoModelForSequenceClassification

    config: Any = tiny_config("longformer")
    config.attention_window = [WINDOW, 2 * WINDOW][: config.num_hidden_layers]
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).double().train()


def rows(model: Any, length: int) -> PaddedInputs:
    random = torch.Generator().manual_seed(length)
    ids_RL = torch.randint(5, model.config.vocab_size, (3, length), generator=random)
    mask_RL = torch.ones_like(ids_RL)
    mask_RL[1, length // 2 :] = 0
    ids_RL = ids_RL.where(mask_RL.bool(), model.config.pad_token_id)
    return PaddedInputs(ids_RL=ids_RL, mask_RL=mask_RL, types_RL=None)


def computed(model: Any, inputs: PaddedInputs, *, plain: bool) -> tuple[Tensor, Tensor, int]:
    """Logits, the gradient, and the tokens of a row that a layer is given."""
    seen: list[int] = []
    hook = model.base_model.encoder.layer[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    logits = PaddedModel(model, "eager", plain=plain)(inputs).logits
    logits.square().sum().backward()
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    hook.remove()
    return logits.detach(), torch.cat([each.flatten() for each in gradient]), seen[0]


@pytest.mark.parametrize(
    ("length", "tokens"), [(2, 16), (8, 16), (9, 32), (24, 48), (25, 2 * WINDOW), (33, 2 * WINDOW), (65, 2 * WINDOW)]
)
def test_short_rows_are_the_plain_models(length: int, tokens: int) -> None:
    """Of layers with different windows, by the narrowest; rows that it does not cover are left alone."""
    model = longformer()
    expected_logits, expected, all_tokens = computed(copy.deepcopy(model), rows(model, length), plain=True)
    logits, found, num_tokens = computed(model, rows(model, length), plain=False)
    assert all_tokens == NarrowWindows(model).plain_length(length) == 2 * WINDOW
    assert num_tokens == tokens
    assert float((logits - expected_logits).abs().max()) < 1e-10
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_layers_that_are_recomputed_have_the_windows_of_their_pass() -> None:
    """The pass is over by then, and its hidden states have its length."""
    model = longformer()
    expected_logits, expected, _ = computed(copy.deepcopy(model), rows(model, 10), plain=True)
    before, layers = windows(model), list(layers_of(model))
    recompute(layers, range(len(layers)))
    logits, found, num_tokens = computed(model, rows(model, 10), plain=False)
    assert num_tokens == 32
    assert float((logits - expected_logits).abs().max()) < 1e-10
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    assert windows(model) == before


def test_passes_that_overlap_end_with_the_models_own_windows() -> None:
    model = longformer()
    before, (one, other) = windows(model), (NarrowWindows(model).for_rows(length) for length in (9, 17))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert windows(model) == before


def test_a_model_with_the_same_configuration_has_its_own_windows() -> None:
    model = longformer()
    other = type(model)(model.config)
    with NarrowWindows(model).for_rows(9):
        assert model.config.attention_window == [32, 32][: model.config.num_hidden_layers]
        assert other.config.attention_window[0] == WINDOW
    assert model.config is other.config


def test_windows_are_as_before() -> None:
    model = longformer()
    before = windows(model)
    computed(model, rows(model, 9), plain=False)
    assert windows(model) == before

    def fail(*_: Any) -> None:
        assert windows(model) != before
        raise KeyboardInterrupt

    model.base_model.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        PaddedModel(model, "eager")(rows(model, 9))
    assert windows(model) == before


def windows(model: Any) -> list[Any]:
    layers = model.base_model.encoder.layer
    halves = [layer.attention.self.one_sided_attn_window_size for layer in layers]
    return [*halves, list(model.config.attention_window)]
