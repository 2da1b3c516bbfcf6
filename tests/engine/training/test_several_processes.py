"""Runs of the command line in two processes: what they learn, say and leave, and what happens when one is gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from brimful.cli.commands import run
from brimful.cli.launch import launch
from brimful.core.errors import RanksError
from brimful.core.place import Place
from brimful.engine.training.orders import Order
from brimful.hardware import meeting
from brimful.hardware.ranks import Ranks, digest
from forked_ranks import Forked
from runs import POISON, checkpoints, events, save_tiny_model, single_label_rows, write_rows

ASK = ["--batch-size", "8", "--logging-steps", "1", "--no-baselines", "--learning-rate", "1e-3", "--device", "cpu"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model", dropout=0.0)
    write_rows(folder / "rows.jsonl", single_label_rows(75))
    return folder


def words(files: Path, output: Path, *more: str) -> list[str]:
    data, model = str(files / "rows.jsonl"), str(files / "model")
    return ["train", data, "--model", model, "--output", str(output), *ASK, *more]


def start(folder: Path, *arguments: str, count: int = 2) -> Forked:
    return Forked(folder, count, lambda _: run(list(arguments)))


def told(folder: Path) -> list[tuple[int, float, float]]:
    return [(event["step"], event["loss"], event["grad_norm"]) for event in events(folder, "step")]


def wait_for(found: Callable[[], Any], processes: Forked) -> None:
    until = time.monotonic() + 240  # against hanging: a busy machine takes its time
    while not found():
        processes.check_running()
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_two_learn_what_one_does(files: Path, tmp_path: Path) -> None:
    """Losses, gradients, metrics; the first alone speaks. Resumed in another number of processes, the same again."""
    epochs = ("--num-train-epochs", "2")
    assert run(words(files, tmp_path / "one", *epochs)) == 0
    both = start(tmp_path / "logs", *words(files, tmp_path / "two", *epochs))
    assert both.results() == [0, 0]
    expected = told(tmp_path / "one")
    assert len(expected) == 18
    for one, two in zip(expected, told(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    (alone, together) = (events(tmp_path / name, "evaluated") for name in ("one", "two"))
    for one, two in zip(alone, together, strict=True):
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3)
    assert "Done" in both.said(0)
    assert "weights of processes" not in both.said(0)
    assert both.said(1).strip() == ""
    recipe = json.loads((tmp_path / "two" / "run.json").read_text())["recipe"]["levers"]
    work = json.loads((tmp_path / "two" / "run.json").read_text())["processes"]
    tokens = [each["tokens"] for each in work["each"]]
    assert max(tokens) < 1.1 * min(tokens)
    assert 1 <= work["imbalance"] < 1.2
    assert sum(each["samples"] for each in work["each"]) == 2 * 67
    for each in work["each"]:  # the first step is not timed
        assert each["peak_bytes"]["resident"] > 1 << 26
        assert 0.8 * each["tokens"] < each["tokens_per_s"] * each["steps_s"] < each["tokens"]
    assert all(0 <= each["waited_s"] < each["steps_s"] for each in work["each"])  # each was asked at the end
    seen = [each for each in work["each"] if each["sent_s"] is not None]
    assert all(0 <= each["hidden_s"] <= each["sent_s"] for each in seen)
    assert all(each["hidden_s"] is None for each in work["each"] if each not in seen)
    at = [event["step"] for event in events(tmp_path / "two", "processes")]  # and as often as lines of time come
    assert [step for step in at if step in (9, 18)][-3:] == [9, 18, 18]
    assert at == sorted(at)
    assert "the one with the most tokens of a batch has 1." in both.said(0)
    assert {"processes": "2", "execution": "eager"}.items() <= {each["name"]: each["value"] for each in recipe}.items()
    more = words(files, tmp_path / "two", "--num-train-epochs", "3", "--resume", "--lr-scheduler-type", "linear")
    assert start(tmp_path / "more", *more, count=3).results() == [0, 0, 0]
    assert len(told(tmp_path / "two")) == 27


def test_a_plan_of_two(files: Path, tmp_path: Path) -> None:
    micro = ("--per-device-batch-size", "4", "--gradient-accumulation-steps", "2")
    both = start(tmp_path / "logs", *words(files, tmp_path / "run", "--dry-run", *micro))
    assert both.results() == [0, 0]
    assert "processes" in both.said(0)
    said = " ".join(both.said(0).split())
    assert "the effective batch is 4 x 2 = 8 rows of all 2 processes together" in said
    assert "transformers has 16, which is --batch-size 16 here" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_resumed_run_goes_on_as_it_began(files: Path, tmp_path: Path) -> None:
    """Learning rate, epochs and warm-up that were chosen are kept by all processes; weights stay the same bits."""
    chosen = words(files, tmp_path / "run", "--eval-split", "0")
    at = chosen.index("--learning-rate")
    del chosen[at : at + 2]
    assert start(tmp_path / "one", *chosen, "--num-train-epochs", "1").results() == [0, 0]
    longer = start(tmp_path / "two", *chosen, "--num-train-epochs", "3", "--resume")
    assert longer.results() == [0, 0]
    assert "weights of processes" not in longer.said(0)
    assert len(told(tmp_path / "run")) == 30


def test_weights_that_differ_are_noticed() -> None:
    weights = [torch.zeros(3), torch.ones(2, dtype=torch.float64)]
    others = [torch.zeros(3), torch.ones(2, dtype=torch.float64)]
    assert digest(weights) == digest(others)
    others[0][2] = -0.0
    assert digest(weights) != digest(others)
    assert digest([torch.ones(2), torch.zeros(2)]) != digest([torch.zeros(2), torch.ones(2)])


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("sharding", ["none", "gradients", "parameters"])
def test_rows_of_all_processes_are_named(files: Path, tmp_path: Path, sharding: str) -> None:
    """A text whose loss is not finite, whichever process has it: all skip the step."""
    model = save_tiny_model(tmp_path / "model", dropout=0.0)
    weights = load_file(model / "model.safetensors")
    name = next(each for each in weights if "word_embeddings" in each)
    weights[name][-1] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    rows = single_label_rows(32)
    for row in (9, 20):
        rows[row]["text"] += f" {POISON}"
    data = write_rows(tmp_path / "rows.jsonl", rows)
    ask = ["train", str(data), "--model", str(model), "--output", str(tmp_path / "run"), *ASK, "--eval-split", "0"]
    ask += ["--batch-size", "32", "--num-train-epochs", "1", "--packing", "off", "--sharding", sharding]
    assert start(tmp_path / "logs", *ask).results() == [0, 0]
    (skipped,) = events(tmp_path / "run", "skipped")
    assert sorted(row for _, row in skipped["rows"]) == [10, 21]


@pytest.mark.slow
def test_a_signal_to_the_leader_stops_all(files: Path, tmp_path: Path) -> None:
    both = start(
        tmp_path / "logs", *words(files, tmp_path / "run", "--num-train-epochs", "500", "--save-steps", "9999")
    )
    wait_for(lambda: (tmp_path / "run" / "events.jsonl").exists() and len(told(tmp_path / "run")) > 3, both)
    os.kill(both.pids[1], signal.SIGTERM)  # not its to hear
    os.kill(both.pids[0], signal.SIGTERM)
    assert both.results() == [143, 0]
    (step,) = checkpoints(tmp_path / "run")
    assert step == told(tmp_path / "run")[-1][0]
    assert "all is saved" in both.said(0)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("sharding", ["none", "parameters"])
def test_a_process_that_is_gone_ends_the_others(files: Path, tmp_path: Path, sharding: str) -> None:
    """With one line and a code of its own; the last checkpoint is whole, and one process goes on from it."""
    ask = words(files, tmp_path / "run", "--num-train-epochs", "500", "--save-steps", "2", "--eval-split", "0")
    ask += ["--sharding", sharding]
    both = start(tmp_path / "logs", *ask)
    wait_for(lambda: len(checkpoints(tmp_path / "run")) > 1, both)
    os.kill(both.pids[1], signal.SIGKILL)
    assert both.results() == [7, None]
    assert "error: process 1 of 2 (" in both.said(0)
    assert "--resume" in both.said(0)
    last = checkpoints(tmp_path / "run")[-1]
    ask[ask.index("500")] = str((last + 3) / 9)
    assert run([*ask, "--resume"]) == 0
    assert told(tmp_path / "run")[-1][0] >= last


def test_a_process_that_fails_says_why(files: Path, tmp_path: Path) -> None:
    """Data that one of them does not have: the others do not wait for it."""
    other = write_rows(tmp_path / "other.jsonl", [{"text": "w7", "label": "low", "more": 1}] * 3)

    def work(place: Place) -> int:
        asked = words(files, tmp_path / "run")
        if place.rank:
            asked[1] = str(other)
        return run(asked)

    both = Forked(tmp_path / "logs", 2, work)
    assert both.results() == [2, 2]
    assert "error: process 1 of 2 (" in both.said(0)
    assert ") has failed: " in both.said(0)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "classify", "evaluate", "profile"])
def test_a_mistake_ends_all(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process ends before it meets the others, which find the same, and do not wait for it."""
    monkeypatch.setattr(meeting, "_WORD_S", 0.1)
    rows, output = str(tmp_path / "rows.csv"), ["--output", str(tmp_path / "out.csv")]
    words = [rows, "--model", "nowhere"] if command in ("train", "profile") else ["nowhere", rows]
    both = start(tmp_path / "logs", command, *words, *(output if command != "profile" else ()), "--device", "cpu")
    assert both.results() == [2, 2]
    assert "error: there is no such file or folder" in both.said(0)
    assert both.said(1) == ""
    if command == "train":  # a process for each GPU was started already
        both = start(tmp_path / "again", command, *words, *output, "--gpus", "2")
        assert both.results() == [2, 2]
        assert "error: --gpus is 2, and a launcher has started 2 processes" in both.said(0)
        assert both.said(1) == ""


