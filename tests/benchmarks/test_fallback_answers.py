"""The benchmark of answers by architecture, run small, and the script that runs all benchmarks in a budget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[..., dict[str, ModuleType]]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_both_sides_answer_the_same_texts(load: Load, tmp_path: Path) -> None:
    answers = load("fallback", "answers")["answers"]
    plan = {"work": "fnet", "scale": "smoke", "shapes": ["short"], "texts": 16, "repeats": 1, "threads": 1}
    plan |= {"max_length": None}
    rows = list(answers.architecture(plan, tmp_path, None))
    assert [row["side"] for row in rows] == ["brimful", "pipeline"]
    assert rows[0]["agreement"] == 1.0
    assert rows[0]["recipe"]["packing"] == "padded"
    assert rows[1]["settings"]["batch_size"] in answers.BATCHES["cpu"]
    assert all(each["texts"] == 16 and each["cpu_s"] > 0 for row in rows for each in row["rounds"])


def test_the_fastest_setting_counts_by_seconds_of_the_cpu(load: Load) -> None:
    answers = load("fallback", "answers")["answers"]

    def row(side: str, cpu_s: float, **settings: Any) -> dict[str, Any]:
        made: dict[str, Any] = {
            "work": "fnet", "shape": "short", "side": side, "settings": settings, "gpu": "CPU", "commit": "1234567",
            "host": {}, "versions": {}, "call": "1", "dtype": "fp32", "recipe": {"packing": "padded"}, "agreement": 1.0,
        }  # fmt: skip
        return made | {"rounds": [{"texts": 100, "seconds": 1.0, "cpu_s": cpu_s}]}

    records = [
        row("brimful", 1.0),
        row("pipeline", 2.0, batch_size=8, sorted=True),
        row("pipeline", 4.0, batch_size=1, sorted=False),
    ]
    made = [answers._row(record) for record in records]
    assert [each["texts_per_cpu_s"] for each in made] == [100.0, 50.0, 25.0]
    session = type("Session", (), {"known": lambda *_: records})()
    text = answers.table(answers.results(session))
    assert "| fnet | short | 50.0 | batches of 8, by length | 100.0 | 2.00 |" in text
    assert "0 of 1 below 1" in text


@pytest.mark.parametrize("parts", [["fallback", "answers"], ["training", "classification", "whole_command"]])
def test_every_part_is_called_with_an_output_of_its_own(parts: list[str], tmp_path: Path) -> None:
    words = ["--parts", *parts, "--name", "today", "--root", str(tmp_path), "--dry-run", "--smoke"]
    script = [sys.executable, str(BENCHMARKS / "everything.py")]
    done = subprocess.run([*script, *words], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == parts
    outputs = [line.partition("--output ")[2].split()[0] for line in lines]
    assert len({*outputs}) == len(parts)
    for line in lines:
        assert Path(line.split()[1]).is_file()
        assert "--smoke" in line
