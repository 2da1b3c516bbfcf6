"""Columns and lengths of training, saved with the model and used wherever it is used; truncation that is never silent.

Models are tiny ModernBERTs with 8,192 positions, and texts in which the word that decides stands far behind token 512.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import ModelError
from same import same_objects
from tiny_files import BAD, GOOD, OTHER, save_base, save_classifier, write_csv

#: Words of a text, about as many tokens.
LONG = 780


class Heard(Callbacks):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


def with_many_positions(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_many_positions(save_classifier(tmp_path_factory.mktemp("long"), ["bad", "good"], "modernbert"))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_long_texts_are_answered_as_the_pipeline_does(long_model: Path, packing: str) -> None:
    texts = [" ".join((OTHER + GOOD) * times) for times in (60, 1, 40, 2, 28)]
    plain = transformers.pipeline("text-classification", model=str(long_model), device="cpu")
    with brimful.Classifier(long_model, precision="fp32", packing=packing) as classifier:
        same_objects(classifier(texts[1:2], top_k=None), plain(texts[1:2], top_k=None))  # shapes are chosen by this
        same_objects(classifier(texts, top_k=None), plain(texts, top_k=None))


def test_the_classifier_warns_of_texts_that_it_cuts(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ["a", "b"])
    with (
        brimful.Classifier(model) as classifier,
        pytest.warns(UserWarning, match=r"1 of 2 texts was longer than 80 tokens \(the model has no more positions\)"),
    ):
        classifier(["good " * 100, "bad"])
    heard = Heard()
    with brimful.Classifier(model, max_length=20, callbacks=heard) as classifier:
        classifier(["good " * 100, "bad", "good " * 21])
    assert heard.warnings == []
    assert "2 of 3 texts were longer than 20 tokens (as asked for), and cut there" in heard.notes[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str]]]:
    """The run of a training at 1,024 tokens on one of two columns of text, and its rows."""
    home = tmp_path_factory.mktemp("trained")
    random = np.random.default_rng(0)
    rows = []
    for label, words in (("bad", BAD), ("good", GOOD)):
        rows += [(" ".join([*random.choice(OTHER, LONG), *[word] * 40]), label) for word in words]
    data = write_csv(home / "d.csv", ("title", "text", "kind"), [(text, "the film", label) for text, label in rows])
    brimful.train(
        *(data,),
        model=with_many_positions(save_base(home / "base", "modernbert")),
        output=home / "run",
        text_column="title",
        label_column="kind",
        max_length=1024,
        max_steps=3,
        batch_size=5,
        eval_split=0.2,
        device="cpu",
        callbacks=Callbacks(),
    )
    return home / "run", rows


@pytest.mark.thorough
def test_lengths_of_training_are_those_of_use(trained: tuple[Path, list[tuple[str, str]]], tmp_path: Path) -> None:
    run, rows = trained
    texts = [text for text, _ in rows]
    heard = Heard()
    with (
        brimful.Classifier(run / "model", precision="fp32", callbacks=heard) as by_default,
        brimful.Classifier(run / "model", precision="fp32", max_length=1024) as explicit,
    ):
        assert np.array_equal(by_default.logits(texts), explicit.logits(texts))
        assert heard.warnings == []
        by_default(["good " * 1500])
    assert heard.warnings == [
        "1 of 1 texts was longer than 1,024 tokens (the longest in training), and cut there;"
        " max_length sets another length"
    ]
    saved = json.loads((run / "model" / "brimful.json").read_text())
    assert saved == {
        "text_column": "title",
        "pair_column": None,
        "label_columns": ["kind"],
        "max_length": 1024,
        "schema": 1,
    }
    plain = transformers.pipeline("text-classification", model=str(run / "model"), device="cpu")
    assert plain.tokenizer.model_max_length == 1024
    with pytest.warns(UserWarning, match="3 of 3 texts were longer"):
        found = brimful.Classifier(run / "model", precision="fp32")([" ".join([text, text]) for text in texts[:3]])
    same_objects(found, plain([" ".join([text, text]) for text in texts[:3]], truncation=True))


@pytest.mark.slow
def test_columns_of_training_are_those_of_use(trained: tuple[Path, list[tuple[str, str]]], tmp_path: Path) -> None:
    """By name, `text` would be read: a column that was there in training, and was not the text."""
    run, rows = trained
    both = write_csv(tmp_path / "both.csv", ("id", "text", "title"), [(1, "the film", rows[0][0])])
    heard = Heard()
    brimful.classify(run / "model", both, tmp_path / "out.jsonl", callbacks=heard, verify=0)
    assert "text: column 'title' (as in training" in "\n".join(heard.notes)
    assert json.loads((tmp_path / "out.jsonl").read_text())["num_tokens"] > 800
    other = write_csv(tmp_path / "other.csv", ("text",), [("the film",)])
    brimful.classify(run / "model", other, tmp_path / "other.jsonl", callbacks=heard, verify=0)
    assert "the model was trained on 'title', which is not here: 'text' is read" in "\n".join(heard.warnings)
    long = write_csv(tmp_path / "long.csv", ("title",), [(rows[0][0] * 2,)])
    with pytest.warns(UserWarning, match=r"1 \(100.0 %\) of 1 rows was longer than 1,024 tokens"):
        brimful.classify(run / "model", long, tmp_path / "long.jsonl", verify=0)


def test_a_model_of_single_texts_is_not_asked_about_entailment(
    trained: tuple[Path, list[tuple[str, str]]], tmp_path: Path
) -> None:
    run, _ = trained
    said = {"match": "zero-shot needs a model of natural-language inference, and this one was trained on single texts"}
    with brimful.Classifier(run / "model") as classifier, pytest.raises(ModelError, **said):
        classifier("the film", labels=["a", "b"])
    data = write_csv(tmp_path / "rows.csv", ("title",), [("the film",)])
    with pytest.raises(ModelError, **said) as caught:
        brimful.classify(run / "model", data, tmp_path / "out.jsonl", labels="a,b", verify=0)
    assert "it gives its own (" in str(caught.value.hint)


@pytest.fixture(scope="module")
def pair_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pairs")
    rows = [(f"the film was {GOOD[i % 5]}", f"the {OTHER[i % 13]} was {BAD[i % 4]}", "ny"[i % 2]) for i in range(24)]
    data = write_csv(home / "d.csv", ("left", "right", "label"), rows)
    columns = {"text_column": "left", "pair_column": "right"}
    brimful.train(data, model=save_base(home / "b"), output=home / "run", max_steps=1, device="cpu", **columns)
    return home / "run" / "model"


@pytest.mark.slow
def test_a_model_of_pairs_reads_pairs(pair_model: Path, tmp_path: Path) -> None:
    heard = Heard()
    pairs = write_csv(tmp_path / "p.csv", ("right", "left"), [("the story was dull", "the film was good")])
    brimful.classify(pair_model, pairs, tmp_path / "p.jsonl", callbacks=heard, verify=0)
    assert heard.warnings == []
    assert json.loads((tmp_path / "p.jsonl").read_text())["num_tokens"] == 4 + 4 + 3
    alone = write_csv(tmp_path / "a.csv", ("left",), [("the film was good",)])
    brimful.classify(pair_model, alone, tmp_path / "a.jsonl", callbacks=heard, verify=0)
    said = "the model was trained on pairs, 'left' with 'right', and no second text is read here; --pair-column names"
    assert said in heard.warnings[0]
    heard = Heard()
    with brimful.Classifier(pair_model, callbacks=heard) as classifier:
        classifier(["the film"], pairs=["the story"])
        assert heard.warnings == []
        classifier(["the film"])
        classifier(["the film"])
    assert heard.warnings == [
        "the model was trained on pairs, 'left' with 'right', and single texts are given: use pairs=..."
    ]
    card = (pair_model / "README.md").read_text()
    assert 'classify({"text": "a text", "text_pair": "its pair"})' in card
    assert "The text is in column `left`, its pair in `right`, the label in `label`." in card
    assert "truncation=True" in card


@pytest.mark.thorough
def test_a_model_of_single_texts_reads_single_texts(
    trained: tuple[Path, list[tuple[str, str]]], tmp_path: Path
) -> None:
    """`question` and `answer` are a pair by name."""
    data = write_csv(tmp_path / "d.csv", ("question", "answer"), [("the film", "was good")])
    heard = Heard()
    model = trained[0] / "model"
    brimful.classify(model, data, tmp_path / "o.jsonl", callbacks=heard, verify=0)
    assert json.loads((tmp_path / "o.jsonl").read_text())["num_tokens"] == 2 + 2
    assert "'answer' is not read: the model was trained on single texts" in "\n".join(heard.notes)
    brimful.classify(model, data, tmp_path / "p.jsonl", callbacks=heard, verify=0, pair_column="answer")
    assert "the model was trained on single texts, and pairs are given (--pair-column)" in heard.warnings
    assert json.loads((tmp_path / "p.jsonl").read_text())["num_tokens"] == 4 + 3


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"text_column": "a"}', '{"text_column": 1, "pair_column": null, "label_columns": [],'
             ' "max_length": 5}', '{"text_column": "a", "pair_column": null, "label_columns": [], "max_length": "x"}'],
)  # fmt: skip
def test_a_damaged_file_is_an_error_in_one_line(text: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ["a", "b"])
    (model / "brimful.json").write_text(text)
    with pytest.raises(ModelError, match=r"brimful\.json cannot be read") as caught:
        brimful.Classifier(model)
    assert caught.value.hint


def test_python_hears_of_rows_that_training_cuts(tmp_path: Path) -> None:
    rows: list[Any] = [(f"{GOOD[i % 5]} " * (70 + i), "ab"[i % 2]) for i in range(20)]
    data, base = write_csv(tmp_path / "d.csv", ("text", "label"), rows), save_base(tmp_path / "b")
    with pytest.warns(
        brimful.FindingWarning, match=r"training rows \(50.0 %\) are longer than 80 tokens, and cut"
    ) as heard:
        brimful.train(data, model=base, output=tmp_path / "r", max_steps=1)
    assert {warning.filename for warning in heard} == {__file__}
    with pytest.warns(brimful.FindingWarning, match=r"\(100.0 %\) are longer than 16 tokens, and cut \(max_length\)"):
        brimful.train(data, model=base, output=tmp_path / "s", max_steps=1, max_length=16)
    rows = [(f"{GOOD[0]} " * (1 + 70 * (i == 0)), "ab"[i % 2]) for i in range(40)]
    with warnings.catch_warnings(record=True) as said:  # of few rows that are cut as asked for nothing is said
        warnings.simplefilter("always")
        few = write_csv(tmp_path / "few.csv", ("text", "label"), rows)
        run = brimful.train(few, model=base, output=tmp_path / "t", max_steps=1, max_length=16, eval_split=0.0)
    assert run.data["truncated_rows"] == 1
    assert not any("max_length" in str(warning.message) for warning in said)
