"""Files of a user: tiny classifiers with a tokenizer in Hugging Face form, and rows in a CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast

from tiny import FAMILIES

GOOD = ["good", "great", "lovely", "fine", "superb"]
BAD = ["bad", "awful", "dull", "poor", "sad"]
OTHER = ["the", "film", "was", "a", "story", "of", "two", "friends", "and", "it", "felt", "very", "long", "."]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def save_tokenizer(folder: Path, *, bare: bool = False) -> None:
    """A tokenizer of a few words. bare: it adds no special tokens, and drops what is not ASCII."""
    vocabulary = {word: index for index, word in enumerate(_SPECIAL + GOOD + BAD + OTHER)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bare:
        tokenizer.normalizer = normalizers.Replace(Regex(r"[^\x00-\x7f]"), "")
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def save_classifier(folder: Path, labels: Sequence[str], family: str = "bert", *, seed: int = 0, **config: Any) -> Path:
    """A classifier of `family` with outputs of these names, drawn from `seed`; its folder."""
    model = FAMILIES[family].model(len(labels), seed=seed)
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: index for index, label in enumerate(labels)}
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_base(folder: Path, family: str = "bert") -> Path:
    """A model of `family` without a head; its folder."""
    AutoModel.from_config(FAMILIES[family].model(2).config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def review(good: bool, number: int) -> str:
    """A short text that is plainly good or bad, and another one for each number below 500."""
    words = GOOD if good else BAD
    first, second = OTHER[number % len(OTHER)], OTHER[number // len(OTHER) % len(OTHER)]
    return f"the film was {words[number % 5]} and the {first} {second} felt {words[number // 5 % 5]} ."


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """A CSV of these rows; its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def write_reviews(path: Path, count: int = 24, labels: tuple[str, str] = ("bad", "good")) -> Path:
    """A CSV with `text` and `label`, half of the rows of each label; its path."""
    return write_csv(path, ("text", "label"), ((review(bool(i % 2), i), labels[i % 2]) for i in range(count)))
