"""Small classifiers of many families with heads of 64, as kernels want them, and without dropout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from plain import padded
from tiny import FAMILIES
from tiny_files import save_tokenizer

_WIDE = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "max_position_embeddings": 300}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": _WIDE | {"num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.1},
    "gpt2": {"n_embd": 128, "n_head": 2, "n_positions": 300},
}


def save_sized_classifier(folder: Path, family: str, labels: Sequence[str], **config: Any) -> Path:
    """A classifier of `family` with its tokenizer; its folder."""
    model = FAMILIES[family].model(len(labels), **_SIZES.get(family, _WIDE) | config)
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: index for index, label in enumerate(labels)}
    model.save_pretrained(folder)
    save_tokenizer(folder)
    if not _has_types(model.config):  # pipelines hand on whatever the tokenizer gives
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["model_input_names"] = ["input_ids", "attention_mask"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _has_types(config: Any) -> bool:
    return (getattr(config, "type_vocab_size", 0) or 0) > 1 or config.model_type == "gpt2"


def plain_classifier(folder: Path, device: str) -> Any:
    """The model as transformers loads it, with eager attention in fp32."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.to(device)


def plain_inputs(folder: Path, model: Any, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, Any]:
    """Padded tensors on the model's device, padded with its own token."""
    tokens = AutoTokenizer.from_pretrained(folder)(list(texts), None if pairs is None else list(pairs))
    ids = [np.array(row) for row in tokens["input_ids"]]
    types = [np.array(row) for row in tokens["token_type_ids"]] if _has_types(model.config) else None
    found = padded(ids, types, model.config.pad_token_id)
    return {name: tensor.to(model.device) for name, tensor in found.items()}
