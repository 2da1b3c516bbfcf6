"""Models and texts of the benchmarks: shapes with random weights, and corpora from Python packages."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Configurations by size; what is not named has its class's default, which for BERT and ModernBERT is their base model.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "minilm": (
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "base": ("BertConfig", {}),
    "large": (
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "modernbert": (
        "ModernBertConfig",
        {"pad_token_id": 0, "cls_token_id": 101, "sep_token_id": 102, "bos_token_id": None, "eos_token_id": None},
    ),
}
_SMOKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,  # in so few channels less is lost in rounding
}


def max_length(smoke: bool) -> int:
    """Longest sequence of all sides, in tokens."""
    return 48 if smoke else 512


def load_tokenizer(folder: str | None, *, smoke: bool) -> Any:
    """A BERT tokenizer: of this folder, or that of the packaged MiniLM-L6."""
    from transformers import AutoTokenizer

    from brimful.data.readers.packaged import minilm

    return AutoTokenizer.from_pretrained(folder or str(minilm()), model_max_length=max_length(smoke))


def save_model(folder: Path, size: str, tokenizer: Any, make: Callable[[Any], Any], *, smoke: bool) -> None:
    """Saves make(config) of a shape, with its tokenizer, as one downloads it. Its weights are random, seed 0."""
    import torch
    import transformers

    config_class, settings = SIZES[size]
    config = getattr(transformers, config_class)(
        vocab_size=len(tokenizer), **settings | (_SMOKE if smoke else {}), architectures=None
    )
    torch.manual_seed(0)
    if config_class == "ModernBertConfig":  # its tokenizers give no token types
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    else:
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    make(config).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        temporary.rename(folder)
    except OSError:  # another script has made it meanwhile
        shutil.rmtree(temporary)


def packaged_rows(corpus: str) -> list[dict[str, str]]:
    """`text` and `label` of the tweets or of BBC News, no text twice."""
    from brimful.data.readers.packaged import bbc_news, tweets

    rows = {"tweets": tweets, "bbc": bbc_news}[corpus]()
    return list({row["text"]: row for row in reversed(rows)}.values())[::-1]
