"""`brimful classify` and `brimful.classify`: the answers of transformers' own pipeline, each row in its place."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import brimful as package
from brimful.core.errors import DataError, ModelError, OptionError
from commands import Brimful, Files
from tiny_files import review, save_base, save_classifier, save_tokenizer, write_csv

#: Largest difference of a score from the pipeline's, in fp32.
SCORE = 1e-5
TEXTS = [review(i % 3 == 0, i) * (1 + i % 4) for i in range(50)] + ["good", "the ." * 5]


def pipeline(model: Path) -> Any:
    return transformers.pipeline("text-classification", model=str(model), device="cpu")


def same_answers(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    assert [answer["label"] for answer in found] == [answer["label"] for answer in expected]
    assert [answer["score"] for answer in found] == pytest.approx([answer["score"] for answer in expected], abs=SCORE)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen3"])
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_one_label_as_the_pipeline_gives_it(family: str, packing: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", ["a", "b", "c"], family)
    same_answers(package.classify(model, TEXTS, packing=packing), pipeline(model)(TEXTS))


def test_several_labels_as_the_pipeline_gives_them(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["a", "b", "c"], problem_type="multi_label_classification")
    expected = pipeline(model)(TEXTS, top_k=None, function_to_apply="sigmoid")

    for answer, labels in zip(package.classify(model, TEXTS, threshold=1e-9), expected, strict=True):
        flat = [{"label": label, "score": score} for label, score in zip(answer["label"], answer["score"], strict=True)]
        same_answers(flat, labels)
    for answer, labels in zip(package.classify(model, TEXTS, threshold=0.5), expected, strict=True):
        assert answer["label"] == [label["label"] for label in labels if label["score"] >= 0.5]


def test_one_output_without_a_task_as_the_pipeline_gives_it(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["relevant"])
    same_answers(package.classify(model, TEXTS), pipeline(model)(TEXTS))


def test_a_number_as_the_pipeline_gives_it(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["stars"], problem_type="regression")
    expected = [answer["score"] for answer in pipeline(model)(TEXTS)]
    found = package.classify(model, TEXTS)
    assert found == [{"score": pytest.approx(score, abs=SCORE)} for score in expected]


def test_several_numbers_come_as_a_list(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["x", "y"], problem_type="regression")
    (answer,) = package.classify(model, ["good"])
    by_name = {each["label"]: each["score"] for each in pipeline(model)("good", top_k=None)}
    assert answer["score"] == pytest.approx([by_name["x"], by_name["y"]], abs=SCORE)


def test_pairs_as_the_pipeline_gives_them(tmp_path: Path) -> None:
    model, seconds = save_classifier(tmp_path / "m", ["a", "b", "c"], type_vocab_size=2), TEXTS[::-1]
    expected = pipeline(model)([{"text": a, "text_pair": b} for a, b in zip(TEXTS, seconds, strict=True)])
    same_answers(package.classify(model, TEXTS, seconds), expected)


def test_rows_that_influence_one_another_are_classified_alone(tmp_path: Path) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    config = transformers.FNetConfig(**sizes, max_position_embeddings=80, num_labels=3, initializer_range=0.5)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    same_answers(package.classify(tmp_path, TEXTS), [pipeline(tmp_path)(text)[0] for text in TEXTS])


# Files


def test_lines_of_json_on_stdout_keep_columns_and_order(brimful: Brimful, files: Files) -> None:
    said = brimful("classify", files.classifier, files.reviews)
    with files.reviews.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = [json.loads(line) for line in said.out.splitlines()]

    assert said.code == 0
    assert [{name: row[name] for name in ("text", "label")} for row in found] == rows
    assert list(found[0]) == ["text", "label", "predicted_label", "score"]
    expected = pipeline(files.classifier)([row["text"] for row in rows])
    same_answers([{"label": row["predicted_label"], "score": row["score"]} for row in found], expected)
    assert "40 texts in" in said.err


def test_answers_on_answers_overwrite_nothing(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert brimful("classify", files.classifier, files.reviews, "--output", first).code == 0
    assert brimful("classify", files.classifier, first, "--output", second).code == 0
    header = second.read_text(encoding="utf-8").splitlines()[0].replace('"', "").split(",")
    assert header == ["text", "label", "predicted_label", "score", "predicted_label_2", "predicted_score"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_files_of_each_form_keep_columns_and_order(suffix: str, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = {
        "id": [3, 1, 2, 0],
        "text": ['good, "very" good', "bad\nfilm", "caf\u00e9\t\u6620\u753b", "dull"],
        "tags": [["a", "b"], [], None, ["c"]],
        "extra": [{"x": 1}, None, {"x": 2}, {"x": 3}],
        "share": [0.5, float("nan"), None, 1.0],
        "raw": [b"\x00\xff", b"", None, b"a"],
    }
    pq.write_table(pa.table(rows), tmp_path / "in.parquet")
    output = tmp_path / "new" / f"out.{suffix}"

    said = brimful("classify", files.classifier, tmp_path / "in.parquet", "--output", output)

    assert (said.code, said.out) == (0, "")
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    found = read_back(output)
    assert [str(row["id"]) for row in found] == ["3", "1", "2", "0"]
    assert [row["text"] for row in found] == rows["text"]
    assert list(found[0]) == [*rows, "label", "score"]
    assert {row["label"] for row in found} <= {"bad", "good"}


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            return [json.loads(line, parse_constant=not_json) for line in file]
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_without_text_keep_their_place_and_have_no_answer(
    kind: str, suffix: str, brimful: Brimful, tmp_path: Path
) -> None:
    problem = kind if kind == "regression" else f"{kind}_classification"
    model = save_classifier(tmp_path / "m", ["a"] if kind == "regression" else ["a", "b"], problem_type=problem)
    texts = ["good", "", None, "bad", " \t\u3000", "fine"]
    pq.write_table(pa.table({"text": texts, "id": range(6)}), tmp_path / "in.parquet")

    said = brimful(
        "classify", model, tmp_path / "in.parquet", "--output", tmp_path / f"out.{suffix}", "--threshold", 0.01
    )

    assert said.code == 0
    assert "3 of 6 rows had no text" in said.err
    found = read_back(tmp_path / f"out.{suffix}")
    assert [int(row["id"]) for row in found] == list(range(6))
    for name in {"score", "label"} & set(found[0]):
        assert [row[name] in (None, "") for row in found] == [False, True, True, False, True, False]
    alone, among = package.classify(model, ["good"])[0], package.classify(model, texts)[0]
    assert among == {
        name: pytest.approx(value, abs=SCORE) if name == "score" else value for name, value in alone.items()
    }


def test_only_rows_without_text(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "blank.csv", ["text"], [[" "], [" "]])
    said = brimful("classify", files.classifier, data)
    assert [json.loads(line) for line in said.out.splitlines()] == [{"text": " ", "label": None, "score": None}] * 2
    assert package.classify(files.classifier, []) == []
    assert package.classify(files.classifier, [None, ""]) == [{"label": None, "score": None}] * 2


def test_a_text_of_which_the_tokenizer_knows_nothing_has_no_answer(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["a", "b"], "qwen3")
    save_tokenizer(model, bare=True)
    found = package.classify(model, ["good", "\u6620\u753b", "bad"])
    assert [answer["label"] is None for answer in found] == [False, True, False]


def test_long_texts_are_cut_and_counted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "long.csv", ["text"], [["good " * 300], ["bad"]])
    said = brimful("classify", files.classifier, data)
    assert said.code == 0
    assert "warning: 1 of 2 rows were longer" in said.err
    assert (
        brimful("classify", files.classifier, data, "--max-length", 20).out.splitlines()[1] == said.out.splitlines()[1]
    )


def test_weights_that_are_not_finite_give_no_label_and_are_counted(
    brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    model = save_classifier(tmp_path / "m", ["a", "b"])
    tensors = load_file(model / "model.safetensors")
    tensors["classifier.bias"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    said = brimful("classify", model, files.reviews, "--output", tmp_path / "out.jsonl")
    assert said.code == 0
    assert "40 of 40 rows have no label: the model gave no number" in said.err
    assert {row["score"] for row in read_back(tmp_path / "out.jsonl")} == {None}


def test_control_characters_reach_stdout_escaped(brimful: Brimful, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["\x1b[31mred\x9b", "\u202eleft\x07"])
    data = write_csv(tmp_path / "d.csv", ["text", "no\x1bte"], [["good", "\x9b31m"], ["bad", "\u2028"]])
    said = brimful("classify", model, data)
    assert said.code == 0
    assert all(line.isprintable() for line in (said.out + said.err).splitlines())
    assert json.loads(said.out.splitlines()[0])["no\x1bte"] == "\x9b31m"


# Mistakes


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["{base}", "{reviews}"], "has no classification head", "brimful train"),
        (["{classifier}", "nowhere.csv"], "no such file", ""),
        (["{classifier}", "{reviews}", "--text-column", "txt"], "no such column: 'txt'", "did you mean 'text'"),
        (["{classifier}", "{reviews}", "--output", "{tmp}/out.xlsx"], "suffix '.xlsx'", ".csv, .tsv, .jsonl"),
        (["{classifier}", "{reviews}", "--output", "{tmp}/out"], "is a folder", "name of a file"),
        (["{classifier}", "{reviews}", "--output", "{reviews}"], "is the file that is read", "another name"),
        (["{classifier}", "{reviews}", "--output", "/proc/nowhere/out.csv"], "cannot write", "--output"),
        (["{classifier}", "{reviews}", "--threshold", "1.5"], "--threshold is 1.5", "0.5"),
        (["{classifier}", "{reviews}", "--max-length", "1000"], "positions for 80 tokens", "at most 80"),
        (["{classifier}", "{reviews}", "--device", "cuda"], "--device cuda", "--device cpu"),
        (["{classifier}", "{reviews}", "--outptu", "a.csv"], "no option --outptu", "--output"),
        (["{classifier}"], "needs FILE", "brimful classify"),
    ],
)
def test_mistakes(words: list[str], said: str, hint: str, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    places = {"base": files.base, "classifier": files.classifier, "reviews": files.reviews, "tmp": tmp_path}
    found = brimful("classify", *(word.format(**places) for word in words))
    *_, error, last = found.err.splitlines()
    assert (found.code, found.out) == (2, "")
    assert error.startswith("error: ")
    assert said in error
    assert last.startswith("hint: ")
    assert hint in last
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful("classify", files.classifier, write_csv(tmp_path / "e.csv", ["text"], []))
    assert (said.code, said.out) == (2, "")
    assert "header and no rows" in said.err


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ({"texts": "one text"}, "texts is str: it must be a list of texts", "[text]"),
        ({"texts": ["a", 3]}, "texts[1] is no text", "None for no text"),
        ({"texts": ["a"], "pairs": ["b", "c"]}, "1 texts and 2 pairs", "in the same order"),
        ({"texts": ["a"], "max_lenght": 3}, "no option 'max_lenght'", "did you mean max_length?"),
        ({"texts": ["a"], "zzz": 3}, "no option 'zzz'", "the options are"),
        ({"texts": ["a"], "precision": "fp8"}, "--precision is 'fp8'", "the default is auto"),
        ({"texts": ["a"], "threshold": "high"}, "--threshold is 'high': it must be a number", "0.5"),
    ],
)
def test_mistakes_in_a_call(arguments: dict[str, Any], said: str, hint: str, files: Files) -> None:
    with pytest.raises(OptionError) as caught:
        package.classify(files.classifier, **arguments)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_errors_of_a_call_are_of_our_tree(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        package.classify(tmp_path, ["a"])
    with pytest.raises(ModelError, match="no classification head"):
        package.classify(save_base(tmp_path / "b"), ["a"])
    with pytest.raises(DataError):
        package.train(tmp_path / "none.csv", model=files.base, output=tmp_path / "out")


def test_a_reader_that_leaves_early_and_a_locale_without_letters(files: Files, tmp_path: Path) -> None:
    """`brimful classify ... | head -1` ends quietly, and what is written is UTF-8 in every locale."""
    data = write_csv(tmp_path / "d.csv", ["text"], [["caf\u00e9 \u6620\u753b " + review(True, i)] for i in range(5000)])
    command = [sys.executable, "-m", "brimful.cli", "classify", str(files.classifier), str(data)]
    settings = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment = os.environ | settings | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read().decode()
    assert process.returncode == 0, err
    assert json.loads(first.decode("utf-8"))["text"].startswith("caf\u00e9 \u6620\u753b")
    assert "Traceback" not in err
    assert "rror" not in err
