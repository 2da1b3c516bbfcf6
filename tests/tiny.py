"""Tiny classifiers of real families, built from their configurations: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from brimful.models.packed.packed_forward import PackedForm, Pooling

VOCABULARY = 99
#: Longest sequence that every family here takes: more than any of their windows.
LONGEST = 64

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 80,
}
_END = {"bos_token_id": 3, "eos_token_id": 4}
_ROPE = _SIZES | {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0} | _END
_ENCODER = _SIZES | {"pad_token_id": 0, "initializer_range": 0.2}
_ROBERTA = _SIZES | {"pad_token_id": 1, "type_vocab_size": 1, "initializer_range": 0.2}
_MODERN = _ENCODER | _END | {"cls_token_id": 3, "sep_token_id": 4, "local_attention": 16, "num_hidden_layers": 4}
_GEMMA = _ROPE | {"sliding_window": 16, "query_pre_attn_scalar": 4}
_DEBERTA = _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
_GEMMA3 = _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family, its tiny configuration, and how it is expected to run packed.

    partly_fp32: it computes rotary angles or norms in fp32 whatever the dtype of the model is.
    short: the end of its last layer can be given pooled tokens alone. skips_padding: positions leave out padding tokens
    that a text holds.
    """

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    pooling: Pooling = "first"
    first_position: int = 0
    partly_fp32: bool = False
    short: bool = False
    skips_padding: bool = False

    @property
    def form(self) -> PackedForm:
        """The form that it runs packed in."""
        return PackedForm(
            pooling=self.pooling,
            first_position=self.first_position,
            short=self.short,
            skips_padding=self.skips_padding,
        )

    def ended(self, ids: list[np.ndarray]) -> list[np.ndarray]:
        """The sequences with an end token each, where heads look for one: in encoder-decoders."""
        if "decoder_start_token_id" not in self.settings:
            return ids
        return [np.append(sequence[:-1], self.settings["eos_token_id"]).astype(np.int32) for sequence in ids]

    def model(self, num_labels: int = 3, *, seed: int = 0, dropout: float = 0.0, **settings: Any) -> Any:
        """A fresh model in fp32, with every dropout at `dropout`."""
        config = self.configuration(num_labels, **settings)
        for name in vars(config):
            if "dropout" in name or name.endswith(("pdrop", "_drop")):
                setattr(config, name, dropout)
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config)

    def configuration(self, num_labels: int = 3, **settings: Any) -> Any:
        """The configuration of a model."""
        return getattr(transformers, self.config)(**self.settings | settings, num_labels=num_labels)


_BART = {
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "max_position_embeddings": 80,
    "decoder_start_token_id": 4,
    "pad_token_id": 0,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "init_std": 0.2,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
    "pad_token_id": 0,
    "eos_token_id": 4,
    "decoder_start_token_id": 0,
}
_OPENAI = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 80, "pad_token_id": 0}

