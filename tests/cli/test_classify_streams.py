"""`brimful classify` from any form of rows to any form of results: pipes, bad rows, stops, and what is on record."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import brimful as package
from brimful.core.callbacks import Callbacks
from brimful.core.errors import Interrupted
from brimful.data.readers.parts import BLOCK_BYTES
from brimful.engine.classification import verify
from brimful.engine.classification.runner import make_runner
from brimful.tasks.answer_equivalence import compare_answers
from commands import Brimful, Files, call
from same import SCORE, same_objects
from tiny_files import BAD, GOOD, review, save_classifier

ROWS = [{"id": i, "text": review(i % 3 == 0, i) + ' caf\u00e9, "\u6620\u753b"'} for i in range(24)]
NLI = ["contradiction", "neutral", "entailment"]
FP32 = ("--precision", "fp32")


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("nli"), NLI)


def lines(data: str | bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def manifest(output: Path) -> dict[str, Any]:
    place = output / "_manifest.json" if output.is_dir() else output.with_name(output.name + ".manifest.json")
    found: dict[str, Any] = json.loads(place.read_text("utf-8"))
    return found


# --- forms of rows --------------------------------------------------------------------------------------------------


def write_rows(folder: Path, form: str) -> Path:
    """ROWS in a form; what to call it on the command line."""
    path, table, delimited = folder / f"rows.{form}", pa.Table.from_pylist(ROWS), io.BytesIO()
    pyarrow.csv.write_csv(table, delimited, pyarrow.csv.WriteOptions(delimiter="\t" if "tsv" in form else ","))
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        pyarrow.feather.write_feather(table, path, compression="uncompressed")
    elif form in ("glob", "folder"):
        for number in range(3):
            (folder / f"rows-{number}.jsonl").write_bytes(jsonl(ROWS[8 * number : 8 * number + 8]))
        return folder / "rows-*.jsonl" if form == "glob" else folder
    else:
        data = jsonl(ROWS) if form.startswith("jsonl") else delimited.getvalue()
        with pa.output_stream(path, compression=CODECS.get(path.suffix)) as file:
            file.write(data)
    return path


CODECS = {".gz": "gzip", ".zst": "zstd"}
FORMS = ["csv", "tsv", "jsonl", "parquet", "arrow", "csv.gz", "tsv.zst", "jsonl.gz", "jsonl.zst", "glob", "folder"]


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_any_form_have_the_same_answers(form: str, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful("classify", files.classifier, write_rows(tmp_path, form), *FP32, "--verify", 0)
    assert said.code == 0, said.err
    found = lines(said.out)
    assert [(int(row["id"]), row["text"]) for row in found] == [(row["id"], row["text"]) for row in ROWS]
    with package.Classifier(files.classifier, precision="fp32") as classifier:
        expected = classifier([row["text"] for row in ROWS])
    same_objects([{"label": row["label"], "score": row["score"]} for row in found], expected)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    ["out.csv", "out.csv.gz", "out.tsv.zst", "out.jsonl", "out.jsonl.zst", "out.ndjson.gz", "out.parquet", "out"],
)
def test_results_in_any_form_are_the_same(name: str, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    output = tmp_path / name
    said = brimful("classify", files.classifier, write_rows(tmp_path, "jsonl"), *FP32, "--verify", 0, "-o", output)
    assert (said.code, said.out) == (0, ""), said.err
    expected = lines(brimful("classify", files.classifier, tmp_path / "rows.jsonl", *FP32, "--verify", 0).out)
    found = read_back(output)
    for name in expected[0]:
        theirs, ours = ([row[name] for row in rows] for rows in (expected, found))
        if name == "score":
            assert [float(score) for score in ours] == pytest.approx(theirs, abs=SCORE)
        elif name != "error":
            assert [str(value).lower() for value in ours] == [str(value).lower() for value in theirs]
    assert manifest(output)["status"] == "finished"


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.is_dir() or path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    with pa.input_stream(path, compression=CODECS.get(path.suffix)) as file:
        text = file.read().decode()
    if "json" in path.name:
        return lines(text)
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if ".tsv" in path.name else ","))


# --- pipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_pipe_that_stays_open_is_answered_row_by_row_and_ends_when_told_to(files: Files) -> None:
    """Answers come before the next row is written; SIGTERM ends a pass that waits for one."""
    command = [sys.executable, "-m", "brimful", "classify", str(files.classifier), "-", *FP32]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:  # type: ignore[call-overload]
        try:
            for number, text in enumerate(["good", "the film was bad", "superb"]):
                process.stdin.write(jsonl([{"text": text, "id": number}]))
                process.stdin.flush()
                assert select.select([process.stdout], [], [], 120)[0], "no answer while the pipe is open"
                answer = json.loads(process.stdout.readline())
                assert (answer["text"], answer["id"], answer["label"] in ("bad", "good")) == (text, number, True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()
        said = process.stderr.read().decode()
    assert said.splitlines()[-2:] == ["error: stopped after 3 rows", "hint: start it again"]
    assert "Fatal" not in said
    assert "Traceback" not in said


# --- rows that cannot be read ---------------------------------------------------------------------------------------


def test_bad_lines_keep_their_place_and_say_why(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_bytes(
        b'{"id": 0, "text": "good"}\nno json\n{"id": 2, "text": "bad"}\n{"id": 3, "text": "\\ud800"}\n'
        b'[1, 2]\n{"id": 5, "text": "caf\xff"}\n{"id": 6, "text": "fine"}\n'
    )
    said = brimful("classify", files.classifier, data)
    found = lines(said.out)
    assert said.code == 0
    assert len(found) == 7
    assert [row["label"] is None for row in found] == [row["error"] is not None for row in found]
    assert [row["error"] is not None for row in found] == [False, True, False, True, True, True, False]
    assert all(len(row["error"]) > 10 for row in found if row["error"])
    assert "warning: 4 (57.1 %) of 7 rows were not read or classified in full: see the column `error`" in said.err


def test_a_value_that_does_not_fit_costs_no_label(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Nor is it lost: `error` has it. A key that the first rows lack is in the summary, the page and the record."""
    data, output, page = tmp_path / "d.jsonl", tmp_path / "out.jsonl", tmp_path / "page.html"
    rows = [{"text": "good film", "price": 1, "more": "x" * (BLOCK_BYTES // 2)}] * 2  # by which columns get types
    data.write_bytes(jsonl([*rows, {"text": "bad film", "price": "A17", "seller": "x"}, {"text": None, "price": "B2"}]))
    said = brimful("classify", files.classifier, data, "--output", output, "--report", page)
    assert said.code == 0
    misfit, without = read_back(output)[-2:]
    assert (misfit["price"], misfit["error"]) == (None, "column 'price' holds whole numbers, not this: '\"A17\"'")
    assert misfit["label"] in ("bad", "good")
    assert (without["label"], without["error"]) == (None, "column 'price' holds whole numbers, not this: '\"B2\"'")
    assert "warning: 2 (50.0 %) of 4 rows were not read or classified in full" in said.err
    left_out = "left out, as the first rows do not have it: 'seller'"
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["record"]["notes"] == [f"{data}: {left_out}"]
    assert said.err.count(left_out) == 1
    assert "seller" in page.read_text()


def test_a_csv_row_of_another_length_keeps_its_place(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,text\n0,good\n1,bad,too,many\n2,fine\n", "utf-8")
    found = lines(brimful("classify", files.classifier, tmp_path / "d.csv").out)
    assert [row["error"] is None for row in found] == [True, False, True]
    assert [row["label"] is None for row in found] == [False, True, False]


def test_nasty_strings_come_back_as_they_were(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    texts = [
        "good",
        "x" * 100_000,
        "\u05e9\u05dc\u05d5\u05dd \u202eabc",
        "\U0001f469\u200d\U0001f467",
        "a\x00b",
        "\x00",
    ]
    texts += ["\x1b[31m\x07\x7f\x9b\u2028\x85", "\ufeff\uffff\U0010ffff", "e\u0301", 'a,"b"\r\nc\t']
    (tmp_path / "d.jsonl").write_bytes(jsonl([{"text": text} for text in texts]))
    with package.Classifier(files.classifier, precision="fp32") as classifier:
        expected = classifier(texts)
    for name in ("out.jsonl", "out.parquet", "out.csv"):
        said = brimful("classify", files.classifier, tmp_path / "d.jsonl", *FP32, "-o", tmp_path / name)
        assert said.code == 0, said.err
        csv.field_size_limit(1 << 20)
        found = read_back(tmp_path / name)
        assert [row["text"] for row in found] == texts
        answers = [{"label": row["label"], "score": float(row["score"])} for row in found]
        same_objects(answers, expected)


def test_more_errors_than_allowed_stop_the_pass_and_a_mended_input_is_another_one(
    brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    data, output = tmp_path / "d.jsonl", tmp_path / "out.parquet"
    good = jsonl([{"text": "good film"}])
    data.write_bytes(good * 3 + b"no json\n" + good * 2 + b"nor this\n" + good)
    words = ("classify", files.classifier, data, "--output", output)

    assert brimful(*words, "--max-errors", 2).code == 0
    output.unlink()
    (tmp_path / "out.parquet.manifest.json").unlink()
    said = brimful(*words, "--max-errors", 1)
    assert said.code == 2
    *_, error, hint = said.err.splitlines()
    assert "2 rows have an error, more than --max-errors 1" in error
    assert "d.jsonl" in error
    assert "row 4" in error
    assert hint == "hint: mend the rows and begin anew, or go on with --resume and a higher --max-errors"
    assert not output.exists()

    said = brimful(*words, "--max-errors", 1, "--resume")  # errors of earlier runs count
    assert said.code == 2
    assert "2 rows of the run to resume have an error" in said.err.splitlines()[-2]
    assert brimful(*words, "--max-errors", 5, "--resume").code == 0  # the same rows, more patience
    assert pq.read_table(output).num_rows == 8


def test_a_mended_input_is_not_resumed(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data, output = tmp_path / "d.jsonl", tmp_path / "out.parquet"
    data.write_bytes(jsonl([{"text": "good film"}]) + b"no json\n")
    words = ("classify", files.classifier, data, "--output", output)
    assert brimful(*words, "--max-errors", 0).code == 2
    data.write_bytes(jsonl([{"text": "good film"}] * 2))

    said = brimful(*words, "--max-errors", 0, "--resume")
    assert said.code == 2
    assert "the input" in said.err.splitlines()[-2]


# --- stopped, and resumed -------------------------------------------------------------------------------------------


class Stopper(Callbacks):
    """Sends a signal to this process when so many rows are done."""

    def __init__(self, number: signal.Signals, after_rows: int) -> None:
        self._number, self._after_rows = number, after_rows

    def count(self, done: int, total: int | None, share: float | None) -> None:
        if done >= self._after_rows:
            self._after_rows = 1 << 60
            os.kill(os.getpid(), self._number)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten windows: on a CPU each ends with the row that makes it a megabyte of text."""
    path = tmp_path_factory.mktemp("many") / "rows.jsonl"
    path.write_bytes(jsonl([{"id": i, "text": review(i % 3 == 0, i) + " " + "x" * 4096} for i in range(2560)]))
    return path


@pytest.fixture(scope="module")
def undisturbed(many: Path, files: Files) -> dict[str, bytes]:
    """The results of an undisturbed pass, by name."""
    found = {}
    for name in ("out.jsonl", "out.parquet"):
        package.classify(files.classifier, many, many.parent / name, max_length=16, verify=8)
        found[name] = (many.parent / name).read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_pass_that_was_stopped_goes_on_to_the_same_bytes(
    name: str,
    number: signal.Signals,
    code: int,
    many: Path,
    undisturbed: dict[str, bytes],
    files: Files,
    tmp_path: Path,
) -> None:
    output = tmp_path / name
    with pytest.raises(Interrupted) as caught:
        package.classify(
            files.classifier, many, output, max_length=16, verify=8, callbacks=Stopper(number, after_rows=500)
        )
    assert caught.value.exit_code == code
    assert "the same command with --resume goes on" in (caught.value.hint or "")
    assert not output.exists()

    said = call("classify", files.classifier, many, "--output", output, "--max-length", 16, "--verify", 8, "--resume")
    assert said.code == 0, said.err
    assert output.read_bytes() == undisturbed[name]
    assert "going on after" in said.err
    resumed = manifest(output)["record"]["resumed_rows"]
    assert 500 <= resumed < 2560
    assert manifest(output)["record"]["counts"]["num_rows"] == 2560

    again = call("classify", files.classifier, many, "--output", output, "--max-length", 16, "--verify", 8, "--resume")
    assert again.code == 0
    assert "is finished: there is nothing to do" in again.err
    other = call("classify", files.classifier, many, "--output", output, "--max-length", 15, "--verify", 8, "--resume")
    assert other.code == 2
    assert "--max-length" in other.err.splitlines()[-2]


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_with_the_same_labels_for_all(multi_label: bool, nli: Path, brimful: Brimful, tmp_path: Path) -> None:
    labels, more = GOOD[:2] + BAD[:2], ["--multi-label", "--threshold", "0.3"] if multi_label else []
    data = write_rows(tmp_path, "jsonl")
    said = brimful("classify", nli, data, *FP32, "--labels", ", ".join(labels), "--top-k", 0, "--logits", *more)
    assert said.code == 0, said.err
    found = lines(said.out)
    with package.Classifier(nli, precision="fp32") as classifier:
        expected = classifier([row["text"] for row in ROWS], labels=labels, multi_label=multi_label)
    for row, answer in zip(found, expected, strict=True):
        same_objects(row["scores"], pairs(answer))
        given = [each for each in pairs(answer) if each["score"] >= 0.3]
        if multi_label:
            assert row["label"] == [each["label"] for each in given]
            same_objects(row["score"], [each["score"] for each in given])
        else:
            assert row["label"] == answer["labels"][0]
            same_objects(row["score"], answer["scores"][0])
        assert [len(logits) for logits in row["logits"]] == [3] * len(labels)


def pairs(answer: dict[str, Any]) -> list[dict[str, Any]]:
    both = zip(answer["labels"], answer["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in both]


@pytest.mark.parametrize("listed", [False, True])
def test_zero_shot_with_labels_of_each_row(listed: bool, nli: Path, brimful: Brimful, tmp_path: Path) -> None:
    own = [["good", "bad"], ["dull"], [], ["sad", "film", "good"]] * 3
    rows = [
        {"text": row["text"], "choices": labels if listed else ",".join(labels)}
        for row, labels in zip(ROWS, own, strict=False)
    ]
    (tmp_path / "d.jsonl").write_bytes(jsonl(rows))
    said = brimful("classify", nli, tmp_path / "d.jsonl", *FP32, "--labels", "column:choices", "--top-k", 0)
    assert said.code == 0, said.err
    with package.Classifier(nli, precision="fp32") as classifier:
        for row, labels in zip(lines(said.out), own, strict=True):
            if labels:
                same_objects(row["scores"], pairs(classifier(row["text"], labels=labels)))
            else:
                assert (row["label"], row["score"], row["error"]) == (None, None, None)


def test_what_zero_shot_takes_for_granted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """A model without entailment, and the second of two texts: said at once, the guess on record too."""
    (tmp_path / "d.csv").write_text("sentence1,sentence2\na good film,a bad film\n", "utf-8")
    said = brimful("classify", files.classifier, tmp_path / "d.csv", "--labels", "a,b", "-o", tmp_path / "out.jsonl")
    assert said.code == 0
    guess = "no label of the model begins with 'entail' (bad, good): its last output is taken for entailment"
    assert f"warning: {guess}" in said.err
    assert "text: column 'sentence1' (by name; 'sentence2' is not read: zero-shot asks about one text" in said.err
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["record"]["notes"] == [guess]
    (tmp_path / "d.csv").write_text("text,text_pair\na good film,a bad film\n", "utf-8")
    said = brimful("classify", files.classifier, tmp_path / "d.csv", "--labels", "a,b")
    assert "warning: 'text_pair' is not read: zero-shot asks about one text a row; --text-column names it" in said.err


@pytest.mark.parametrize(("flags", "task"), [([], "single_label"), (["--multi-label"], "multi_label")])
def test_labels_of_zero_shot_on_record(
    flags: list[str], task: str, nli: Path, brimful: Brimful, tmp_path: Path
) -> None:
    output, page = tmp_path / "out.csv", tmp_path / "page.html"
    rest = [*FP32, *flags, "--output", output, "--report", page]
    said = brimful("classify", nli, write_rows(tmp_path, "jsonl"), "--labels", "good,film,z", *rest)
    assert said.code == 0, said.err
    record = manifest(output)["record"]
    assert record["labels"] == {"task": task, "names": ["good", "film", "z"], "values": {}}
    absent = [name for name in ("good", "film", "z") if name not in record["counts"]["labels"]]
    never = f"Never given: {', '.join(absent)}."
    assert (never in said.err) == (never in page.read_text("utf-8")) == bool(absent)
    assert not any(name in said.err for name in NLI)


def test_rows_without_candidate_labels_and_with_one_twice(nli: Path, brimful: Brimful, tmp_path: Path) -> None:
    own = ["good,bad", "", None, "a, b,a", "dull", " , ", "film,good", "x"]
    rows = [{"text": row["text"], "choices": labels} for row, labels in zip(ROWS, own, strict=False)]
    rows += [{"text": "", "choices": "good"}, {"text": None, "choices": None}]
    (tmp_path / "d.jsonl").write_bytes(jsonl(rows))
    output, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    command = ["classify", nli, tmp_path / "d.jsonl", *FP32, "--labels", "column:choices", "--output", output]
    said = brimful(*command, "--report", page)
    assert said.code == 0, said.err
    twice = "the candidate label 'a' is there twice"
    assert [row["error"] for row in lines(output.read_bytes())] == [None] * 3 + [twice] + [None] * 6
    answered = [row["label"] is not None for row in lines(output.read_bytes())]
    assert answered == [True, False, False, False, True, False, True, True, False, False]
    record = manifest(output)["record"]
    counts = {name: record["counts"][f"num_{name}"] for name in ("rows", "empty", "unlabelled", "errors")}
    assert counts == {"rows": 10, "empty": 2, "unlabelled": 3, "errors": 1}
    assert record["labels"]["names"] == sorted(record["counts"]["labels"])
    shown = page.read_text("utf-8")
    for text in (said.err, shown):
        assert "of 10 rows had no candidate labels, and have no answer" in text
        assert "of 10 rows had no text, and have no answer" in text
        assert "Never given" not in text
    again = brimful(*command, "--resume")
    assert "is finished: there is nothing to do" in again.err


def test_a_column_of_labels_that_is_not_there(nli: Path, brimful: Brimful, tmp_path: Path) -> None:
    said = brimful("classify", nli, write_rows(tmp_path, "jsonl"), "--labels", "column:labels")
    assert said.code == 2
    assert "no such column: 'labels'" in said.err


def test_top_k_threshold_and_logits(brimful: Brimful, tmp_path: Path) -> None:
    model, data = save_classifier(tmp_path / "m", ["a", "b", "c"]), write_rows(tmp_path, "jsonl")
    with package.Classifier(model, precision="fp32") as classifier:
        texts = [row["text"] for row in ROWS]
        expected, logits_NC = classifier(texts, top_k=2), classifier.logits(texts)
    between = sorted(answer[0]["score"] for answer in expected)[12] + 1e-4

    said = brimful("classify", model, data, *FP32, "--top-k", 2, "--threshold", between, "--logits")
    assert said.code == 0, said.err
    found = lines(said.out)
    assert 0 < sum(row["label"] is None for row in found) < len(found)
    for row, answer, logits_C in zip(found, expected, logits_NC, strict=True):
        same_objects(row["scores"], answer)
        assert row["label"] == (answer[0]["label"] if answer[0]["score"] >= between else None)
        assert row["score"] == pytest.approx(answer[0]["score"], abs=SCORE)
        assert row["logits"] == pytest.approx(logits_C.tolist(), abs=SCORE)


# --- what is on record ----------------------------------------------------------------------------------------------


def test_the_report_the_document_and_the_manifest_say_the_same(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    output, page = tmp_path / "out.parquet", tmp_path / "page.html"
    said = brimful(
        "classify", files.classifier, files.reviews, *FP32, "-o", output, "--report", page, "--json", "--verify", 16
    )
    assert said.code == 0, said.err
    document, record = json.loads(said.out), manifest(output)["record"]
    assert document == record
    assert record["equivalence"]["num_rows"] == 16
    assert record["equivalence"]["passed"]
    assert 0 <= record["equivalence"]["largest_difference"] < 1e-5
    assert record["fallback"] is None
    assert record["counts"]["num_rows"] == 40
    html = page.read_text("utf-8")
    assert html.startswith("<!")
    assert "16 of your own rows also went through the plain Hugging Face model in fp32" in html
    assert "has the same label in 16 of 16 rows" in said.err
    assert f"report: {page}" in said.err


def test_rows_with_errors_are_named(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """The first five, by file and row; a run that goes on has them of the one before it."""
    folder, output = tmp_path / "rows", tmp_path / "out"
    folder.mkdir()
    (folder / "a.csv").write_text("text\ngood film\none,too many\nfine\n", "utf-8")
    (folder / "b.csv").write_text("text\n" + "one,too many\n" * 6, "utf-8")
    options = ("classify", files.classifier, folder, *FP32, "-o", output, "--shard-rows", 2)
    said = brimful(*options)
    found = manifest(output)["record"]["counts"]["first_errors"]
    expected = [("a.csv", 2), *[("b.csv", row) for row in range(1, 5)]]
    assert [(Path(each["file"]).name, each["row"]) for each in found] == expected
    assert f"row 4 of {folder / 'b.csv'}: 2 columns, the header has 1: 'one,too many'" in said.err
    assert "row 5 of" not in said.err
    again = brimful(*options, "--resume")
    assert again.code == 0, again.err
    assert manifest(output)["record"]["counts"]["first_errors"] == found


def test_texts_to_compare_are_looked_for_across_files(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    blank = {"id": 0, "text": " "}
    for name, rows in (("a", [blank] * 30), ("b", [*ROWS[:2], blank]), ("c", ROWS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    said = brimful("classify", files.classifier, folder, *FP32, "-o", tmp_path / "o.jsonl", "--verify", 8)
    assert "same label in 8 of 8 rows" in said.err
    nothing = tmp_path / "blank.jsonl"
    nothing.write_text((json.dumps(blank) + "\n") * 30, "utf-8")
    said = brimful("classify", files.classifier, nothing, *FP32, "-o", tmp_path / "n.jsonl", "--verify", 8)
    assert "nothing was compared with the plain model: none of the first 30 rows can be asked about" in said.err
    assert "warning: nothing was compared with the plain model: none of the first rows" in said.err
    assert "Equivalence check  not run: nothing was compared with the plain model (none of the first rows" in said.err


def test_without_verify_nothing_is_compared_and_that_is_said(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    said = brimful("classify", files.classifier, files.reviews, "--output", output, "--verify", 0)
    assert "Equivalence check  not run: nothing was compared with the plain model (--verify)" in said.err
    assert manifest(output)["record"]["equivalence"] is None


def test_a_launch_that_was_asked_for_gives_way_where_padded_rows_must_run(
    brimful: Brimful, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs need a GPU and packed rows: which launch is asked for is seen here, and left out."""
    asked: list[tuple[str, str, bool]] = []
    attention: list[str] = []
    models: list[Any] = []
    change = PreTrainedModel.set_attn_implementation

    def heard(model: Any, name: Any, *more: Any, **named: Any) -> None:
        """Not of an instance: a copy that is checked would change the model, and fail, which is kept on disk."""
        if any(model is each for each in models):
            attention.append(name)
        change(model, name, *more, **named)

    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", heard)

    def make(checked: Any, options: Any, precision: Any, **given: Any) -> Any:
        asked.append((precision.value, options.execution, options.packing == "auto"))
        runner = make_runner(checked, dataclasses.replace(options, execution="eager"), precision, **given)
        models.append(runner.model)
        return runner

    monkeypatch.setattr(verify, "make_runner", make)
    monkeypatch.setattr(
        verify,
        "compare_answers",
        lambda *given, **named: dataclasses.replace(compare_answers(*given, **named), passed=False),
    )
    output = tmp_path / "out.jsonl"
    said = brimful(
        "classify",
        files.classifier,
        files.reviews,
        "--execution",
        "captured",
        "--precision",
        "bf16",
        "--output",
        output,
    )
    assert said.code == 0, said.err
    assert asked == [
        ("fp32", "eager", False), ("bf16", "captured", True), ("fp32", "captured", True), ("fp32", "auto", False),
    ]  # fmt: skip
    assert attention[0] == "eager", "the reference"


def test_where_bf16_says_something_else_fp32_runs_and_everybody_is_told(
    brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    """The head's weights are 180 times as large: bf16's rounding decides."""
    model = save_classifier(tmp_path / "m", ["bad", "good"])
    tensors = load_file(model / "model.safetensors")
    tensors["classifier.weight"] *= 180
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    texts = [row["text"] for row in ROWS]
    with package.Classifier(model, precision="fp32") as classifier:
        tensors["classifier.bias"] -= torch.from_numpy(classifier.logits(texts).mean(axis=0))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    output = tmp_path / "out.jsonl"

    said = brimful("classify", model, write_rows(tmp_path, "jsonl"), "--precision", "bf16", "--output", output)

    assert said.code == 0, said.err
    record = manifest(output)["record"]
    assert "bf16, packed differs from the plain fp32 model by up to" in record["fallback"]
    assert record["equivalence"]["precision"] == "fp32"
    assert {lever["name"]: lever["value"] for lever in record["recipe"]["levers"]}["precision"] == "fp32"
    assert f"warning: {record['fallback']}" in said.err
    assert "warning: a slower path ran than planned: on 24 rows, bf16" in said.err
    with package.Classifier(model, precision="fp32") as classifier:
        expected = [answer["label"] for answer in classifier(texts)]
    assert [row["label"] for row in lines(output.read_bytes())] == expected
