"""Small jobs: mistakes answered before torch is imported, few rows compared, nothing replaced without a word."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import brimful as package
from brimful.core.callbacks import Callbacks
from brimful.core.errors import Interrupted
from brimful.engine.classification.verify import rows_to_compare
from brimful.engine.classification.windows import WindowSize
from commands import Brimful, Files
from tiny_files import write_csv, write_reviews

#: A command line whose process says at its end if torch was imported.
_WITHOUT_TORCH = """
import sys
from brimful.cli.commands import run
code = run(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


def without_torch(words: Sequence[object], folder: Path, code: int = 2) -> str:
    """Output of a command line in `folder` that ends with this exit code and imports no torch."""
    command = [sys.executable, "-c", _WITHOUT_TORCH, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.stdout.splitlines()[-1] == f"{code} False", done.stderr
    return done.stderr + done.stdout


@pytest.mark.thorough
def test_mistakes_are_answered_before_torch_is_imported(files: Files, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": "bert"}')
    mistakes = {
        "there is no such file": ["train", "none.csv", "--model", files.base, "--output", tmp_path / "a"],
        "no such column: 'txet'": ["classify", files.classifier, files.reviews, "--text-column", "txet"],
        "torn: no weights": ["classify", tmp_path / "torn", files.reviews],
        "is a run that has not finished": ["classify", run, files.reviews],
        "already holds a run": ["train", files.reviews, "--model", files.base, "--output", run],
        "holds no run\nhint: did you mean": ["export", run / "model"],
        "is a file, and a model is a folder\nhint: the model comes first:": [
            "classify",
            files.reviews,
            files.classifier,
        ],
        "the hub cannot be reached": ["classify", "no-such-model-here", files.reviews],
    }
    for said, words in mistakes.items():
        assert said in without_torch(words, tmp_path)


@pytest.mark.slow
def test_mistakes_in_options_and_rows_are_answered_before_torch_is_imported(files: Files, tmp_path: Path) -> None:
    """Guesses that led to a mistake in the rows are said before it."""
    unlabelled = write_csv(tmp_path / "texts.csv", ("text",), [["a film"], ["a story"]])
    single = write_csv(tmp_path / "single.csv", ("text", "kind"), [(f"a film {i}", f"kind {i}") for i in range(20)])
    train = ["train", files.reviews, "--model", files.base, "--output", tmp_path / "run"]
    mistakes: dict[tuple[str, ...], list[object]] = {
        ("--freeze has layers 0-99", "counted from 0: layers 0-"): [*train, "--freeze", "layers 0-99"],
        ("error: texts.csv: no column can be the label", "hint: name it by --label-column; columns: text"): [
            "train",
            unlabelled.name,
            *train[2:],
        ],
        ("label: column 'kind'", "20 rows are too few to hold out 0.1 of them"): ["train", single.name, *train[2:]],
    }
    if importlib.util.find_spec("bitsandbytes") is None:
        mistakes["--optim lion_8bit needs the package bitsandbytes",] = [*train, "--optim", "lion_8bit"]
    if not torch.version.cuda or not torch.cuda.is_available():
        for words in (train, ["classify", files.classifier, files.reviews]):
            mistakes["--device cuda was asked for, and torch sees no GPU", str(words[0])] = [*words, "--device", "cuda"]
        mistakes["--gpus is 2, and there is no GPU to run on",] = [*train, "--gpus", "2"]
    for parts, words in mistakes.items():
        said = without_torch(words, tmp_path)
        assert all(part in said for part in parts if part not in ("train", "classify")), said


@pytest.mark.slow
def test_answers_in_a_file_are_scored_without_torch(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    assert brimful("classify", files.classifier, files.reviews, "-o", tmp_path / "out.csv", "--verify", 0).code == 0
    said = without_torch(["evaluate", "out.csv", "--report", "page.html"], tmp_path, 0)
    assert "Evaluated  40 rows" in said
    assert "balanced accuracy" in said
    assert (tmp_path / "page.html").is_file()


def test_a_finished_run_is_not_its_model(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "model").symlink_to(files.classifier)
    said = brimful("classify", tmp_path / "run", files.reviews).err
    assert "is a run, not a model" in said
    assert f"hint: its model is {tmp_path}/run/model" in said


def test_an_output_of_somebody_else_is_not_replaced(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "notes.csv"
    out.write_text("my notes\n")
    words = ("classify", files.classifier, files.reviews, "-o", out, "--verify", 0)
    said = brimful(*words)
    assert (said.code, out.read_text()) == (2, "my notes\n")
    assert "is there already, and was not made by brimful" in said.err
    assert "add --overwrite" in said.err
    assert brimful(*words, "--overwrite").code == 0
    said = brimful(*words)
    assert (said.code, "holds the results of an earlier run, and is replaced at the end" in said.err) == (0, True)


def test_rows_that_are_compared(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """On a CPU those of a fortieth of all tokens; the comparison has a stage and a time of its own."""
    rows_of_400 = [rows_to_compare(None, "cpu", 400 * rows, 400) for rows in (0, 10, 300, 1000, 100_000)]
    assert rows_of_400 == [256, 8, 8, 25, 256]
    assert (rows_to_compare(None, "cpu", 3300, 33), rows_to_compare(None, "cpu", 1e6, 8192)) == (62, 8)
    assert (rows_to_compare(None, "cuda", 300, 30), rows_to_compare(7, "cpu", 300, 30)) == (256, 7)
    said = brimful("classify", files.classifier, write_reviews(tmp_path / "rows.csv", 200), "-o", tmp_path / "out.csv")
    number = 2048 // 13  # tokens of these reviews
    assert f"computing {number} rows by the plain fp32 model, to compare with (--verify)" in said.err
    assert "comparing with the plain model (--verify)" in said.err
    assert f"in {number} of {number} rows" in said.err


def test_windows_of_a_cpu_are_a_few_seconds_work() -> None:
    """Of BERT-large fewer rows than of a tiny model, and never fewer than one."""
    sizes = [WindowSize.on("cpu", sequences_per_row=1, token_operations=n).num_bytes for n in (1e5, 2e7, 6e8, 1e11)]
    assert sizes == [1 << 20, 100_000, 4096, 4096]
    assert WindowSize.on("cuda", sequences_per_row=1, token_operations=6e8).num_bytes == 4 << 20


class _Stopping(Callbacks):
    """Sends Ctrl-C to this process when the first rows are written."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.sent = False

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)

    def stage(self, text: str) -> None:
        self.stages.append(text)


@pytest.mark.thorough
def test_ctrl_c_is_answered_and_goes_on(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work under way is left undone; the results are those of an uninterrupted run."""
    monkeypatch.setattr("brimful.engine.classification.windows._FEWEST_BYTES", 64)
    monkeypatch.setattr("brimful.engine.classification.windows._CPU_OPERATIONS", 1.0)
    data, words = write_reviews(tmp_path / "rows.csv", 200), {"verify": 0, "num_workers": 0}
    whole, out, callbacks = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", _Stopping()
    package.classify(files.classifier, data, whole, **words)
    with pytest.raises(Interrupted):
        package.classify(files.classifier, data, out, callbacks=callbacks, **words)
    assert "stopping: what is answered is written" in callbacks.stages
    package.classify(files.classifier, data, out, resume=True, **words)
    assert out.read_bytes() == whole.read_bytes()
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 200
