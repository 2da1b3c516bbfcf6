"""Files without a header, on the command line and in Python: what is told, and what the flags do."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

import brimful as package
from brimful.core.errors import OptionError
from commands import Brimful, Files, train_words
from tiny_files import review


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """24 reviews without a header."""
    path = tmp_path / "bare.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([review(bool(n % 2), n), ("bad", "good")[n % 2]] for n in range(24))
    return path


def options_of(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "run.json").read_text())["options"])


@pytest.mark.slow
def test_training_tells_of_a_lost_row_and_the_flag_gives_it_back(
    bare: Path, brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    said = brimful(*train_words(bare, files.base, tmp_path / "lost", "--max-steps", 1))
    assert said.code == 0
    (note,) = json.loads((tmp_path / "lost" / "run.json").read_text())["data"]["notes"]
    assert "looks like a row" in note
    assert "warning: " in said.err
    assert "the first line looks like a row ('bad' is also a value of its column)" in " ".join(said.err.split())

    said = brimful(*train_words(bare, files.base, tmp_path / "run", "--no-header", "--eval-split", 0))
    assert (said.code, "looks like a row" in said.err) == (0, False)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["data"]["rows"] == 24
    assert (record["options"]["header"], record["options"]["column_names"]) == (False, None)
    assert "--no-header" in shlex.split(record["command"])
    again = [word.replace("/run", "/again") for word in shlex.split(record["command"])[1:]]
    assert brimful(*again).code == 0
    assert options_of(tmp_path / "again")["header"] is False


def test_names_are_those_of_the_results(bare: Path, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    said = brimful("classify", files.classifier, bare, "-o", out, "--column-names", "review,truth", "--verify", 0)
    assert said.code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 24
    assert rows[0]["review"] == review(False, 0)
    assert rows[1]["truth"] == "good"
    record = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["record"]
    assert record["options"]["column_names"] == "review,truth"
    assert "--column-names review,truth" in record["command"]


def test_classification_tells_and_records_a_doubt(bare: Path, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    said = brimful("classify", files.classifier, bare, "-o", out, "--verify", 0)
    assert "looks like a row" in said.err
    record = json.loads((tmp_path / "out.csv.manifest.json").read_text())["record"]
    assert any("looks like a row" in note for note in record["notes"])
    assert record["counts"]["num_rows"] == 23
    said = brimful("classify", files.classifier, bare, "-o", tmp_path / "sure.csv", "--verify", 0, "--header")
    assert "looks like a row" not in said.err


def test_python_takes_a_list_of_names(bare: Path, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    record = package.classify(files.classifier, bare, out, column_names=["text", "truth"], verify=0)
    assert record.counts.num_rows == 24
    run = package.train(bare, model=files.base, output=tmp_path / "run", column_names=["text", "label"], dry_run=True)
    assert run.options["column_names"] == "text,label"
    with pytest.raises(OptionError, match="names are text without a comma"):
        package.classify(files.classifier, bare, out, column_names=["text,truth"])


def test_evaluation_rows_follow_the_flag_where_they_can(
    bare: Path, brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    named = tmp_path / "eval.jsonl"
    named.write_text("".join(json.dumps({"text": review(bool(n % 2), n), "label": "good"}) + "\n" for n in range(4)))
    for number, evaluation in enumerate((bare, named)):
        words = train_words(bare, files.base, tmp_path / f"run{number}", "--column-names", "text,label", "--dry-run")
        said = brimful(*words, "--eval-data", evaluation)
        assert said.code == 0, said.err


@pytest.mark.slow
def test_profile_takes_them_too(bare: Path, brimful: Brimful, files: Files) -> None:
    said = brimful("profile", bare, "--model", files.base, "--no-header", "--steps", 1, "--json")
    assert said.code == 0, said.err


def test_a_configuration_file_can_say_it(bare: Path, brimful: Brimful, files: Files, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("header: false\n")
    said = brimful(*train_words(bare, files.base, tmp_path / "run", "--config", config, "--dry-run"))
    assert (said.code, "looks like a row" in said.err) == (0, False)
