"""Rows of the table by name, their texts, and the models that all sides read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SIZES, load_tokenizer, max_length, packaged_rows, save_model

#: tweets and bbc: one text a row. pairs: a tweet and another one. zeroshot: a tweet and ten candidate labels.
TASKS = ("tweets", "bbc", "pairs", "zeroshot")
#: What matters most comes first: a call with a budget begins there.
TABLE = (
    *("tweets/base", "bbc/base", "tweets/minilm", "zeroshot/base", "parquet/tweets/minilm", "tweets/large"),
    *("pairs/base", "tweets/modernbert", "parquet/tweets/base", "parquet/bbc/base", "bbc/minilm", "bbc/large"),
    *("bbc/modernbert", "pairs/minilm"),
)
#: What is measured on a CPU unless told.
CPU_TABLE = (
    *("tweets/minilm", "bbc/minilm", "parquet/tweets/minilm", "zeroshot/minilm", "pairs/minilm", "tweets/base"),
    "tweets/modernbert",
)
CANDIDATES = (
    *("sports", "politics", "business", "technology", "health"),
    *("music", "food", "travel", "the weather", "family and friends"),
)
TEMPLATE = "This example is {}."
_NLI = ("contradiction", "neutral", "entailment")
_SMOKE_ROWS = 96
#: Sequences, and tokens of each, that a random model's head is made to tell apart.
_HEAD_SEQUENCES, _HEAD_TOKENS = 64, 64
#: Of its first logit: rounding moves probabilities by less than what `classify` allows.
_LOGIT_STD = 0.25


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row: task and shape, whether texts come from a file and answers go to one, and whether ours is in fp8."""

    task: str
    size: str
    files: bool = False
    fp8: bool = False

    @classmethod
    def parse(cls, name: str) -> Work:
        """The work called `[parquet/]task/size[-fp8]`. Raises: ValueError if there is none of this name."""
        rest = name.removeprefix("parquet/")
        task, _, size = rest.removesuffix("-fp8").partition("/")
        found = cls(task=task, size=size, files=rest != name, fp8=name.endswith("-fp8"))
        if task not in TASKS or size not in SIZES or (found.files and found.task not in ("tweets", "bbc")):
            raise ValueError(
                f"{name!r} is no work: it is TASK/SIZE, {', '.join(TASKS)} / {', '.join(SIZES)}, with parquet/ before"
                " tweets or bbc for file to file, and -fp8 behind for brimful's products in fp8"
            )
        return found

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        return f"{'parquet/' if self.files else ''}{self.task}/{self.size}{'-fp8' if self.fp8 else ''}"

    @property
    def for_others(self) -> str:
        """The name of the row as other libraries see it, which have no fp8."""
        return replace(self, fp8=False).name

    @property
    def corpus(self) -> str:
        """Corpus of its texts."""
        return "bbc" if self.task == "bbc" else "tweets"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Labels that are asked about one at a time; none where the model has its own."""
        return CANDIDATES if self.task == "zeroshot" else ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """N texts, what they are paired with, and what they ask for: tokens of all their sequences, and operations, all of
    them and those that an answer cannot do without."""

    texts: list[str]
    pairs: list[str] | None
    tokens: int
    operations: float
    needed_operations: float


class Pool:
    """A corpus, of which any number of texts has the same mix of lengths.

    tokens_N, operations_N, needed_N: of all sequences of a text, in one forward pass.
    """

    def __init__(
        self, texts: list[str], pairs: list[str] | None, *,
        tokens_N: np.ndarray, operations_N: np.ndarray, needed_N: np.ndarray,
    ) -> None:  # fmt: skip
        self._texts, self._pairs = texts, pairs
        self._tokens_N, self._operations_N, self._needed_N = tokens_N, operations_N, needed_N
        self.mean_tokens, self.distinct = float(tokens_N.mean()), len(texts)
        self.sample = cache(self._sample)

    def _sample(self, number: int) -> Sample:
        rows = spread(self._tokens_N, number)
        return Sample(
            texts=[self._texts[i] for i in rows],
            pairs=None if self._pairs is None else [self._pairs[i] for i in rows],
            tokens=int(self._tokens_N[rows].sum()),
            operations=float(self._operations_N[rows].sum()),
            needed_operations=float(self._needed_N[rows].sum()),
        )


def spread(tokens_N: np.ndarray, number: int) -> np.ndarray:
    """(number,) rows in random order: each as often as all fit, the rest evenly spread over the order of lengths."""
    whole, rest = divmod(number, len(tokens_N))
    by_length = np.argsort(tokens_N, kind="stable")
    chosen = by_length[((np.arange(rest) + 0.5) * len(tokens_N) / max(1, rest)).astype(np.int64)]
    rows = np.concatenate([np.tile(np.arange(len(tokens_N)), whole), chosen])
    return np.random.default_rng(0).permutation(rows)


def texts_file(inputs: Path, work: Work) -> Path:
    """JSON with `texts` and `pairs`, null where there are none."""
    return inputs / f"{work.task}.json"


def lengths_file(inputs: Path, work: Work) -> Path:
    """.npy, (N, L): tokens of each text's sequences, one for each candidate label."""
    return inputs / f"{work.task}.lengths.npy"