FAMILIES = {
    "bert": Family(config="BertConfig", settings=_ENCODER, short=True),
    "roberta": Family(config="RobertaConfig", settings=_ROBERTA, first_position=2, skips_padding=True, short=True),
    "xlm-roberta": Family(
        config="XLMRobertaConfig", settings=_ROBERTA, first_position=2, skips_padding=True, short=True
    ),
    "distilbert": Family(
        config="DistilBertConfig",
        settings={
            "vocab_size": VOCABULARY,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 24,
            "max_position_embeddings": 80,
            "initializer_range": 0.2,
        },
    ),
    "electra": Family(config="ElectraConfig", settings=_ENCODER | {"embedding_size": 8}, short=True),
    "albert": Family(config="AlbertConfig", settings=_ENCODER | {"embedding_size": 8}),
    "modernbert": Family(config="ModernBertConfig", settings=_MODERN, short=True, partly_fp32=True),
    "modernbert-mean": Family(
        config="ModernBertConfig", settings=_MODERN | {"classifier_pooling": "mean"}, pooling="mean", partly_fp32=True
    ),
    "deberta": Family(
        config="DebertaConfig", settings=_DEBERTA | {"max_relative_positions": 24}, partly_fp32=True, short=True
    ),  # distances beyond 24 are one
    "deberta-v2": Family(
        config="DebertaV2Config",
        settings=_DEBERTA | {"share_att_key": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
        short=True,
    ),  # as DeBERTa-v3: buckets that grow with the distance
    "deberta-v2-convolution": Family(
        config="DebertaV2Config",
        settings=_DEBERTA | {"position_biased_input": True, "conv_kernel_size": 3, "conv_act": "gelu"},
        short=True,
    ),
    "mpnet": Family(
        config="MPNetConfig", settings=_ENCODER | {"pad_token_id": 1}, first_position=2, skips_padding=True
    ),
    "rembert": Family(config="RemBertConfig", settings=_ENCODER | {"input_embedding_size": 8}, short=True),
    "big_bird": Family(config="BigBirdConfig", settings=_ENCODER, short=True),
    "roformer": Family(config="RoFormerConfig", settings=_ENCODER | {"embedding_size": 16}, short=True),
    "mobilebert": Family(
        config="MobileBertConfig",
        settings=_ENCODER | {"embedding_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 1},
    ),
    "luke": Family(
        config="LukeConfig",
        settings=_ROBERTA | {"entity_vocab_size": 9, "entity_emb_size": 8},
        first_position=2,
        short=True,
        skips_padding=True,
    ),
    "squeezebert": Family(config="SqueezeBertConfig", settings=_ENCODER | {"embedding_size": 16}),
    "xlm": Family(
        config="XLMConfig",
        settings={"vocab_size": VOCABULARY, "emb_dim": 16, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 80}
        | {"pad_index": 0, "pad_token_id": 0, "embed_init_std": 0.2, "init_std": 0.2},
        partly_fp32=True,
    ),
    "eurobert": Family(config="EuroBertConfig", settings=_ROPE, pooling="late", partly_fp32=True),
    "bart": Family(config="BartConfig", settings=_BART, pooling="last"),
    "mbart": Family(config="MBartConfig", settings=_BART, pooling="last"),
    "t5": Family(config="T5Config", settings=_T5, pooling="last", partly_fp32=True),
    "umt5": Family(config="UMT5Config", settings=_T5, pooling="last", partly_fp32=True),
    "llama": Family(config="LlamaConfig", settings=_ROPE, pooling="last", short=True, partly_fp32=True),
    "mistral": Family(
        config="MistralConfig", settings=_ROPE | {"sliding_window": 16}, pooling="last", short=True, partly_fp32=True
    ),
    "qwen2": Family(config="Qwen2Config", settings=_ROPE, pooling="last", short=True, partly_fp32=True),
    "qwen3": Family(config="Qwen3Config", settings=_ROPE, pooling="last", short=True, partly_fp32=True),
    "gemma2": Family(
        config="Gemma2Config",
        settings=_GEMMA | {"attn_logit_softcapping": 2.0},
        pooling="last",
        short=True,
        partly_fp32=True,
    ),
    "gemma3": Family(config="Gemma3TextConfig", settings=_GEMMA3, pooling="last", short=True, partly_fp32=True),
    "bloom": Family(
        config="BloomConfig",
        settings={"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4, "pad_token_id": 0} | _END,
        pooling="last",
        short=True,
        partly_fp32=True,
    ),
    "mpt": Family(
        config="MptConfig",
        settings={"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 4, "pad_token_id": 0} | _END,
        pooling="last",
        short=True,
        partly_fp32=True,
    ),
    "falcon": Family(config="FalconConfig", settings=_ENCODER | _END, pooling="last", partly_fp32=True),
    "gpt_neo": Family(
        config="GPTNeoConfig",
        settings={"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 16}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 80, "pad_token_id": 0}
        | _END,
        pooling="last",
        partly_fp32=True,
    ),
    "gptj": Family(config="GPTJConfig", settings=_OPENAI | _END | {"rotary_dim": 2}, pooling="last", partly_fp32=True),
    "openai-gpt": Family(config="OpenAIGPTConfig", settings=_OPENAI, pooling="last"),
    "nemotron": Family(config="NemotronConfig", settings=_ROPE, pooling="last", short=True, partly_fp32=True),
    "gpt2": Family(
        config="GPT2Config",
        settings={
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 80,
            "pad_token_id": 0,
            "initializer_range": 0.2,
        }
        | _END,
        pooling="last",
    ),
}


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Random token ids of these lengths, without special ones."""
    random = np.random.default_rng(seed)
    return [random.integers(5, VOCABULARY, size=length).astype(np.int32) for length in lengths]


def pair_types(ids: list[np.ndarray]) -> list[np.ndarray]:
    """Token types of text pairs whose second text begins in the middle."""
    return [(np.arange(len(i)) >= len(i) // 2).astype(np.uint8) for i in ids]
