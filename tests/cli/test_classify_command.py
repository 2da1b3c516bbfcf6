"""`brimful classify` and `brimful.classify`: each row of a file with its answer beside it, and what a pass says."""

from __future__ import annotations

import csv
import errno
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
from brimful.core import atomic_files
from brimful.core.errors import BrimfulError, DataError, DiskFullError, ModelError, OptionError, OutputError
from commands import Brimful, Files
from same import SCORE
from tiny_files import review, save_base, save_classifier, save_tokenizer, write_csv

#: Columns behind those of the input.
ANSWER = ["label", "score", "num_tokens", "truncated", "error"]


def same_answers(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Labels and scores, given as transformers' pipeline gives them."""
    assert [answer["label"] for answer in found] == [answer["label"] for answer in expected]
    assert [answer["score"] for answer in found] == pytest.approx([answer["score"] for answer in expected], abs=SCORE)


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=not_json) for line in out.splitlines()]


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.is_dir() or path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            return lines(file.read())
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


# What comes out


def test_lines_of_json_on_stdout_keep_columns_and_order(brimful: Brimful, files: Files) -> None:
    said = brimful("classify", files.classifier, files.reviews, "--precision", "fp32")
    rows, found = read_back(files.reviews), lines(said.out)

    assert said.code == 0
    assert [{name: row[name] for name in ("text", "label")} for row in found] == rows
    assert list(found[0]) == ["text", "label", "predicted_label", *ANSWER[1:]]
    expected = transformers.pipeline("text-classification", model=str(files.classifier), device="cpu")
    same_answers(
        [{"label": row["predicted_label"], "score": row["score"]} for row in found],
        expected([row["text"] for row in rows]),
    )
    assert {(row["truncated"], row["error"]) for row in found} == {(False, None)}
    assert [row["num_tokens"] for row in found] == [len(row["text"].split()) + 2 for row in rows]
    assert "Classified  40 texts in" in said.err
    assert "Equivalence check  passed: fp32 against plain fp32 has the same label in 40 of 40 rows" in said.err


