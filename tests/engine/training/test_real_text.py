"""Labels of real text in half precision: those of fp32 at least as often as Hugging Face's own model gives them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful as package
from brimful.core.tolerances import TOLERANCES
from brimful.data.readers.packaged import bbc_news, minilm
from brimful.tasks.answers import softmax
from processor import in_bf16
from tolerances import MODEL_FP32, difference

pytestmark = pytest.mark.xdist_group("real text")  # one process makes what they share

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The hardest texts that are compared, and of how many: near-ties fall to either side by chance, and only many of them
#: show who is the more often right.
NUM_TEXTS = {"bf16": (80, 700), "fp16": (40, 700)}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Five words each, of articles that the model was not trained on: too few to be sure of many."""
    words = [row["text"].split() for row in _articles()[160:]]
    return [" ".join(each[start : start + 5]) for start in (8, 0, 16, 24) for each in words]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM fine-tuned for 20 steps on the first ten words of 160 articles of BBC News."""
    folder = tmp_path_factory.mktemp("real")
    rows = [row | {"text": " ".join(row["text"].split()[:10])} for row in _articles()[:160]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = {"batch_size": 8, "num_train_epochs": 1, "learning_rate": 3e-4, "max_length": 16, "eval_split": 0.0}
    package.train(folder / "rows.jsonl", model=minilm(), output=folder / "run", **options)
    return folder / "run" / "model"


def _articles() -> list[dict[str, str]]:
    rows = bbc_news()
    random.Random(0).shuffle(rows)
    return rows


def plain_logits(model: Path, texts: list[str], dtype: torch.dtype, device: str = "cpu") -> np.ndarray:
    """(N, C) of Hugging Face's own model in `dtype`, on padded batches."""
    plain = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), 32):
            batch = tokenizer(texts[start : start + 32], padding=True, return_tensors="pt")
            found.append(plain(**batch.to(device)).logits.float().cpu().numpy())
    return np.concatenate(found)


def our_logits(model: Path, texts: list[str], precision: str, **options: Any) -> np.ndarray:
    with package.Classifier(model, precision=precision, max_length=512, **options) as classifier:
        return classifier.logits(texts)


@pytest.fixture(scope="module")
def exact_NC(model: Path, texts: list[str]) -> np.ndarray:
    return plain_logits(model, texts[: NUM_TEXTS["bf16"][1]], torch.float32)


@pytest.mark.thorough
def test_fp32_is_the_plain_model(model: Path, texts: list[str], exact_NC: np.ndarray) -> None:
    assert difference(our_logits(model, texts[:200], "fp32"), exact_NC[:200]) < MODEL_FP32


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=in_bf16)])  # of a CPU; fp16 is a GPU's
def test_labels_agree_with_fp32_no_less_than_those_of_the_plain_model(
    precision: str, model: Path, texts: list[str], exact_NC: np.ndarray
) -> None:
    hard, of = NUM_TEXTS[precision]
    second_N, best_N = np.sort(softmax(exact_NC[:of]), axis=1)[:, -2:].T
    hardest = np.argsort(best_N - second_N)[:hard]
    texts = [texts[place] for place in hardest]
    labels_N, margins_N = exact_NC[hardest].argmax(axis=1), (best_N - second_N)[hardest]
    assert len(np.unique(labels_N)) == 5
    assert margins_N[5] < TOLERANCES["fp16"].answers, "few texts are hard"

    ours_NC = our_logits(model, texts, precision)
    theirs_NC = plain_logits(model, texts, HALVES[precision])
    ours_N, theirs_N = ours_NC.argmax(axis=1), theirs_NC.argmax(axis=1)

    assert difference(ours_NC, exact_NC[hardest]) <= difference(theirs_NC, exact_NC[hardest])
    assert np.mean(ours_N == labels_N) >= np.mean(theirs_N == labels_N)
    assert (margins_N[ours_N != labels_N] < TOLERANCES[precision].answers).all()
