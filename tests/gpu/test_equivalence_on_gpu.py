"""The equivalence check on a GPU: every listed family is admitted in every precision, with the kernel that would be
chosen, and no wrong kernel is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from brimful.models.packed import packed_forward
from brimful.models.packed.equivalence import check_equivalence
from wrong_attention import WRONG

pytestmark = pytest.mark.gpu

_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "num_labels": 3,
    "pad_token_id": 0,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "distilbert": {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256},
    "electra": {"embedding_size": 64},
    "albert": {"embedding_size": 64},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 64,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "mpnet": {"pad_token_id": 1},
    "modernbert": {"local_attention": 16, "num_hidden_layers": 4, "cls_token_id": 2, "sep_token_id": 3},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16, "attn_logit_softcapping": 50.0},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16, "num_hidden_layers": 7},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_admitted(family: str, precision: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SMALL, **_FAMILIES[family]})
    model = AutoModelForSequenceClassification.from_config(config)
    equivalence = check_equivalence(
        model, max_length=128, device=torch.device("cuda"), precision=precision, cache=False
    )
    print(f"{family:12} {precision}: {equivalence}")
    assert equivalence.packed, equivalence.reason


@pytest.mark.parametrize("typical_length", [30, 700], ids=["our attention", "torch's"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, typical_length: int
) -> None:
    """As initialised: scores are all alike, and half precision loses more than what is wrong."""
    change, family = WRONG[name]
    choose = packed_forward.choose_attention
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *given: change(choose(*given)))
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SMALL, **_FAMILIES[family]})
    model = AutoModelForSequenceClassification.from_config(config)
    found = check_equivalence(
        model,
        max_length=128,
        device=torch.device("cuda"),
        precision=precision,
        typical_length=typical_length,
        cache=False,
    )
    print(f"{name:36} {precision}: {found.reason}")
    assert not found.packed
