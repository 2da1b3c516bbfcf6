"""Tokens that a model has no embeddings of: one line with row, token and sizes, before any device is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, ModelError
from tiny_files import review, save_base, save_classifier, write_csv

SAID = r"token 'extra150' is number 179, and the model has embeddings of 99 tokens"
ROWS = [(review(bool(i % 2), i) + (" extra150" if i == 7 else ""), ("bad", "good")[i % 2]) for i in range(24)]


def with_more_tokens(folder: Path) -> Path:
    """A tokenizer that knows 200 tokens more than it did, and 129 more than the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"extra{i}" for i in range(200)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "d.csv", ("text", "label"), ROWS)


def test_training_names_the_row(data: Path, tmp_path: Path) -> None:
    base = with_more_tokens(save_base(tmp_path / "base"))
    with pytest.raises(DataError, match=f"d.csv, row 8: {SAID}") as caught:
        brimful.train(data, model=base, output=tmp_path / "run")
    assert "the tokenizer that the model was trained with" in str(caught.value.hint)


def test_so_does_a_transform(tmp_path: Path) -> None:
    base = with_more_tokens(save_base(tmp_path / "base"))
    (tmp_path / "change.py").write_text("def change(text, random):\n    return text + ' extra150'\n")
    rows = [(text.replace("extra150", ""), kind) for text, kind in ROWS]
    data = write_csv(tmp_path / "d.csv", ("text", "label"), rows)
    options: dict[str, Any] = {"transform": f"{tmp_path / 'change.py'}:change", "num_workers": 1}
    with pytest.raises(DataError, match=f"after the transform, {SAID}"):
        brimful.train(data, model=base, output=tmp_path / "run", **options)


def test_the_classifier_names_the_text(tmp_path: Path) -> None:
    model = with_more_tokens(save_classifier(tmp_path, ["contradiction", "entailment"]))
    with brimful.Classifier(model) as classifier:
        with pytest.raises(DataError, match=rf"texts\[7\]: {SAID}"):
            classifier([text for text, _ in ROWS])
        with pytest.raises(DataError, match=rf"texts\[7\]: {SAID}"):
            classifier([text for text, _ in ROWS], labels=["good", "bad"])
        with pytest.raises(DataError, match=rf"texts\[0\]: {SAID}"):
            classifier(["the film"], labels=["good", "extra150"])
        assert len(classifier([text for text, _ in ROWS[:7]])) == 7


def test_a_row_of_a_file_has_an_error_and_all_others_answers(data: Path, tmp_path: Path) -> None:
    model = with_more_tokens(save_classifier(tmp_path / "m", ["bad", "good"]))
    record = brimful.classify(model, data, tmp_path / "out.jsonl", callbacks=Callbacks())
    assert [(each.row, each.error) for each in record.counts.first_errors] == [(8, SAID)]
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["predicted_label"] is None for row in found] == [i == 7 for i in range(24)]
    assert [row["error"] for row in found if row["error"]] == [SAID]


def test_special_tokens_are_a_fault_of_the_model(data: Path, tmp_path: Path) -> None:
    """No text could be read."""
    model = save_classifier(tmp_path / "m", ["bad", "good"], vocab_size=3)
    settings = json.loads((model / "tokenizer.json").read_text())
    for token in settings["post_processor"]["special_tokens"].values():
        token["ids"] = [120]
    (model / "tokenizer.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    for use in (lambda: brimful.Classifier(model), lambda: brimful.train(data, model=model, output=tmp_path / "r")):
        with pytest.raises(ModelError, match=r"in every text, token .* is number 120, and the model"):
            use()