GONE = """
import os, pathlib, sys, time
number = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    number.with_suffix(".new").write_text(str(os.getpid()))
    number.with_suffix(".new").rename(number)
    os.kill(os.getpid(), 9)
while not number.exists() or os.path.exists(f"/proc/{number.read_text()}"):  # until the launcher knows
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(7)
"""


def test_launch_ends_as_the_first_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = "import os, sys; told = [os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')]; print(*told)"
    assert launch([sys.executable, "-c", f"{said}; sys.exit(3 if told[0] == '0' else 0)"], 2) == 3
    found = capfd.readouterr()
    assert (found.out.strip(), found.err.strip()) == ("0 2 0", "1 2 1")
    assert launch([sys.executable, "-c", GONE, str(tmp_path / "second")], 2) == 7
    assert "process 1 of 2 was ended by SIGKILL" in capfd.readouterr().err


def test_more_gpus_than_there_are(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(files, tmp_path / "run")
    assert run([*asked, "--gpus", "two"]) == 2
    assert "--gpus is 'two'" in capsys.readouterr().err
    assert run([*asked, "--gpus", "2"]) == 2
    assert "--gpus 2 and --device cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_a_profile_of_two_says_what_sums_take(files: Path, tmp_path: Path) -> None:
    """Of the part of one process, in parts that are those of one; the other one says nothing."""
    asked = words(files, tmp_path / "run", "--steps", "2")
    asked[0] = "profile"
    for flag in ("--output", "--logging-steps"):
        del asked[(at := asked.index(flag)) : at + 2]
    asked.remove("--no-baselines")
    both = start(tmp_path / "logs", *asked, "--token-budget", "64", "--json")
    assert both.results() == [0, 0]
    found = json.loads(both.said(0)[both.said(0).index("\n{") :])
    sums = found["communication"]
    assert sums["processes"] == 2
    assert 1 <= sums["imbalance"] < 1.2
    assert 0 <= sums["hidden_s"] < sums["seconds"] < found["time"]["mean_s"]
    assert 0 < found["work"]["samples"] < 8
    assert both.said(1).strip() == ""


@pytest.mark.thorough
def test_a_profile_says_where_sums_are_not_seen(files: Path, tmp_path: Path) -> None:
    """torch begins those of weights in parts."""
    words = ["profile", str(files / "rows.jsonl"), "--model", str(files / "model"), "--device", "cpu", "--steps", "1"]
    both = start(tmp_path / "logs", *words, "--batch-size", "8", "--sharding", "parameters")
    assert both.results() == [0, 0]
    assert "the host does not see them; 2 processes" in both.said(0)


def test_nothing_is_told_once_a_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may wait for a message of another size, which ends a process in the midst of gloo's code."""
    sent: list[Any] = []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        sent.append(tensor)
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    ranks = Ranks(Place(rank=0, count=3))
    with pytest.raises(RanksError, match="another process is gone"):
        ranks.spread("path")
    ranks.tell(Order.END)
    assert len(sent) == 1
    assert not ranks.reachable
