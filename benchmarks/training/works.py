"""Rows of the table by name, and the files that both sides read: models and JSONL."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapes import SIZES, load_tokenizer, max_length, packaged_rows, save_model

#: tweets512: the tweets, padded to 512 tokens as tutorials do; only the HF side has such a row.
CORPORA = ("tweets", "bbc", "dense512", "tweets512")
TABLE = (
    *(f"{corpus}/{size}" for corpus in ("tweets", "bbc") for size in ("base", "large", "minilm", "modernbert")),
    "dense512/large",
    "tweets/minilm-b16",
    "tweets512/base",
)
#: Samples a second that HF Trainer is known to reach on one H200 (torch 2.11, transformers 5.17).
KNOWN_HF = {
    "tweets/base": 953,
    "tweets/large": 500,
    "bbc/base": 663,
    "bbc/large": 280,
    "dense512/large": 347,
    "tweets512/base": 671,
}
_DENSE_ROWS, _SMOKE_ROWS = 4096, 96


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row: corpus and shape, samples of an effective batch, and whether brimful's products are in fp8."""

    corpus: str
    size: str
    batch_size: int = 32
    fp8: bool = False

    @classmethod
    def parse(cls, name: str) -> Work:
        """The work called `corpus/size[-bN][-fp8]`. Raises: ValueError if there is none of this name."""
        corpus, _, rest = name.partition("/")
        size, *marks = rest.split("-")
        if corpus not in CORPORA or size not in SIZES:
            raise ValueError(f"{name!r} is no work: it is CORPUS/SIZE, {', '.join(CORPORA)} / {', '.join(SIZES)}")
        found: dict[str, Any] = {}
        for mark in marks:
            if mark == "fp8":
                found["fp8"] = True
            elif mark.startswith("b") and mark[1:].isdecimal() and int(mark[1:]) > 0:
                found["batch_size"] = int(mark[1:])
            else:
                raise ValueError(f"{name!r}: {mark!r} is neither a batch size such as b16 nor fp8")
        return cls(corpus=corpus, size=size, **found)

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        batch = "" if self.batch_size == 32 else f"-b{self.batch_size}"
        return f"{self.corpus}/{self.size}{batch}{'-fp8' if self.fp8 else ''}"

    @property
    def texts(self) -> str:
        """The corpus that its texts are of."""
        return "tweets" if self.corpus == "tweets512" else self.corpus

    @property
    def for_trainer(self) -> str:
        """The name of the row as Trainer sees it, which has no fp8."""
        return replace(self, fp8=False).name

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides of the row: hf, and brimful unless the row is of Trainer alone."""
        return ("hf",) if self.corpus == "tweets512" else ("hf", "brimful")

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes that each side is tried with, its fastest counted: more than one where any batch will do."""
        return (32, 128) if self.corpus == "dense512" else (self.batch_size,)


def data_file(inputs: Path, work: Work) -> Path:
    """JSONL with `text` and `label`."""
    return inputs / f"{work.texts}.jsonl"


def lengths_file(inputs: Path, work: Work) -> Path:
    """.npy with the tokens of each row."""
    return inputs / f"{work.texts}.lengths.npy"


def model_folder(inputs: Path, work: Work) -> Path:
    """A base model without a head, as one downloads it, with its tokenizer."""
    return inputs / work.size


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def make_inputs(inputs: Path, works: list[Work], tokenizer_folder: str | None, *, smoke: bool) -> None:
    """Writes what the works need and `inputs` does not have yet. Weights are random: speed does not depend on them."""
    import numpy as np
    from transformers import AutoModel

    inputs.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(tokenizer_folder, smoke=smoke)
    for work in works:
        folder = model_folder(inputs, work)
        if not folder.exists():
            save_model(folder, work.size, tokenizer, AutoModel.from_config, smoke=smoke)
        if not lengths_file(inputs, work).exists():
            rows = _corpus(work.texts, tokenizer)
            if smoke:
                rows = random.Random(0).sample(rows, _SMOKE_ROWS)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            data_file(inputs, work).write_text(text, "utf-8")
            ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length(smoke))["input_ids"]
            np.save(lengths_file(inputs, work), np.array([len(each) for each in ids]))


def _corpus(name: str, tokenizer: Any) -> list[dict[str, str]]:
    """`text` and `label`. dense512: random words of the vocabulary, so many that every row is cut at 512 tokens."""
    if name != "dense512":
        return packaged_rows(name)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower())
    source = random.Random(0)
    texts = (" ".join(source.choices(words, k=512)) for _ in range(_DENSE_ROWS))
    return [{"text": text, "label": source.choice("abcde")} for text in texts]
