"""Families whose own modules are told of a packed row, on a GPU: admitted in every precision with the kernel that would
be chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from brimful.models.packed.equivalence import check_equivalence

pytestmark = pytest.mark.gpu

_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
_GPT = {"n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 3, "eos_token_id": 4}
_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "eos_token_id": 4}
_BART = {
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 256),
    "d_model": 128,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "decoder_start_token_id": 4,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "big_bird": _BERT,
    "bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4},
    "eurobert": _BERT,
    "falcon": _BERT,
    "gpt_neo": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    | {"window_size": 16},
    "gptj": _GPT | {"rotary_dim": 16},
    "mbart": _BART,
    "mobilebert": _BERT | {"intra_bottleneck_size": 128, "embedding_size": 64},
    "mpt": {"d_model": 128, "n_layers": 2, "n_heads": 4},
    "nemotron": _BERT | {"num_key_value_heads": 2},
    "rembert": _BERT | {"input_embedding_size": 64},
    "roformer": _BERT | {"embedding_size": 128},
    "t5": _T5 | {"decoder_start_token_id": 0},
    "xlm": {"emb_dim": 128, "n_layers": 2, "n_heads": 4},
}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_admitted(family: str, precision: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=1000, num_labels=3, pad_token_id=0, **_FAMILIES[family])
    model = AutoModelForSequenceClassification.from_config(config)
    found = check_equivalence(model, max_length=128, device=torch.device("cuda"), precision=precision, cache=False)
    print(f"{family:12} {precision}: {found}")
    assert found.packed, found.reason
