"""The classification benchmark, run small: what it writes, that it resumes, that sides agree, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny import FAMILIES

Load = Callable[..., dict[str, ModuleType]]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "classification" / "run.py"
FIELDS = {
    *("work", "side", "texts_per_s", "tokens_per_s", "settings", "gpu", "host", "commit", "cpu", "versions"),
    *("share_of_floor", "repeated_share"),
}


@pytest.fixture
def parts(load: Load) -> dict[str, ModuleType]:
    """The modules beside the script, by name."""
    return load("classification", "works", "floor", "settings", "sides", "pace", "report")


def script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--smoke", "--device", "cpu", "--output", str(folder / "output")]
    command += ["--inputs", str(folder / "inputs"), "--sides", "pipeline", "brimful", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.scripts
def test_measures_all_sides_of_a_row_once(tmp_path: Path) -> None:
    words = ("--precisions", "fp32", "--at-once", "2", "--rows", "tweets/minilm")
    first = script(tmp_path, *words)
    assert "| tweets/minilm | brimful |" in first.stdout
    assert "not measured yet" not in first.stdout
    output = tmp_path / "output"
    results = json.loads((output / "results.json").read_text("utf-8"))
    assert [r["side"] for r in results] == ["pipeline", "brimful", "brimful, logits"]
    for result in results:
        assert result.keys() >= FIELDS
        assert (result["work"], result["repeats"], result["gpu"]) == ("tweets/minilm", 2, "CPU")
        assert 0 < result["texts_per_s_range"][0] <= result["texts_per_s"] < result["tokens_per_s"]
        assert 0 < result["share_of_floor"] < 1
    theirs, ours, _ = results
    assert ours["ratio"] == pytest.approx(ours["texts_per_s"] / theirs["texts_per_s"])
    assert (ours["agreement"], ours["recipe"]["precision"]) == (1, "fp32")
    assert ours["largest_score_difference"] < 1e-5
    tried = {json.dumps(each["settings"]) for each in (theirs, *theirs["also_measured"])}
    assert len(tried) == 2
    assert all(setting in (output / "tried.md").read_text("utf-8") for setting in ("sorted True", "sorted False"))

    raw = (output / "raw.jsonl").read_text("utf-8")
    with (output / "raw.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"kind": "ro')  # a call that was killed
    second = script(tmp_path, *words)
    assert (output / "raw.jsonl").read_text("utf-8") == raw
    assert second.stdout == first.stdout
    late = script(tmp_path, *words, "bbc/minilm", "--budget-s", "0.1", "--dry-run").stdout
    assert "bbc/minilm: pipeline" in late
    assert "tweets/minilm" not in late


@pytest.mark.thorough
def test_sides_give_the_same_answers_to_every_kind_of_question(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    works, sides = parts["works"], parts["sides"]
    for name in ("tweets/minilm", "pairs/minilm", "zeroshot/minilm", "bbc/modernbert"):
        work = works.Work.parse(name)
        works.make_inputs(tmp_path, work, None, smoke=True)
        sample = parts["floor"].read_pool(tmp_path, work).sample(12)
        asked: dict[str, dict[str, Any]] = {
            "pipeline": parts["settings"].BASE | {"batch_size": 4, "sorted": True, "dtype": "fp32"},
            "brimful": {"precision": "fp32", "execution": "auto", "returns": "objects"},
        }
        found = {
            side: sides.SIDES[side](work, tmp_path, "cpu", smoke=True).prepare(settings)(sample)
            for side, settings in asked.items()
        }
        assert found["brimful"].labels == found["pipeline"].labels
        assert found["brimful"].scores == pytest.approx(found["pipeline"].scores, abs=1e-5)
        assert len(set(found["pipeline"].labels)) > 1 or work.candidates


def test_a_sweep_goes_from_batches_to_changes_to_all_together(parts: dict[str, ModuleType]) -> None:
    settings = parts["settings"]
    factors = {"compile": {"reduce-overhead": 2.0, "default": 1.5}, "workers": {4: 1.2, 8: 1.3, 12: 1.1}}

    def tried(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["compile"] == "max-autotune":
            return {"settings": asked, "error": "RuntimeError: no"}
        rate = 1000.0 - abs(asked["batch_size"] - 512)
        for key, of_key in factors.items():
            rate *= of_key.get(asked[key], 1.0)
        return {"settings": asked, "texts_per_s": rate}

    done: list[dict[str, Any]] = []
    rounds = []
    about = {"flash": True, "fixed": True, "smoke": False}
    while wanted := settings.next_trials(done, "pipeline", "cuda", **about):
        assert not [each for each in wanted if each in [record["settings"] for record in done]]
        rounds.append(len(wanted))
        done += [tried(each) for each in wanted]
    assert rounds == [13, 7, 3]
    best, second = settings.fastest(done)
    assert (best["batch_size"], best["workers"], best["compile"], best["padding"]) == (
        512,
        8,
        "reduce-overhead",
        "corpus",
    )
    assert second["compile"] == "reduce-overhead"


def test_a_sweep_of_what_never_works_ends(parts: dict[str, ModuleType]) -> None:
    settings = parts["settings"]
    about = {"flash": True, "fixed": False, "smoke": False}
    wanted = settings.next_trials([], "crossencoder", "cuda", **about)
    assert (
        settings.next_trials([{"settings": each, "error": "no"} for each in wanted], "crossencoder", "cuda", **about)
        == []
    )
    assert settings.fastest([]) == []


def test_compiled_settings_are_tried_on_whole_batches(parts: dict[str, ModuleType]) -> None:
    """A smaller last batch would be compiled within the time."""
    pace, numbers = parts["pace"], list[int]()

    def run(number: int) -> Any:
        numbers.append(number)
        return parts["sides"].Answered(seconds=number / 1100)

    pool = SimpleNamespace(sample=lambda number: number)
    for compiled, rounded in (("default", True), (None, False)):
        settings = parts["settings"].BASE | {"batch_size": 48, "compile": compiled}
        steps = pace.pace_of(parts["works"].Work.parse("tweets/minilm"), "cuda", 2.0, smoke=False)
        numbers.clear()
        assert pace._rate(run, pool, steps, settings) == pytest.approx(1100)
        assert len(numbers) > 2
        assert all(number % 48 == 0 for number in numbers) is rounded
    assert pace.whole_batches(1, settings | {"compile": "default"}) == 48


def test_a_trial_that_fails_leaves_the_others(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    works, pace = parts["works"], parts["pace"]
    work = works.Work.parse("tweets/minilm")
    works.make_inputs(tmp_path, work, None, smoke=True)
    settings = [parts["settings"].BASE | {"batch_size": 4, "sorted": False, "dtype": dtype} for dtype in ("f1", "fp32")]
    plan = {"work": work.name, "side": "pipeline", "device": "cpu", "smoke": True, "settings": settings}
    failed, tried = pace.try_settings(plan | {"pace": vars(pace.pace_of(work, "cpu", 1.0, smoke=True))}, tmp_path)
    assert "f1" in failed["error"]
    assert tried["texts_per_s"] > 0


@pytest.mark.slow
def test_files_are_measured_from_parquet_to_parquet(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    works, pace = parts["works"], parts["pace"]
    work = works.Work.parse("parquet/tweets/minilm")
    works.make_inputs(tmp_path, work, None, smoke=True)
    steps = vars(pace.pace_of(work, "cpu", 1.0, smoke=True))
    plan = {"work": work.name, "side": "brimful", "device": "cpu", "smoke": True, "pace": steps}
    settings = [{"precision": "fp32", "execution": "auto"}, {"precision": "int3", "execution": "auto"}]
    whole, failed = pace.measure(plan | {"settings": settings}, tmp_path)
    assert len(whole["repeats"]) == len(whole["start_s"]) == 2
    assert whole["texts"] == steps["file_texts"]
    assert whole["facts"]["parity"]["passed"]
    assert whole["facts"]["limit"] in whole["facts"]["stages_s"]
    assert "int3" in failed["error"]


def test_a_work_is_its_name(parts: dict[str, ModuleType]) -> None:
    works = parts["works"]
    for name in (*works.TABLE, *works.CPU_TABLE, "bbc/large-fp8", "parquet/bbc/base-fp8"):
        assert works.Work.parse(name).name == name
    for name in ("bbc", "bbc/huge", "books/base", "parquet/pairs/base", "bbc/base-int8"):
        with pytest.raises(ValueError, match=name):
            works.Work.parse(name)


def test_any_number_of_texts_has_the_lengths_of_the_corpus(parts: dict[str, ModuleType]) -> None:
    tokens_N = np.random.default_rng(0).integers(3, 500, 1000)
    spread = parts["works"].spread
    for number in (100, 1000, 2500):
        rows = spread(tokens_N, number)
        assert len(rows) == number
        assert tokens_N[rows].mean() == pytest.approx(tokens_N.mean(), rel=0.01)
    assert np.bincount(spread(tokens_N, 2500)).max() == 3
    assert sorted(spread(tokens_N, 1000)) == list(range(1000))


def test_operations_are_those_of_the_products(parts: dict[str, ModuleType]) -> None:
    """torch counts the products of a batch without padding. What is needed is less by the last layer's other tokens."""
    model = FAMILIES["bert"].model().eval()
    model.set_attn_implementation("eager")
    ids = np.random.default_rng(0).integers(5, 99, (3, 40))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.from_numpy(ids))
    lengths = np.array([40, 40, 40])
    floor = parts["floor"]
    assert floor.operations(model, lengths).sum() == counter.get_total_flops()
    width, inner = model.config.hidden_size, model.config.intermediate_size
    spared = 2 * 39 * (2 * width**2 + 2 * width * inner) + 4 * width * 40 * 39
    assert (floor.operations(model, lengths) - floor.needed_operations(model, lengths) == spared).all()
    one = np.array([1])
    assert floor.operations(model, one) == floor.needed_operations(model, one)


