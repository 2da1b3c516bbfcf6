"""`--launcher ray`: refused in a line without Ray; with it, two workers on this machine's CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import brimful
from brimful.cli.commands import run
from brimful.core.errors import OptionError
from tiny_files import save_base, save_classifier, write_reviews

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
RAY = ["--device", "cpu", "--launcher", "ray", "--num-processes", "2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    save_classifier(folder / "model", ["bad", "good"])
    save_base(folder / "base")
    (folder / "rows").mkdir()
    for number in range(3):
        write_reviews(folder / "rows" / f"{number}.csv", 40)
    return folder


def test_refused_without_ray(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["classify", str(home / "model"), str(home / "rows" / "0.csv"), "-o", str(tmp_path / "out.csv"), *RAY]
    assert run(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        "error: --launcher ray needs Ray, which is not installed",
        "hint: pip install 'brimful[ray]', or start the processes with torchrun",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_processes": 2}, "--num-processes is for --launcher ray"),
        ({"launcher": "ray", "gpus": "2"}, "--gpus and --launcher ray are both given"),
        ({"launcher": "ray", "num_processes": 0}, "--num-processes is 0"),
        ({"launcher": "ray"}, "is of the command line"),
    ],
)
def test_refused(more: dict[str, object], said: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=said):
        brimful.classify(home / "model", home / "rows" / "0.csv", tmp_path / "out.csv", **more)
    with pytest.raises(OptionError, match=said):
        brimful.evaluate(home / "model", home / "rows" / "0.csv", output=str(tmp_path / "out.csv"), **more)


def test_an_evaluation_elsewhere_needs_a_file(home: Path, tmp_path: Path) -> None:
    for given in ((home / "model", home / "rows" / "0.csv"), (home / "rows" / "0.csv",)):
        with pytest.raises(OptionError, match="--launcher ray starts processes elsewhere"):
            brimful.evaluate(*given, launcher="ray")


def brimful_on_ray(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "brimful", *map(str, words), *RAY]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@with_ray
def test_a_training_of_two_workers(home: Path, tmp_path: Path) -> None:
    given = ("train", home / "rows" / "0.csv", "--model", home / "base", "--output", tmp_path / "run")
    ended = brimful_on_ray(*given, "--num-train-epochs", "1", "--no-baselines", "--batch-size", "8")
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert {"processes": "2"}.items() <= {each["name"]: each["value"] for each in record["recipe"]["levers"]}.items()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@with_ray
@pytest.mark.parametrize("how", ["together", "by claims"])
def test_a_classification_by_two_workers(how: str, home: Path, tmp_path: Path) -> None:
    more = ["--claim"] if how == "by claims" else []
    ended = brimful_on_ray("classify", home / "model", home / "rows" / "*.csv", "-o", tmp_path / "out", *more)
    assert ended.returncode == 0, ended.stderr
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(files) == (3 if more else 1)
    assert sum(pq.read_metadata(file).num_rows for file in files) == 120


@with_ray
def test_an_evaluation_by_two_workers(home: Path, tmp_path: Path) -> None:
    """Its answers are in a file, and its metrics, those of one process, are what it prints."""
    answers, rows = tmp_path / "answers.csv", home / "rows" / "0.csv"
    ended = brimful_on_ray("evaluate", home / "model", rows, "-o", answers)
    assert ended.returncode == 0, ended.stderr
    alone = brimful.evaluate(home / "model", rows, output=str(tmp_path / "alone.csv"), device="cpu")
    assert answers.read_bytes() == (tmp_path / "alone.csv").read_bytes()
    assert f"{alone.metrics['accuracy'].value:.4f}" in ended.stdout + ended.stderr


@with_ray
def test_the_exit_code_is_that_of_the_command(home: Path, tmp_path: Path) -> None:
    given = ("classify", home / "model", home / "rows" / "0.csv", "-o", tmp_path / "out.csv", "--max-length", "1000")
    ended = brimful_on_ray(*given)
    assert ended.returncode == 2, ended.stderr
    assert "positions for 80 tokens" in ended.stderr + ended.stdout
