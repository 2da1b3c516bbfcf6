"""Configurations that transformers runs and that are rarely seen: answers of its pipeline, and steps of its Trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_heads import LABELS, WORDS, save_head

import brimful

#: The last one ends with the end of text that the tokenizers of decoders add, too.
TEXTS = [" ".join(WORDS[start : start + count]) for start, count in ((0, 5), (3, 2), (1, 7), (0, 1))] + ["good <2>"]
#: Model type, settings of config.json, and the tokenizer's padding token.
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "no padding token, and the tokenizer pads with the end": ("llama", {}, "<2>"),
    "another padding token than the tokenizer's": ("llama", {"pad_token_id": 0}, "<2>"),
    "a padding token, and the tokenizer has none": ("llama", {"pad_token_id": 0}, None),
    "no padding token at all": ("gpt2", {}, None),
    "no padding token, and a head of another name": ("ctrl", {"pad_token_id": None}, None),
    "a padding token that is no token": ("qwen2", {"pad_token_id": -1}, "<2>"),
    "a padding token that is no token, BERT": ("bert", {"pad_token_id": -1}, None),
    "a tuple is returned": ("bert", {"return_dict": False}, None),
    "a tuple is returned, padded": ("fnet", {"return_dict": False}, None),
}


def model_of(case: str, folder: Path) -> Path:
    model_type, settings, pad_token = CASES[case]
    save_head(folder, model_type)
    change(folder / "config.json", settings)
    if pad_token is not None:
        change(folder / "tokenizer_config.json", {"pad_token": pad_token})
    return folder


def change(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(settings)))


def scores(answers: Any) -> torch.Tensor:
    return torch.tensor(
        [[next(a["score"] for a in each if a["label"] == label) for label in LABELS] for each in answers]
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled
def test_answers_are_those_of_the_pipeline(case: str, tmp_path: Path) -> None:
    folder = model_of(case, tmp_path / "model")
    asked = {"top_k": None, "function_to_apply": "none"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = torch.cat([model(**tokenizer(text, return_tensors="pt"))[0] for text in TEXTS])
    with brimful.Classifier(folder, device="cpu", precision="fp32") as classifier:
        torch.testing.assert_close(scores(classifier(TEXTS, **asked)), expected, rtol=1e-4, atol=1e-5)
    if model.config.return_dict:  # transformers' pipeline reads logits by their name
        stock = transformers.pipeline("text-classification", model=str(folder), device="cpu")
        ours = brimful.pipeline("text-classification", model=str(folder), device="cpu")
        torch.testing.assert_close(scores(ours(TEXTS, **asked)), scores(stock(TEXTS, **asked)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if "no token" in name or "tuple" in name])
@pytest.mark.filterwarnings("ignore")
def test_it_is_trained(case: str, tmp_path: Path) -> None:
    folder = model_of(case, tmp_path / "model")
    rows = [{"text": text, "label": label} for text in TEXTS for label in LABELS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = brimful.train(
        tmp_path / "rows.jsonl", model=folder, output=tmp_path / "run", device="cpu", max_steps=2, eval_split=0,
        precision="fp32", quiet=True,
    )  # fmt: skip
    assert (run.steps, run.skipped_steps) == (2, 0)
    assert run.first_batch is not None
    assert run.first_batch.passed
