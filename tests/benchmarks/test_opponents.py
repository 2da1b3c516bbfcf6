"""The fastest opponents of all committed logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[..., dict[str, ModuleType]]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def opponents(load: Load) -> ModuleType:
    return load(".", "opponents")["opponents"]


def test_the_table_is_that_of_the_logs(opponents: ModuleType) -> None:
    pairs = opponents.beside(list(opponents.seen()), "H200")
    assert (BENCHMARKS / "opponents.md").read_text("utf-8") == opponents.table(pairs, "H200"), (
        "run python benchmarks/opponents.py --write"
    )


def row(call: str, side: str, *samples: float, **more: object) -> dict[str, object]:
    rounds = [{"samples": each, "seconds": 1.0} for each in samples]
    facts = {"kind": "row", "ok": True, "smoke": False, "gpu": "NVIDIA H200", "work": "tweets/base"}
    return facts | {"call": call, "side": side, "rounds": rounds} | more


def write(folder: Path, lines: list[dict[str, object]]) -> None:
    (folder / "training" / "DATE").mkdir(parents=True)
    (folder / "training" / "DATE" / "raw.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_ours_is_the_newest_and_theirs_the_fastest_of_any_host(opponents: ModuleType, tmp_path: Path) -> None:
    lines = [
        row("1", "hf", 1000.0, 1100.0, 400.0),
        row("1", "brimful", 9000.0, 9100.0, 8000.0),
        row("2", "hf", 800.0),
        row("2", "brimful", 8800.0, 8900.0, 7500.0, commit="abc"),
        row("3", "hf", 5000.0, smoke=True),
        row("3", "hf", 5000.0, ok=False),
        row("3", "hf", 5000.0, gpu="NVIDIA H100"),
        row("2", "", 1200.0, kind="trial"),
        row("2", "hf", work="bbc/base", kind="sweep", tried=[{"rounds": []}, {"error": "no"}]),
    ]
    write(tmp_path, lines)
    [(ours, theirs)] = opponents.beside(list(opponents.seen(tmp_path)), "H200")
    assert (ours.rate, ours.call, ours.commit) == (8800, "2", "abc")
    assert (theirs.rate, theirs.call) == (1200, "2")
    assert "| 8,800 | 1,200, Trainer | 7.3 (6.2 to 7.4) |" in opponents.table([(ours, theirs)], "H200")


def test_a_gpu_that_is_shared_counts_for_them_alone(opponents: ModuleType, tmp_path: Path) -> None:
    """And what their process found before it was ended for want of time."""
    lines = [
        row("1", "brimful", 9000.0, nvml_bytes=1),
        row("2", "brimful", 8000.0, nvml_bytes=None),
        row("2", "hf", 1000.0, nvml_bytes=None),
        row("2", "hf", 1100.0, nvml_bytes=None, ok=False, timed_out=True),
    ]
    write(tmp_path, lines)
    [(ours, theirs)] = opponents.beside(list(opponents.seen(tmp_path)), "H200")
    assert (ours.rate, theirs.rate) == (9000, 1100)
