"""Models whose padded passes cannot be recorded: the host looks at numbers of the device, or draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from brimful.models.half_experts import halve_experts
from brimful.models.packed.host_reads import Recording, how_recorded
from heads.tiny_heads import tiny_model
from tiny import FAMILIES

SMALL = {"vocab_size": 99, "num_labels": 3, "pad_token_id": 0, "eos_token_id": 2}


def t5() -> Any:
    config = transformers.T5Config(
        **SMALL, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForSequenceClassification(config)


def longformer(window: int = 8) -> Any:
    config = transformers.LongformerConfig(
        **SMALL, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        attention_window=window, max_position_embeddings=window + 82,
    )  # fmt: skip
    return transformers.LongformerForSequenceClassification(config)


def longformer_of_short_rows() -> Any:
    """Rows of 48 tokens have a window of 96."""
    return longformer(128)


def big_bird() -> Any:
    config = transformers.BigBirdConfig(
        **SMALL, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    return transformers.BigBirdForSequenceClassification(config)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
def test_models_without_such_code_can_be_recorded(training: bool) -> None:
    for model in (FAMILIES["bert"].model(), FAMILIES["gpt2"].model(), big_bird()):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = how_recorded(model, 64, training=training, attention="eager")
        assert found == Recording(with_decisions=found.with_decisions)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["gpt_oss", "minimax", "phimoe", "qwen3_moe"])
def test_experts_need_the_host_but_in_bf16(kind: str) -> None:
    model = tiny_model(kind)
    model.config.pad_token_id = 0
    why_not = how_recorded(model, 64, training=True).why_not
    assert why_not == "the host must read how many tokens each expert has, but for products in bf16"
    assert how_recorded(model, 64, training=True, half=torch.bfloat16).why_not is None
    halve_experts(model)  # by the precision, before anybody asks
    for parameter in model.parameters():  # and Linear weights by the optimizer
        parameter.data = parameter.data.to(torch.bfloat16) if parameter.dim() == 2 else parameter.data
    assert how_recorded(model, 64, training=True, half=torch.bfloat16).why_not is None


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("make", "compilable"), [(t5, True), (longformer, False), (longformer_of_short_rows, False)])
def test_code_that_decides_by_numbers_of_the_device_can_with_its_decisions(
    make: Callable[[], Any], compilable: bool, training: bool
) -> None:
    """End tokens are counted, by the head; tokens with global attention listed, by layers: the same in all batches of a
    shape."""
    assert how_recorded(make(), 64, training=training) == Recording(with_decisions=True, compilable=compilable)


def number(states: Tensor) -> Tensor:
    return states * torch.tensor(0.5, device=states.device)


def table(states: Tensor) -> Tensor:
    return states + torch.arange(states.shape[1])[:, None].to(states)


def columns(states: Tensor) -> Tensor:
    return states + states[:, :, [1]]


def choice(states: Tensor) -> Tensor:
    return torch.where(states > 0, states, torch.tensor(0.1))


def gaps(states: Tensor) -> Tensor:
    """torch copies the number to a GPU, where it also does for zeros like it in the backward pass."""
    states = states.clone()
    states[:, torch.arange(2, device=states.device)] = 0.25
    return states


def gaps_of_a_tensor(states: Tensor) -> Tensor:
    states = states.clone()
    states[:, torch.arange(2, device=states.device)] = torch.tensor(0.25)
    return states


def listed(states: Tensor) -> Tensor:
    """Reads a list of numbers of the device."""
    return states.view(torch.tensor(states.shape, device=states.device).tolist())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("copy", [number, table, columns, choice, gaps, gaps_of_a_tensor, listed])
@pytest.mark.parametrize("in_layers", [False, True])
def test_code_that_copies_the_hosts_numbers_to_the_device_can_with_these(
    copy: Callable[[Tensor], Tensor], in_layers: bool
) -> None:
    model = FAMILIES["bert"].model()
    place = model.bert.encoder.layer[0].output if in_layers else model.bert.embeddings
    place.register_forward_hook(lambda *given: copy(given[2]))
    expected = Recording(with_decisions=True, compilable=not in_layers)
    assert how_recorded(model, 64, training=True) == expected


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_code_that_reads_in_one_precision_alone_is_recorded_in_that_one(half: torch.dtype | None) -> None:
    """Decisions are of the run's precision. Without numbers the model is traced in fp32, where it asks for more."""
    model = FAMILIES["bert"].model()
    query = model.bert.encoder.layer[0].attention.self.query
    query.register_forward_hook(lambda *given: listed(given[2]) if given[2].dtype == torch.float32 else None)
    found = how_recorded(model, 64, training=True, half=half)
    assert found.with_decisions == (half is None)
    assert (found.why_not is None) == (half is None)


def test_a_head_of_images_and_text_has_its_decoder_store_nothing() -> None:
    """It does not name `use_cache`: keys and values of a pass would be stored, and layers not be compiled."""
    model = tiny_model("qwen3_5")
    model.config.get_text_config().pad_token_id = 0
    found = how_recorded(model, 64, training=True)
    assert found.why_not is None
    assert found.compilable


def ibert() -> Any:
    config = transformers.IBertConfig(
        **SMALL, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    return transformers.IBertForSequenceClassification(config)


def test_masks_that_are_left_out_of_full_rows_alone_are_a_decision() -> None:
    """A layer that was compiled without one would be compiled anew in the midst of a capture."""
    assert how_recorded(FAMILIES["bert"].model(), 64, training=True) == Recording(with_decisions=True)
    assert how_recorded(tiny_model("mra"), 64, training=True) == Recording()


@pytest.mark.slow
def test_code_that_replaces_buffers_can_with_decisions_which_keep_them_in_place() -> None:
    model = ibert()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert how_recorded(model, 64, training=True) == Recording(with_decisions=True, compilable=False)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model = tiny_model("mra")
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_hook(lambda module, *_: setattr(module, "seen", module.seen + 1))
    assert how_recorded(model, 64, training=True) == Recording(with_decisions=True)


def test_code_that_decides_otherwise_in_other_batches_cannot() -> None:
    config = transformers.FlaubertConfig(**SMALL, emb_dim=16, n_layers=2, n_heads=4)
    why_not = how_recorded(transformers.FlaubertForSequenceClassification(config), 64, training=True).why_not
    assert why_not is not None
    assert "and finds others in other batches" in why_not


def test_layers_that_are_left_out_at_random_cannot_where_they_are() -> None:
    model = FAMILIES["bert"].model()
    model.bert.encoder.layerdrop = 0.1
    assert how_recorded(model, 64, training=True).why_not == "the host draws which layers are left out (layerdrop 0.1)"
    assert how_recorded(model, 64, training=False).why_not is None


@pytest.mark.parametrize("draw", [lambda: np.random.permutation(4), random.random, lambda: torch.rand([]) < 0.5])
def test_what_draws_on_the_host_cannot(draw: Callable[[], Any]) -> None:
    model = FAMILIES["bert"].model()
    model.bert.encoder.layer[0].register_forward_hook(lambda *given: [draw(), given[2]][1])
    assert how_recorded(model, 64, training=True).why_not == "the host draws random numbers in each pass"


def test_what_draws_on_the_device_can() -> None:
    """A graph draws anew at each replay."""
    model = FAMILIES["bert"].model()
    model.bert.encoder.layer[0].register_forward_hook(lambda *given: given[2] + torch.rand_like(given[2]))
    assert how_recorded(model, 64, training=True) == Recording(with_decisions=True)