def test_a_token_budget_below_the_longest_row_is_told_once(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Of the pass: the plain model that it is compared with is made by the same options."""
    words = ("classify", files.classifier, files.reviews, "-o", tmp_path / "out.csv", "--device", "cpu")
    assert brimful(*words, "--token-budget", 3, "--verify", 8).err.count("--token-budget 3 is raised to") == 1


def test_a_dash_is_stdout(brimful: Brimful, files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("classify", files.classifier, files.reviews, "--precision", "fp32")
    assert brimful(*words, "-o", "-").out == brimful(*words).out != ""
    assert list(tmp_path.iterdir()) == []
    refused = brimful(*words, "-o", "-", "--resume")
    assert (refused.code, refused.out) == (2, "")
    assert "--resume needs an output" in refused.err


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EROFS, OutputError)])
def test_a_report_that_cannot_be_written_leaves_the_results(
    number: int, kind: type[BrimfulError], brimful: Brimful, files: Files, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    output, page = tmp_path / "out.csv", tmp_path / "page.html"
    words = ("classify", files.classifier, files.reviews, "--precision", "fp32", "--report", page)
    write = atomic_files.write_bytes

    def refuse_pages(path: Path, data: Any) -> None:
        with atomic_files.file_errors(path):
            if path.suffix == ".html":
                raise OSError(number, os.strerror(number))
            write(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "write_bytes", refuse_pages)
        said, on_stdout = brimful(*words, "-o", output), brimful(*words)
    assert said.code == on_stdout.code == kind.exit_code
    assert said.err.splitlines()[-1].startswith("hint: the results are whole: with --resume the report alone")
    assert on_stdout.err.splitlines()[-1] == "hint: the results are whole"
    assert len(read_back(output)) == len(lines(on_stdout.out)) == len(read_back(files.reviews))
    assert brimful(*words, "-o", output, "--resume").code == 0
    assert page.exists()


def test_answers_on_answers_overwrite_nothing(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert brimful("classify", files.classifier, files.reviews, "--output", first).code == 0
    assert brimful("classify", files.classifier, first, "--output", second).code == 0
    header = second.read_text(encoding="utf-8").splitlines()[0].replace('"', "").split(",")
    once = ["text", "label", "predicted_label", *ANSWER[1:]]
    assert header == [*once, "predicted_label_2", *(f"predicted_{name}" for name in ANSWER[1:])]


@pytest.mark.sampled
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
    assert {path.name for path in output.parent.iterdir()} == {output.name, f"{output.name}.manifest.json"}
    found = read_back(output)
    assert [str(row["id"]) for row in found] == ["3", "1", "2", "0"]
    assert [row["text"] for row in found] == rows["text"]
    assert list(found[0]) == [*rows, *ANSWER]
    assert {row["label"] for row in found} <= {"bad", "good"}


def test_a_name_without_a_suffix_is_a_folder_of_shards(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful("classify", files.classifier, files.reviews, "--output", tmp_path / "out", "--shard-rows", 1)
    assert said.code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"part-00000.parquet", "_manifest.json"}
    assert [row["text"] for row in read_back(tmp_path / "out")] == [row["text"] for row in read_back(files.reviews)]
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text("utf-8"))["status"] == "finished"


def test_the_call_and_the_command_write_the_same_and_the_record_says_how(
    brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    record = package.classify(files.classifier, files.reviews, tmp_path / "call.jsonl", precision="fp32")
    assert (
        brimful("classify", files.classifier, files.reviews, "-o", tmp_path / "cli.jsonl", "--precision=fp32").code == 0
    )
    assert (tmp_path / "call.jsonl").read_bytes() == (tmp_path / "cli.jsonl").read_bytes()
    assert (record.counts.num_rows, sum(record.counts.labels.values())) == (40, 40)
    assert record.counts.num_tokens == sum(row["num_tokens"] for row in read_back(tmp_path / "call.jsonl"))
    assert [stage.name for stage in record.stages] == ["read", "tokenise", "compute", "write"]
    assert record.equivalence is not None
    assert record.equivalence.passed
    assert record.command.endswith("--precision fp32")


@pytest.mark.slow
def test_regression_has_a_number_and_no_label(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    for names in (["stars"], ["x", "y"]):
        model = save_classifier(tmp_path / "m", names, problem_type="regression")
        found = lines(brimful("classify", model, files.reviews, "--precision", "fp32").out)
        plain = transformers.pipeline("text-classification", model=str(model), device="cpu")
        expected = plain([row["text"] for row in found], top_k=None)
        for row, answers in zip(found, expected, strict=True):
            by_name = {each["label"]: each["score"] for each in answers}
            numbers = [by_name[name] for name in names]
            assert list(row) == ["text", "label", *ANSWER[1:]]
            assert row["score"] == pytest.approx(numbers if len(names) > 1 else numbers[0], abs=SCORE, rel=SCORE)


# Rows that are out of the ordinary


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_without_text_keep_their_place_and_have_no_answer(
    kind: str, suffix: str, brimful: Brimful, tmp_path: Path
) -> None:
    problem = kind if kind == "regression" else f"{kind}_classification"
    model = save_classifier(tmp_path / "m", ["a"] if kind == "regression" else ["a", "b"], problem_type=problem)
    texts = ["good", "", None, "bad", " \t\u3000", "fine"]
    pq.write_table(pa.table({"text": texts, "id": range(6)}), tmp_path / "in.parquet")
    threshold = [] if kind == "regression" else ["--threshold", 0.01]

    said = brimful("classify", model, tmp_path / "in.parquet", "--output", tmp_path / f"out.{suffix}", *threshold)

    assert said.code == 0
    assert "warning: 3 (50.0 %) of 6 rows had no text, and have no answer" in said.err
    found = read_back(tmp_path / f"out.{suffix}")
    assert [int(row["id"]) for row in found] == list(range(6))
    assert ("label" in found[0]) == (kind != "regression")
    for name in {"score", "label"} & set(found[0]):
        assert [row[name] in (None, "") for row in found] == [False, True, True, False, True, False]
    assert [int(row["num_tokens"]) for row in found] == [3, 0, 0, 3, 0, 3]


def test_only_rows_without_text(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "blank.csv", ["text"], [[" "], [" "]])
    said = brimful("classify", files.classifier, data)
    nothing = {"label": None, "score": None, "num_tokens": 0, "truncated": False, "error": None}
    assert lines(said.out) == [{"text": " "} | nothing] * 2
    assert "Equivalence check  not run" in said.err


def test_a_text_of_which_the_tokenizer_knows_nothing_has_no_answer(brimful: Brimful, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["a", "b"], "qwen3")
    save_tokenizer(model, bare=True)
    data = write_csv(tmp_path / "d.csv", ["text"], [["good"], ["\u6620\u753b"], ["bad"]])
    found = lines(brimful("classify", model, data).out)
    assert [row["label"] is None for row in found] == [False, True, False]


def test_long_texts_are_cut_and_counted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "long.csv", ["text"], [["good " * 300], ["bad"]])
    said = brimful("classify", files.classifier, data)
    assert said.code == 0
    cut = "was longer than 80 tokens (the model has no more positions), and was cut (--max-length)"
    assert f"warning: 1 (50.0 %) of 2 rows {cut}" in said.err
    assert [(row["num_tokens"], row["truncated"]) for row in lines(said.out)] == [(80, True), (3, False)]
    shorter = brimful("classify", files.classifier, data, "--max-length", 20)
    assert [row["num_tokens"] for row in lines(shorter.out)] == [20, 3]


def test_weights_that_are_not_finite_give_no_label_and_an_error(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["a", "b"])
    tensors = load_file(model / "model.safetensors")
    tensors["classifier.bias"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    said = brimful("classify", model, files.reviews, "--output", tmp_path / "out.jsonl")
    assert said.code == 0
    assert "warning: 40 (100.0 %) of 40 rows were not read or classified in full: see the column `error`" in said.err
    found = read_back(tmp_path / "out.jsonl")
    assert {(row["predicted_label"], row["score"], row["error"]) for row in found} == {
        (None, None, "the model gave no finite number")
    }


def test_control_characters_reach_stdout_escaped(brimful: Brimful, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["\x1b[31mred\x9b", "\u202eleft\x07"])
    data = write_csv(tmp_path / "d.csv", ["text", "no\x1bte"], [["good", "\x9b31m"], ["bad", "\u2028"]])
    said = brimful("classify", model, data)
    assert said.code == 0
    assert all(line.isprintable() for line in (said.out + said.err).splitlines())
    assert lines(said.out)[0]["no\x1bte"] == "\x9b31m"


# Mistakes


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["{base}", "{reviews}"], "has no classification head", "brimful train"),
        (["{classifier}", "nowhere.csv"], "no such file", ""),
        (["{classifier}", "{reviews}", "--text-column", "txt"], "no such column: 'txt'", "did you mean 'text'"),
        (["{classifier}", "{reviews}", "--output", "{tmp}/out.xlsx"], "suffix '.xlsx'", ".csv, .tsv, .jsonl"),
        (["{classifier}", "{reviews}", "--output", "{reviews}"], "is the file that is read", "another name"),
        (["{classifier}", "{reviews}", "--output", ""], "--output is empty", "leave it out"),
        (["{classifier}", "{reviews}", "--report", "{reviews}"], "is no name of a page", "end in .html"),
        (["{classifier}", "{reviews}", "--report", "{tmp}/no/page.html"], "is no folder that", "another folder"),
        (["{classifier}", "{reviews}", "--output", "{reviews}/out.csv"], "is a file", "another name"),
        (["{classifier}", "{reviews}", "--threshold", "1.5"], "--threshold is 1.5", "0.5"),
        (["{classifier}", "{reviews}", "--max-length", "1000"], "positions for 80 tokens", "at most 80"),
        (["{classifier}", "{reviews}", "--device", "cuda"], "--device cuda", "--device cpu"),
        (["{classifier}", "{reviews}", "--num-gpus", "2"], "--gpus is 2, and there is no GPU to run on", "leave"),
        (["{classifier}", "{reviews}", "--gpu", "2"], "no option --gpu", "did you mean --gpus?"),
        (["{classifier}", "{reviews}", "--gpus", "2", "--device", "cpu"], "--device cpu are both", "leave one out"),
        (["{classifier}", "{reviews}", "--outptu", "a.csv"], "no option --outptu", "--output"),
        (["{classifier}", "{reviews}", "--labels", ",", "-o", "{tmp}/out.csv"], "no candidate labels", "sports"),
        (["{classifier}", "{reviews}", "--labels", "a", "--pair-column", "label"], "are both given", "one text a row"),
        (["{classifier}", "{reviews}", "--labels", "a,,b"], "'' is no candidate label", "sports"),
        (["{classifier}", "{reviews}", "--labels", "column:txt"], "--labels: there is no such column: 'txt'", "'text'"),
        (["{classifier}", "{reviews}", "--labels", "column:text,label"], "no such column: 'text,label'", "columns: "),
        (
            ["{classifier}", "{reviews}", "--labels", "column:text", "--text-column", "text"],
            "two roles",
            "of their own",
        ),
        (["{classifier}", "{reviews}", "--multi-label"], "--multi-label is for zero-shot", "--labels"),
        (["{classifier}", "{reviews}", "--hypothesis-template", "So."], "-template is for zero-shot", "--labels"),
        (["{classifier}", "{reviews}", "--labels", "a", "--hypothesis-template", "So."], "has no place for", "braces"),
        (["{classifier}", "{reviews}", "--json"], "rows go to stdout then", "name an --output"),
        (["{classifier}", "{reviews}", "--resume"], "--resume needs an output", "--output FILE"),
        (["{classifier}", "-", "--resume", "-o", "{tmp}/out.csv"], "can be read again", "--output FILE"),
        (["{classifier}"], "needs INPUT", "brimful classify"),
    ],
)
def test_mistakes(words: list[str], said: str, hint: str, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    if {"cuda", "--num-gpus"} & {*words} and "cpu" not in words and torch.cuda.is_available():
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


def test_an_output_that_cannot_be_written(brimful: Brimful, files: Files) -> None:
    found = brimful("classify", files.classifier, files.reviews, "--output", "/proc/nowhere/out.csv")
    assert (found.code, found.out) == (2, "")
    said = found.err.splitlines()[-2]
    assert said.startswith(
        ("error: cannot write /proc/nowhere/out.csv", "error: --output /proc/nowhere/out.csv: this user")
    )
    assert found.err.splitlines()[-1].startswith("hint: ")


def test_an_empty_file(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful("classify", files.classifier, write_csv(tmp_path / "e.csv", ["text"], []))
    assert (said.code, said.out) == (2, "")
    assert "header and no rows" in said.err


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ({"max_lenght": 3}, "no option 'max_lenght'", "did you mean max_length?"),
        ({"zzz": 3}, "no option 'zzz'", "the options are"),
        ({"precision": "fp4"}, "--precision is 'fp4'", "the default is auto"),
        ({"threshold": "high"}, "--threshold is 'high': it must be a number", "leave it out"),
        ({"output": 3}, "--output is 3: it must be text", "leave it out"),
        ({"data": 7}, "data is int: it must be a file, a DataFrame", "docs"),
        ({"report": 3}, "--report is 3: it must be text", "leave it out"),
    ],
)
def test_mistakes_in_a_call(arguments: dict[str, Any], said: str, hint: str, files: Files, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        package.classify(files.classifier, **{"data": files.reviews, "output": tmp_path / "o.csv"} | arguments)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_errors_of_a_call_are_of_our_tree(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        package.classify(tmp_path, files.reviews, tmp_path / "o.csv")
    with pytest.raises(ModelError, match="no classification head"):
        package.classify(save_base(tmp_path / "b"), files.reviews, tmp_path / "o.csv")
    with pytest.raises(DataError):
        package.classify(files.classifier, tmp_path / "none.csv", tmp_path / "o.csv")


@pytest.mark.thorough
def test_a_reader_that_leaves_early_and_a_locale_without_letters(files: Files, tmp_path: Path) -> None:
    """`brimful classify ... | head -1` ends quietly, and what is written is UTF-8 in every locale."""
    data = write_csv(tmp_path / "d.csv", ["text"], [["caf\u00e9 \u6620\u753b " + review(True, i)] for i in range(1000)])
    command = [sys.executable, "-m", "brimful", "classify", str(files.classifier), str(data)]
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
