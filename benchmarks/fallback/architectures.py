"""Architectures of classifiers, and the files that both sides read: models of random weights, and texts."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: By model type: settings beside its configuration's own, which for most is a base model. The first were not packed
#: when this was written, the others were: what runs packed is found out when it is measured.
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_BART = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
_BART |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
_DECODER = {**_BASE, "num_key_value_heads": 4, "head_dim": 64}
#: Of decoders with experts or with states, which transformers runs token by token where their own kernels are missing.
_MIXED = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
_MIXED |= {"intermediate_size": 1024}
_EXPERTS = {"num_experts_per_tok": 2}
_HYBRID = {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"] * 2}
_HYBRID |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
_HYBRID |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_INNER_MIXED = _MIXED | {"head_dim": 64, "vocab_size": 30522}
#: Towers of images, which a classifier of texts has and never runs.
_SIGHT = {"hidden_size": 64, "intermediate_size": 64}
UNPACKED: dict[str, dict[str, Any]] = {
    "big_bird": {},
    "t5": {},
    "longformer": {},
    "xlnet": {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072},
    "bart": _BART,
    "fnet": {},
    "convbert": {},
    "nystromformer": {},
    "roformer": {},
    "funnel": {},
    "megatron-bert": _BASE,
    "openai-gpt": {},
    "bloom": {"hidden_size": 768, "n_layer": 12, "n_head": 12},
    "layoutlm": {},
    "squeezebert": {},
    "mobilebert": {},
    "flaubert": {"emb_dim": 768, "n_layers": 12, "n_heads": 12},
    "mvp": _BART,
    "lilt": {},
    "layoutlmv3": {},
    "ibert": {},
    "tapas": {},
    "canine": {},
    "bigbird_pegasus": _BART,
    "doge": _DECODER,
    "gpt_oss": _MIXED | _EXPERTS | {"head_dim": 64, "num_local_experts": 4},
    "phimoe": _MIXED | _EXPERTS | {"num_local_experts": 4},
    "qwen3_5_text": _MIXED | _HYBRID,
    "qwen3_next": _MIXED
    | _HYBRID
    | _EXPERTS
    | {"num_experts": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "t5gemma": {"encoder": _INNER_MIXED, "decoder": _INNER_MIXED | {"cross_attention_hidden_size": 512}},
    "t5gemma2": {
        "encoder": {
            "text_config": _INNER_MIXED,
            "vision_config": _SIGHT | {"num_hidden_layers": 1, "num_attention_heads": 1},
        },
        "decoder": _INNER_MIXED,
    },
    "qwen3_5": {
        "text_config": _INNER_MIXED | _HYBRID | {"pad_token_id": 0},
        "vision_config": _SIGHT | {"depth": 1, "num_heads": 1, "out_hidden_size": 512},
    },
    "axk2": _MIXED
    | _EXPERTS
    | {"num_key_value_heads": 8, "n_routed_experts": 4, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
    | {"index_head_dim": 64, "index_n_heads": 4},
    "minimax": _MIXED | _EXPERTS | {"head_dim": 64, "num_local_experts": 4},
    "jamba": _MIXED | _EXPERTS | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": _MIXED | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": _MIXED | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 16},
    "yoso": {},
    "mra": {},
}
PACKED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("bert", "roberta", "distilbert", "electra", "albert", "modernbert", "mpnet", "gpt2")},
    **{kind: {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]} for kind in ("deberta", "deberta-v2")},
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma2"), _DECODER),
    "qwen3_moe": _MIXED | _EXPERTS | {"head_dim": 64, "num_experts": 4, "moe_intermediate_size": 256},
}
ARCHITECTURES = UNPACKED | PACKED
#: Of those that cannot run in bf16 on a GPU: FNet's transform has no half precision there, and YOSO's own backward pass
#: meets fp32 and bf16.
PRECISIONS = {"fnet": "tf32", "yoso": "tf32"}
#: Of those that transformers runs token by token where torch does not compile it: a step takes a second.
SLOW = ("zamba", "zamba2", "jamba")
SHAPES = ("short", "mixed", "dense")
SIZES = ("base", "small", "smoke")
#: Width, layers, heads and inner width of sizes below base; 0 keeps a configuration's own.
_SCALES = {"small": (256, 4, 4, 1024), "smoke": (32, 2, 2, 64)}
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_DEPTHS += ("num_decoder_layers",)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_HEADS += ("num_key_value_heads",)
_INNER = ("intermediate_size", "d_ff", "d_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim")
_ROWS = {"base": 2048, "small": 768, "smoke": 96}
_POSITIONS = 520
_LONGEST = {"base": 512, "small": 96, "smoke": 48}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row of the table: model type, its size, and the lengths of its texts.

    short: 8 to 32 tokens, 20 in the mean. mixed: 8 to the longest, most of them short. dense: as long as the longest in
    every row, 512 tokens of base models.
    """

    model: str
    shape: str
    scale: str
    batch_size: int = 32

    @property
    def name(self) -> str:
        """Of the row."""
        return f"{self.model}/{self.shape}"

    @property
    def size(self) -> str:
        """Folder of the model."""
        return f"{self.model}-{self.scale}"

    @property
    def texts(self) -> str:
        """File of the texts."""
        return f"{self.shape}-{self.scale}"


