"""A tiny classifier of every model type that transformers can build one of, with a tokenizer: nothing is downloaded.

Sizes are set by the names that configurations share; `SPECIAL` has what a type needs besides. Special tokens keep the
numbers that the configuration gives them where those are small.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from brimful.models.packed.packed_forward import has_token_types

#: Every model type that `AutoModelForSequenceClassification` knows.
MODEL_TYPES = tuple(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
VOCABULARY = 160
LABELS = ("bad", "fine", "good")
WORDS = [
    *("good", "great", "lovely", "fine", "superb", "bad", "awful", "dull", "poor", "sad", "the", "film", "was", "a"),
    *("story", "of", "two", "friends", "and", "it", "felt", "very", "long", "short", "to", "me", "you", "."),
]
#: Fields that make a forward pass random.
_RANDOM = re.compile("drop|jitter")

#: Sizes by the names of configurations' fields.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim", "embed_dim"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "depth"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "d_head", "kv_channels"], 8),
    **dict.fromkeys(["intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "d_inner"], 48),
    **dict.fromkeys(["dff", "hidden_dim", "n_inner", "ffn_hidden_size", "feed_forward_size"], 48),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 128),
    **dict.fromkeys(["embedding_size", "input_embedding_size", "output_embedding_size"], 16),
    **dict.fromkeys(["sliding_window", "local_attention", "window_size", "attention_window"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"], 1),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **dict.fromkeys(["mamba_d_state", "mamba_dt_rank", "gated_norm_rank", "adapter_rank"], 4),
    **dict.fromkeys(["pooler_hidden_size", "prediction_head_size"], 32),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["initializer_range", "init_std"], 0.2),
}
#: Special tokens that a configuration numbers beyond the vocabulary here, or not at all.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_MLA = {"qk_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8}
_T5 = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
_HEAD = {"head_dim": 8}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_THETA = {"rope_theta": 10000.0}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
#: What a type needs besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "axk2": _MLA | {"num_hidden_layers": 3, "index_topk": 16, "index_head_dim": 8, "index_n_heads": 2},
    "big_bird": {"sep_token_id": 4, "cls_token_id": 5},
    "canine": {"num_hash_buckets": 256, "downsampling_rate": 4, "local_transformer_stride": 16},
    "cohere_compass_text": {
        **_SLIDING,
        "rope_parameters": {kind: {"rope_type": "default"} | _THETA for kind in _SLIDING["layer_types"]},
    },
    "deepseek_v2": _MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": 4},
    "exaone4": {"num_hidden_layers": 4},
    "funnel": {"block_sizes": [1, 1, 1]},
    "gemma3_text": _SLIDING,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlm": {"max_2d_position_embeddings": 64},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 20,
        "max_xpath_subs_unit_embeddings": 20,
        "tag_pad_id": 19,
        "subs_pad_id": 19,
        "xpath_unit_hidden_size": 4,
    },
    "minicpm3": _MLA,
    "ministral": _HEAD | _SLIDING,
    "mistral4": _MLA | {"head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16, "embedding_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {
        "vocab_size": VOCABULARY,
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 40,
        "shape_vocab_size": 40,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "squeezebert": {"embedding_size": 32},
    "t5": _T5,
    "umt5": _T5,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 16,
    },
}
#: The same of a configuration within another.
_SPECIAL_INNER: dict[str, dict[str, Any]] = {"qwen3_5_text": _HYBRID, "gemma3_text": _SLIDING}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of this type with all sizes made small."""
    kind = CONFIG_MAPPING[model_type]
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    config: PreTrainedConfig = kind(**_sized(kind()) | SPECIAL.get(model_type, {}) | labels)
    return config


def _sized(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments that make a configuration of the same class, and those within it, small."""
    known = config.to_dict()
    given = {name: size for name, size in _SIZES.items() if known.get(name) is not None}
    for name, number in _TOKENS.items():
        if isinstance(known.get(name), int | list) and not _small(known[name]):
            given[name] = number
    for name in type(config).sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            given[name] = {"model_type": inner.model_type} | _sized(inner) | _SPECIAL_INNER.get(inner.model_type, {})
    return given


def _small(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < VOCABULARY // 2


def tiny_model(model_type: str, *, seed: int = 0) -> Any:
    """A fresh classifier in fp32 in eval mode, without dropout, whose parameters are all alive."""
    config = tiny_config(model_type)
    for part in (config, *(getattr(config, name) for name in type(config).sub_configs)):
        for name, value in list(vars(part).items()) if isinstance(part, PreTrainedConfig) else []:
            if isinstance(value, float) and _RANDOM.search(name):
                setattr(part, name, 0.0)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zeros, gates of ones, and what is left as it was in memory
            if not torch.isfinite(parameter).all() or parameter.unique().numel() == 1:
                parameter.normal_(float(parameter.flatten()[0] == 1), 0.1)
    return model


def save_head(folder: Path, model_type: str, *, seed: int = 0) -> Path:
    """The classifier and a tokenizer with its special tokens, in `folder`; without weights where transformers lacks a
    package to build it with."""
    try:
        model = tiny_model(model_type, seed=seed)
        model.save_pretrained(folder)
    except ImportError:
        tiny_config(model_type).save_pretrained(folder)
        save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder, tiny_config(model_type))
    return folder


def has_weights(folder: Path) -> bool:
    """False for a folder that `save_head` could not write weights into."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return "nothing" not in file.keys()  # noqa: SIM118  (it is not a mapping)


def save_tokenizer(folder: Path, config: PreTrainedConfig) -> None:
    """A fast tokenizer of a few words, framed by the model's own special tokens, with token types if the model has any.

    A model that names no padding token has a tokenizer without one. Texts end in no token that is padding too.
    """
    text = config.get_text_config()
    given = {name: getattr(text, name, getattr(config, name, None)) for name in _TOKENS}
    numbers = {name: number for name, number in given.items() if isinstance(number, int)}
    free = iter(sorted(set(range(VOCABULARY)) - set(numbers.values())))
    start = numbers.get("cls_token_id", numbers.get("bos_token_id"))
    end = numbers.get("sep_token_id", numbers.get("eos_token_id"))
    if start is None and end is None:
        start, end = next(free), next(free)
    padding = numbers.get("pad_token_id")
    vocabulary = {f"<{number}>": number for number in {*numbers.values(), start, end} - {None}}
    vocabulary |= {word: next(free) for word in ["<unk>", *WORDS]}
    before = "" if start in (None, padding) else f"<{start}> "
    after = "" if end in (None, padding) else f" <{end}>"
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} $B:1{after and after + ':1'}",
        special_tokens=[(f"<{number}>", number) for number in {start, end} - {None}],
    )
    last = start if padding is None and end is None else end
    named = {"pad_token": padding, "eos_token": last}
    types = ["token_type_ids"] if has_token_types(config) else []
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        model_input_names=["input_ids", *types, "attention_mask"],
        **{name: f"<{number}>" for name, number in named.items() if number is not None},
    ).save_pretrained(folder)
