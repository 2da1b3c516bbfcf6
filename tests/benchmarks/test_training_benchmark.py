"""The training benchmark, run small: what it writes, that it resumes, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny import FAMILIES

Load = Callable[..., dict[str, ModuleType]]
FOLDER = Path(__file__).parents[2] / "benchmarks" / "training"
FIELDS = {
    "work",
    "side",
    "samples_per_s",
    "tokens_per_s",
    "mfu",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "nvml_bytes",
    "settings",
    "gpu",
    "host",
    "commit",
    "versions",
}


@pytest.fixture
def parts(load: Load) -> dict[str, ModuleType]:
    """The modules beside the script, by name."""
    return load("training", "chip", "report", "settings", "works")


def script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), "--smoke", "--output", str(folder / "output"), *words]
    return subprocess.run([*command, "--inputs", str(folder / "inputs")], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("warm_up", "step"), [(1, 1), (2, 1), (4, 2), (20, 10)])
def test_a_turn_begins_within_any_warm_up(load: Load, warm_up: int, step: int) -> None:
    assert load("training", "rounds")["rounds"].turn_at(warm_up) == step


@pytest.mark.parametrize("grouped", [False, True])
def test_every_length_of_a_batch_is_met_before_the_first_round(load: Load, grouped: bool) -> None:
    rounds, buckets = load("training", "rounds", "settings").values()
    source = np.random.default_rng(3)
    lengths_N = np.clip(source.lognormal(3.3, 0.5, 2000).astype(int), 3, 512)

    def padded(longest: int) -> int:
        return next(bucket for bucket in buckets.BUCKETS if bucket >= longest)

    met = rounds.rows_ahead(lengths_N, 32, buckets=True, one_length=False, grouped=grouped)
    shapes = {(len(rows), padded(max(lengths_N[rows]))) for rows in met}
    assert len(shapes) == len(met)
    order = np.sort(lengths_N) if grouped else source.permutation(lengths_N)
    whole = [padded(max(order[i : i + 32])) for i in range(0, 2000 - 31, 32)]
    assert {(32, length) for length in whole} <= shapes
    assert {size for size, _ in shapes} == {32, 2000 % 32}
    assert not grouped or len([size for size, _ in shapes if size < 32]) == 1


def test_symbolic_shapes_are_met_at_three_lengths_and_one_length_once(load: Load) -> None:
    rows_ahead = load("training", "rounds")["rounds"].rows_ahead
    lengths_N = np.arange(1, 97)
    met = rows_ahead(lengths_N, 32, buckets=False, one_length=False, grouped=False)
    assert [(len(rows), max(lengths_N[rows])) for rows in met] == [(32, 32), (32, 64), (32, 96)]
    [rows] = rows_ahead(np.full(96, 48), 32, buckets=False, one_length=True, grouped=False)
    assert len(rows) == 32
    [rows] = rows_ahead(np.full(5, 48), 8, buckets=True, one_length=True, grouped=False)[:1]
    assert len(rows) == 8


def test_a_round_in_which_torch_compiled_is_left_out(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = load("training", "rounds")["rounds"]
    graphs: dict[int, int] = {}  # how many more after a step
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_training_stop=False)
    monkeypatch.setattr(rounds, "compiled_graphs", lambda: sum(graphs.get(n, 0) for n in range(state.global_step + 1)))
    for clean, every in ((True, False), (False, False), (True, True)):
        graphs = dict.fromkeys(range(100), 1) if every else {4: 1, 5: 1}
        clock = rounds.Rounds(2, 2, 2, clean=clean)
        control.should_training_stop, state.global_step = False, 0
        while not control.should_training_stop:
            state.global_step += 1
            clock.on_step_end(None, state, control)
        assert [each.first for each in clock.found] == ([14, 16] if every else [6, 8] if clean else [2, 4])
        assert clock.left_out == (6 if every else 2 if clean else 0)


def test_an_autotuner_can_read_that_tf32_is_allowed(load: Load) -> None:
    side = load("training", "trainer_side")["trainer_side"]
    try:
        torch.backends.fp32_precision = "tf32"  # as transformers does where Trainer compiles
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        side._name_tf32_as_of_old()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


@pytest.mark.scripts
def test_measures_both_sides_of_a_row_once(tmp_path: Path) -> None:
    words = ("--no-sweep", "--rows", "tweets/minilm")
    first = script(tmp_path, *words)
    assert "| tweets/minilm | brimful |" in first.stdout
    assert "not measured yet" not in first.stdout
    output = tmp_path / "output"
    results = json.loads((output / "results.json").read_text("utf-8"))
    assert [(r["work"], r["side"]) for r in results] == [("tweets/minilm", "hf"), ("tweets/minilm", "brimful")]
    for result in results:
        assert result.keys() >= FIELDS
        assert result["rounds"] == 2
        assert 0 < result["samples_per_s_range"][0] <= result["samples_per_s"] < result["tokens_per_s"]
        assert result["mfu"] > 0
        assert 0.5 < result["fill"] <= 1
        assert result["versions"]["transformers"]
    assert results[1]["packed"]
    assert results[1]["ratio"] == pytest.approx(results[1]["samples_per_s"] / results[0]["samples_per_s"])

    raw = (output / "raw.jsonl").read_text("utf-8")
    with (output / "raw.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"kind": "ro')  # a call that was killed
    second = script(tmp_path, *words)
    assert (output / "raw.jsonl").read_text("utf-8") == raw
    assert second.stdout == first.stdout

    late = script(tmp_path, "--no-sweep", "--rows", "tweets/minilm", "bbc/minilm", "--budget-s", "0.1", "--dry-run")
    assert "bbc/minilm: hf" in late.stdout
    assert "tweets/minilm" not in late.stdout


def test_a_work_is_its_name(parts: dict[str, ModuleType]) -> None:
    work = parts["works"].Work
    for name in (*parts["works"].TABLE, "bbc/large-fp8", "tweets/minilm-b16-fp8"):
        assert work.parse(name).name == name
    assert work.parse("tweets/minilm-b16").batch_size == 16
    for name in ("bbc", "bbc/huge", "books/base", "bbc/base-b0", "bbc/base-int8"):
        with pytest.raises(ValueError, match=name):
            work.parse(name)


def test_operations_are_those_of_the_products(parts: dict[str, ModuleType]) -> None:
    """torch counts the products of a batch without padding, those of the first layer's input gradient among them."""
    model = FAMILIES["bert"].model().train()
    model.set_attn_implementation("eager")
    ids = np.random.default_rng(0).integers(5, 99, (3, 40))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.from_numpy(ids)).logits.sum().backward()
    assert parts["chip"].operations(model, np.array([40, 40, 40])) == counter.get_total_flops()