def make_inputs(inputs: Path, work: Work, tokenizer: Any) -> None:
    """Writes what the work needs and `inputs` does not have yet."""
    inputs.mkdir(parents=True, exist_ok=True)
    if not (inputs / work.size).exists():
        _save(inputs / work.size, work, tokenizer)
    file = inputs / f"{work.texts}.jsonl"
    if not file.exists():
        text = "".join(json.dumps(row) + "\n" for row in _rows(work, tokenizer))
        temporary = file.with_suffix(f".{os.getpid()}.tmp")  # another process may write the same
        temporary.write_text(text, "utf-8")
        temporary.replace(file)


def _save(folder: Path, work: Work, tokenizer: Any) -> None:
    """A classifier of random weights, with a BERT tokenizer, whatever its own is: only ids reach the model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(_config(work, tokenizer))
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"  # Trainer sets the configuration's to these
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    file = temporary / "tokenizer_config.json"
    given = json.loads(file.read_text("utf-8")) | {"model_input_names": ["input_ids", "attention_mask"]}
    file.write_text(json.dumps(given), "utf-8")
    temporary.replace(folder)


def _config(work: Work, tokenizer: Any) -> Any:
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[work.model]
    known = kind().to_dict()
    settings = dict(ARCHITECTURES[work.model])
    if work.scale != "base":
        for names, value in zip((_WIDTHS, _DEPTHS, _HEADS, _INNER), _SCALES[work.scale], strict=True):
            settings |= {name: value for name in names if isinstance(known.get(name), int)}
        settings |= _odd(work)
    special = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102, "sep_token_id": 102, "cls_token_id": 101}
    if known.get("is_encoder_decoder") or work.model == "t5":
        special["decoder_start_token_id"] = 0
    if isinstance(known.get("max_position_embeddings"), int):  # RoBERTa and its kin begin to count behind the padding
        settings["max_position_embeddings"] = max(known["max_position_embeddings"], _POSITIONS)
    return kind(**settings, vocab_size=len(tokenizer), num_labels=4, **special)


def _odd(work: Work) -> dict[str, Any]:
    """Sizes that go together in one family only."""
    width, depth, heads, _ = _SCALES[work.scale]
    if work.model == "funnel":
        return {"block_sizes": [depth // 2, depth // 2], "d_head": width // heads, "num_decoder_layers": 2}
    if work.model == "mobilebert":
        return {"intra_bottleneck_size": width, "true_hidden_size": width}
    if work.model == "lilt":  # its boxes have six parts of the width, and a quarter of it
        return {"hidden_size": width // 24 * 24}
    if work.model == "layoutlmv3":
        return {"coordinate_size": width // 6, "shape_size": (width - 4 * (width // 6)) // 2}
    return {"d_kv": width // heads, "head_dim": width // heads} if work.model in ("t5", *_HEAD_DIMS) else {}


_HEAD_DIMS = ("llama", "mistral", "qwen3", "gemma2")


def _rows(work: Work, tokenizer: Any) -> list[dict[str, str]]:
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower())
    source = random.Random(0)

    def num_words() -> int:
        if work.shape == "dense":
            return _LONGEST[work.scale] - 2  # and two special tokens
        if work.shape == "short":
            return source.randint(6, 30)
        return max(6, min(_LONGEST[work.scale] - 2, round(source.lognormvariate(4.0, 0.9))))

    return [
        {"text": " ".join(source.choices(words, k=num_words())), "label": source.choice("abcd")}
        for _ in range(_ROWS[work.scale])
    ]
