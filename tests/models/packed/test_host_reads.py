"""Models whose padded passes cannot be recorded: the host looks at numbers of the device, or draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from brimful.models.packed.host_reads import why_not_recorded
from tiny import FAMILIES

SMALL = {"vocab_size": 99, "num_labels": 3, "pad_token_id": 0, "eos_token_id": 2}


def t5() -> Any:
    config = transformers.T5Config(
        **SMALL, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForSequenceClassification(config)


def big_bird() -> Any:
    config = transformers.BigBirdConfig(
        **SMALL, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    return transformers.BigBirdForSequenceClassification(config)


@pytest.mark.parametrize("training", [False, True])
def test_models_without_such_code_can_be_recorded(training: bool) -> None:
    for model in (FAMILIES["bert"].model(), FAMILIES["gpt2"].model(), big_bird()):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert why_not_recorded(model, 64, training=training) is None
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_head_that_looks_for_end_tokens_cannot() -> None:
    why = why_not_recorded(t5(), 64, training=True)
    assert why is not None
    assert "the host must look at numbers of the device in each pass" in why


def test_layers_that_are_left_out_at_random_cannot_where_they_are() -> None:
    model = FAMILIES["bert"].model()
    model.bert.encoder.layerdrop = 0.1
    assert why_not_recorded(model, 64, training=True) == "the host draws which layers are left out (layerdrop 0.1)"
    assert why_not_recorded(model, 64, training=False) is None


def test_what_draws_on_the_host_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["bert"].model()
    forward = type(model.bert).forward

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        np.random.permutation(4)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.bert), "forward", drawing)
    assert why_not_recorded(model, 64, training=True) == "the host draws random numbers in each pass"