def test_windowed_layers_count_the_pairs_in_their_window(parts: dict[str, ModuleType]) -> None:
    model = FAMILIES["modernbert"].model()
    operations = parts["chip"].operations
    for length in (3, 9, 10, 40):
        place = np.arange(length)
        in_window = int((abs(place[:, None] - place) <= model.config.local_attention // 2).sum())
        kinds = model.config.layer_types
        pairs = sum(in_window if kind == "sliding_attention" else length**2 for kind in kinds)
        # One sequence against as many tokens in sequences of one: what differs is attention, and heads.
        one = operations(model, np.array([length]))
        ones = operations(model, np.ones(length, dtype=np.int64))
        head = operations(model, np.array([0]))
        assert one + (length - 1) * head - ones == 12 * 16 * (pairs - length * len(kinds))


def test_a_sweep_goes_from_forms_to_changes_to_all_together(parts: dict[str, ModuleType]) -> None:
    settings = parts["settings"]
    speeds = {
        "compile": {"default": 1.5, "reduce-overhead": 2.0},
        "workers": {0: 1.2, 8: 0.9},
        "nan_filter": {True: 1.1},
    }

    def tried(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["compile"] == "max-autotune":
            return {"settings": asked, "error": "not done after 200 s"}
        rate = 1000.0
        for key, factors in speeds.items():
            rate *= factors.get(asked[key], 1.0)
        return {"settings": asked, "rounds": [{"samples": rate, "seconds": 1.0}]}

    done: list[dict[str, Any]] = []
    rounds = []
    while wanted := settings.next_trials(done, settings.BASE, flash=False, batches=(32,)):
        assert not [each for each in wanted if each in [record["settings"] for record in done]]
        rounds.append(len(wanted))
        done += [tried(each) for each in wanted]
    assert rounds == [len(settings.FORMS), 2 * len(settings.CHANGES), 2]
    best, second = settings.fastest(done)
    assert settings.changed(best | {"sampling": "random"}) == (
        "padding buckets, workers 0, nan_filter True, compile reduce-overhead"
    )
    assert second["compile"] == "reduce-overhead"
    trials = [each | {"work": "tweets/base", "host": {"id": "h"}, "commit": "c"} for each in done]
    table = parts["report"].sweep_table(trials)
    assert "| 2,640 | 1.00 |" in table
    assert "failed: not done after 200 s" in table
    # One that was not tried, for want of time, is tried next.
    assert settings.next_trials(done[1:], settings.BASE, flash=False, batches=(32,)) == [done[0]["settings"]]


def test_what_a_rows_shape_leaves_out_is_not_tried(parts: dict[str, ModuleType]) -> None:
    settings = parts["settings"]
    padded = settings.BASE | {"padding": "max_length"}
    forms = settings.next_trials([], padded, flash=True, batches=(32,))
    assert {each["padding"] for each in forms} == {"max_length"}
    assert [each["compile"] for each in forms] == ["default", "reduce-overhead", None, "max-autotune", None, "default"]
    tried = [{"settings": each, "rounds": [{"samples": 1.0, "seconds": 1.0}]} for each in forms]
    assert {each["batch_size"] for each in settings.next_trials(tried, padded, flash=True, batches=(32, 128))} == {
        32,
        128,
    }


def test_sweeps_at_once_try_the_likeliest_of_every_row_first(load: Load, tmp_path: Path) -> None:
    sweeps = load("training", "sweeps")["sweeps"]
    asked = [{"compile": "default"}, {"compile": None, "n": 1}, {"compile": "max-autotune"}, {"compile": None, "n": 2}]
    assert sweeps.alike(asked) == [[asked[0]], [asked[1], asked[3]], [asked[2]]]
    rounds = {"a": iter([asked, asked[:1], []]), "b": iter([asked[2:3], [], []]), "c": iter([[], [], []])}
    order: list[tuple[str, list[dict[str, Any]]]] = []

    def attempt(row: str, settings: list[dict[str, Any]]) -> bool:
        order.append((row, settings))
        return True

    @contextmanager
    def lanes(number: int) -> Iterator[ThreadPoolExecutor]:
        assert number == 1
        with ThreadPoolExecutor(number) as pool:
            yield pool

    session = SimpleNamespace(arguments=SimpleNamespace(output=tmp_path, at_once=1), lanes=lanes)
    sweeps.at_once(session, rounds, lambda row: next(rounds[row]), attempt)
    first = [("a", [asked[0]]), ("b", [asked[2]]), ("a", [asked[1], asked[3]]), ("a", [asked[2]])]
    assert order == [*first, ("a", [asked[0]])]
    assert not sweeps.turns.shared()
    tries = list[str]()
    sweeps.at_once(session, ["d"], lambda row: asked, lambda row, settings: bool(tries.append(row)))  # no time
    assert len(tries) == 3


@pytest.mark.parametrize("cut", [False, True], ids=["time left", "none left"])
def test_a_trial_that_ends_its_process_is_recorded_and_the_rest_goes_on(load: Load, cut: bool) -> None:
    sweeps = load("training", "sweeps")["sweeps"]
    wanted, records, plans = [{"compile": None, "n": n} for n in range(3)], list[dict[str, Any]](), list[Any]()

    def child(plan: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        plans.append(plan["settings"])
        found = [{"settings": each, "wall_s": 30.0} for each in plan["settings"] if each["n"] != 1]
        whole = {"found": found, "ok": True, "error": None, "timed_out": False, "wall_s": 50.0}
        return whole if len(plans) > 1 else whole | {"found": found[:1], "ok": False, "error": "killed"}

    def fits(seconds: float) -> bool:
        return bool(seconds) or not cut

    session = SimpleNamespace(
        nvml=SimpleNamespace(gpu="CPU"), fits=fits, child=child, add=lambda **record: records.append(record)
    )
    plan = {"work": "tweets/base", "side": "hf"}
    assert sweeps.attempt(session, wanted, plan, {"work": "w"}, size="base") is not cut
    assert plans == ([wanted] if cut else [wanted, wanted[2:]])
    tried = [(record["settings"]["n"], record.get("error")) for record in records]
    assert tried == ([(0, None)] if cut else [(0, None), (1, "killed"), (2, None)])
    assert sweeps.spent_s(records) == (30.0 if cut else 80.0)