def model_folder(inputs: Path, work: Work) -> Path:
    """A classifier as one downloads it, with its tokenizer."""
    return inputs / f"{work.task}-{work.size}"


def read_texts(inputs: Path, work: Work) -> tuple[list[str], list[str] | None]:
    """The corpus, and the second texts of its pairs."""
    found = json.loads(texts_file(inputs, work).read_text("utf-8"))
    return found["texts"], found["pairs"]


def make_inputs(inputs: Path, work: Work, tokenizer_folder: str | None, *, smoke: bool) -> None:
    """Writes what the work needs and `inputs` does not have yet."""
    if lengths_file(inputs, work).exists() and model_folder(inputs, work).exists():
        return
    inputs.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(tokenizer_folder, smoke=smoke)
    rows = packaged_rows(work.corpus)
    texts = [row["text"] for row in rows]
    pairs = random.Random(1).sample(texts, len(texts)) if work.task == "pairs" else None
    if not lengths_file(inputs, work).exists():
        _write_texts(inputs, work, texts, pairs, tokenizer, smoke=smoke)
    if not model_folder(inputs, work).exists():
        names = _NLI if work.candidates else tuple(sorted({row["label"] for row in rows}))
        encoded = _few_sequences(work, texts, pairs, tokenizer)
        make = partial(_classifier, names=names, encoded=encoded, each=len(work.candidates) or None)
        save_model(model_folder(inputs, work), work.size, tokenizer, make, smoke=smoke)


def _write_texts(
    inputs: Path, work: Work, texts: list[str], pairs: list[str] | None, tokenizer: Any, *, smoke: bool
) -> None:
    if smoke:
        texts, pairs = texts[:_SMOKE_ROWS], pairs and pairs[:_SMOKE_ROWS]
    longest = max_length(smoke)
    if work.candidates:
        special = tokenizer.num_special_tokens_to_add(pair=True)
        hypotheses = [TEMPLATE.format(label) for label in work.candidates]
        second_L = np.array([len(ids) for ids in tokenizer(hypotheses, add_special_tokens=False)["input_ids"]])
        first_N = np.array([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])
        lengths_NL = np.minimum(first_N[:, None] + second_L + special, longest)
    else:
        encoded = tokenizer(texts, pairs, truncation=True, max_length=longest)["input_ids"]
        lengths_NL = np.array([len(ids) for ids in encoded])[:, None]
    texts_file(inputs, work).write_text(json.dumps({"texts": texts, "pairs": pairs}), "utf-8")
    np.save(lengths_file(inputs, work), lengths_NL)


def _few_sequences(work: Work, texts: list[str], pairs: list[str] | None, tokenizer: Any) -> Any:
    """The beginnings of some texts, each with its pair or with all candidate labels, as a model reads them."""
    each = len(work.candidates) or 1
    rows = random.Random(0).sample(range(len(texts)), _HEAD_SEQUENCES // each)
    first = [texts[i] for i in rows for _ in range(each)]
    second = [TEMPLATE.format(label) for _ in rows for label in work.candidates] or (pairs and [pairs[i] for i in rows])
    return tokenizer(first, second, padding=True, truncation=True, max_length=_HEAD_TOKENS, return_tensors="pt")


def _classifier(config: Any, *, names: Sequence[str], encoded: Any, each: int | None) -> Any:
    """Random weights, but a head that looks where these sequences differ most: a random one gives all texts one label,
    by margins below rounding. each: sequences of a text, which are to differ among themselves; None for one."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    model = AutoModelForSequenceClassification.from_config(config).eval()
    seen: list[Any] = []
    hook = model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(**encoded)
        hook.remove()
        features_NGH = seen[0].reshape(-1, each or len(seen[0]), seen[0].shape[-1])
        mean_H = features_NGH.mean((0, 1))
        differences_NH = (features_NGH - features_NGH.mean(1, keepdim=True)).flatten(0, 1)
        _, sizes, directions_CH = torch.linalg.svd(differences_NH, full_matrices=False)
        scale = _LOGIT_STD * len(differences_NH) ** 0.5 / sizes[0]
        model.classifier.weight.copy_(directions_CH[: len(names)] * scale)
        model.classifier.bias.copy_(-model.classifier.weight @ mean_H)
    return model