def record(call: str, side: str, found: list[dict[str, Any]], *, ok: bool = True) -> dict[str, Any]:
    return {
        "kind": "row", "call": call, "gpu": "G", "work": "tweets/base", "side": side, "ok": ok, "versions": {},
        "sides": ["pipeline", "brimful"], "found": found, "nvml_bytes": None,
    }  # fmt: skip


def repeated(settings: dict[str, Any], *seconds: float, labels: str = "aab") -> dict[str, Any]:
    asked = {"texts": 100, "tokens": 2000, "operations": 1e9, "needed_operations": 0.5e9}
    repeats = [{"seconds": each} for each in seconds]
    answers = {"labels": list(labels), "scores": [0.5, 0.6, 0.7]}
    return {"settings": settings, "repeats": repeats, "peak_allocated_bytes": None, "facts": {}} | asked | answers


def test_the_fastest_of_a_side_counts_and_sides_are_of_one_call(parts: dict[str, ModuleType]) -> None:
    swept = [{"settings": {"batch_size": n}, "texts_per_s": s} for n, s in ((1, 5.0), (32, 50.0))]
    failed = {"settings": {"batch_size": 512}, "error": "OutOfMemoryError: 1 GiB"}
    pipeline = [*swept, failed, repeated({"batch_size": 32}, 2.0, 2.5, 1.0, labels="abb")]
    ours = [
        repeated({"precision": "bf16", "returns": "objects"}, 0.2, 0.25, 0.1),
        repeated({"precision": "bf16", "returns": "logits"}, 0.05),
        repeated({"precision": "fp16", "returns": "objects"}, 0.4),
    ]
    limits = {
        "matmul_flops_per_s": 1e10, "matmul_shape": [8] * 3, "matmul_dtype": "bfloat16", "cpu": "C", "num_cores": 2,
    }  # fmt: skip
    records = [{"kind": "limits", "call": call, "gpu": "G", "ok": True, "limits": limits} for call in ("1", "2", "3")]
    records += [record("1", "pipeline", pipeline), record("1", "brimful", ours)]
    records += [record("2", "pipeline", pipeline), record("2", "brimful", ours, ok=False)]
    records += [record("3", "brimful", ours)]

    for each in records:
        each |= {"host": {"id": "h"}, "commit": "c"}
    theirs, best, logits = parts["report"].results(records)
    assert {each["call"] for each in (theirs, best, logits)} == {"1"}
    assert (theirs["texts_per_s"], theirs["tokens_per_s"]) == (50.0, 1000.0)
    assert [each.get("texts_per_s") for each in theirs["also_measured"]] == [5.0, 50.0, None]
    assert (best["side"], best["settings"]["precision"], best["texts_per_s"]) == ("brimful", "bf16", 500.0)
    assert (best["ratio"], best["ratio_range"]) == (10.0, [4.0, 25.0])
    assert best["also_measured"][0]["settings"]["precision"] == "fp16"
    assert best["agreement"] == pytest.approx(2 / 3)
    assert (best["mfu"], best["floor_texts_per_s"], best["share_of_floor"]) == (0.5, 2000.0, 0.25)
    assert (logits["side"], logits["texts_per_s"]) == ("brimful, logits", 2000.0)
    table = parts["report"].table([theirs, best, logits])
    assert "| tweets/base | brimful | 500 (400 to 1,000) | 10,000 | 10.0 (4.0 to 25.0) |" in table
    assert "| pipeline | batch_size 512 | OutOfMemoryError: 1 GiB |" in parts["report"].tried_table([theirs, best])
