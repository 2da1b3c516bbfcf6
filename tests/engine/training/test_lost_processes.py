"""Runs of which one process is killed, stopped, stuck or out of memory: it is named, all end, and the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from brimful.cli.commands import run
from brimful.core.place import Place
from brimful.data.batches import prefetch
from brimful.engine.first_batch import FirstBatch
from brimful.engine.training import evaluations
from brimful.engine.training.loop import TrainingLoop
from brimful.step.forward import Forward
from brimful.step.step import Step
from brimful.step.updates.torch_update import TorchUpdate
from forked_ranks import Forked
from runs import checkpoints, events, save_tiny_model, single_label_rows, write_rows

ASK = ["--batch-size", "8", "--logging-steps", "1", "--no-baselines", "--learning-rate", "1e-3", "--device", "cpu"]
LONG = ["--num-train-epochs", "500", "--save-steps", "2", "--eval-split", "0", "--hang-timeout", "3"]
SHORT = ["--max-steps", "8", "--hang-timeout", "3"]


#: A warning of torch's library, with its stack, that the leader and its store were gone first.
_TORCH_WARNS = re.compile(r"^(\[rank\d+\]:\[W.*|Exception raised from .*|frame #.*|<omitting python frames>)?\n", re.M)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    save_tiny_model(folder / "model", dropout=0.0)
    write_rows(folder / "rows.jsonl", single_label_rows(75))
    return folder


def words(files: Path, output: Path, *more: str) -> list[str]:
    data, model = str(files / "rows.jsonl"), str(files / "model")
    return ["train", data, "--model", model, "--output", str(output), *ASK, *more]


def start(
    folder: Path, arguments: list[str], *, count: int = 2, where: int = 1, harm: Callable[[], None] = lambda: None
) -> Forked:
    """Processes of a run. harm: done in process `where` before it begins."""

    def work(place: Place) -> int:
        if place.rank == where:
            harm()
        return run(list(arguments))

    return Forked(folder, count, work)


def steps(folder: Path) -> list[dict[str, Any]]:
    return events(folder, "step") if (folder / "events.jsonl").exists() else []


def wait_for(happened: Callable[[], Any], limit_s: float = 240.0) -> None:
    until = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def at_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> Callable[[], None]:
    """A harm: `act` before call `number` of a function."""

    def harm() -> None:
        calls, original = [0], getattr(owner, name)

        def harmed(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                act()
            return original(*arguments, **options)

        setattr(owner, name, harmed)

    return harm


def sleep() -> None:
    time.sleep(3600)


def slowly() -> None:
    time.sleep(3.5)


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sent", "rank", "why", "phase"),
    [
        (signal.SIGKILL, 0, "has ended", "any"),
        (signal.SIGSTOP, 2, "it is stopped", "evaluation"),
        (signal.SIGSTOP, 0, "it is stopped", "any"),
    ],
)
@pytest.mark.thorough
def test_killed_and_stopped(sent: signal.Signals, rank: int, why: str, phase: str, files: Path, tmp_path: Path) -> None:
    """The others name it and end with one code; fewer go on from the last checkpoint, which is whole."""
    output, reached = tmp_path / "run", tmp_path / "reached"

    def pause() -> None:
        time.sleep(1.0)  # for a sign of life from here
        reached.touch()
        sleep()

    ask, harm = words(files, output, *LONG), at_call(Forward, "submit", 9, pause)
    if phase == "evaluation":
        ask += ["--eval-split", "0.3", "--eval-steps", "2", "--hang-timeout", "6"]
    three = start(tmp_path / "logs", ask, count=3, where=rank if phase == "evaluation" else -1, harm=harm)
    wait_for(lambda: len(checkpoints(output)) > 1 and (phase == "any" or reached.exists()))
    os.kill(three.pids[rank], sent)
    speaker = 1 if rank == 0 else 0
    wait_for(lambda: "error: " in three.said(speaker), 20.0)
    for other in {0, 1, 2} - {rank}:
        assert three.exit_code(other) == 7
    os.kill(three.pids[rank], signal.SIGKILL)
    said = three.said(speaker)
    assert f"error: process {rank} of 3 (" in said
    assert "CPU), at step " in said
    assert why in said
    assert phase == "any" or f"in phase {phase}: no sign of life" in said
    assert "error" not in three.said(2 if rank != 2 else 1)
    if rank:
        (lost,) = events(output, "process_lost")
        assert (lost["rank"], lost["device"]) == (rank, "CPU")
    last = checkpoints(output)[-1]
    ask += ["--resume", "--num-train-epochs", str((last + 2) / 10)]
    assert start(tmp_path / "again", ask, count=2).results() == [0, 0]
    assert checkpoints(output)[-1] >= last


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("owner", "name", "phase"),
    [
        pytest.param(Step, "accumulate", "steps", id="in a step"),
        pytest.param(prefetch, "shares_of", "input", id="in its data loader"),
        pytest.param(Forward, "submit", "evaluation", id="in an evaluation"),
    ],
)
def test_stuck(owner: Any, name: str, phase: str, files: Path, tmp_path: Path) -> None:
    """A process that lives, and does not get on."""
    more = ["--eval-split", "0.3", "--eval-steps", "4"] if phase == "evaluation" else []
    asked = words(files, tmp_path / "run", *LONG, *more)
    both = start(tmp_path / "logs", asked, harm=at_call(owner, name, 9, sleep))
    assert both.exit_codes() == [7, 7]
    assert "error: process 1 of 2 (" in both.said(0)
    assert f"in phase {phase}: has not got on for 3." in both.said(0)
    assert "test_lost_processes.py:" in both.said(0) or phase == "input"
    (lost,) = events(tmp_path / "run", "process_lost")
    assert (lost["rank"], lost["phase"]) == (1, phase)


@pytest.mark.thorough
def test_one_that_only_is_slow_is_left_alone(files: Path, tmp_path: Path) -> None:
    """The leader evaluates and saves for longer than a step may take, and the other one compiles that long."""

    def compiles() -> None:
        space: dict[str, Any] = {"__name__": "torch._inductor.graph", "slowly": slowly}
        exec("def compile():\n    slowly()", space)
        space["compile"]()

    def harms(place: Place) -> int:
        if place.rank:
            at_call(Step, "accumulate", 4, compiles)()
        else:
            at_call(evaluations.RowScores, "__init__", 1, slowly)()
        return run(words(files, tmp_path / "run", *SHORT, "--hang-timeout", "2.5", "--eval-steps", "2"))

    assert Forked(tmp_path / "logs", 2, harms).results() == [0, 0]


@pytest.mark.slow
def test_memory_that_runs_out_in_one_process(files: Path, tmp_path: Path) -> None:
    """All lay batches out smaller; a process for which nothing smaller fits is named, and the steps so far are kept."""

    def once() -> None:
        at_call(Step, "accumulate", 1, fail)()

    fits = start(tmp_path / "once", words(files, tmp_path / "two", *SHORT), harm=once)
    assert fits.results() == [0, 0]
    (found,) = events(tmp_path / "two", "out_of_memory")
    assert found["tokens_after"] < found["tokens_before"]
    assert run(words(files, tmp_path / "one", *SHORT)) == 0
    told = [[event["loss"] for event in steps(tmp_path / name)] for name in ("one", "two")]
    assert told[1] == pytest.approx(told[0], rel=1e-4)

    def always() -> None:
        for number in range(5, 50):
            at_call(Step, "accumulate", number, fail)()

    both = start(tmp_path / "always", words(files, tmp_path / "three", *LONG), harm=always)
    assert both.results() == [6, 6]
    assert "memory ran out in the step of batch" in both.said(0)
    assert f"(process 1 of 2 ({socket.gethostname()}, CPU), at step" in both.said(0)
    assert "in phase steps: out of memory); all is saved after step" in both.said(0)
    (lost,) = events(tmp_path / "three", "process_lost")
    assert (lost["rank"], lost["phase"], lost["why"]) == (1, "steps", "out of memory")
    assert checkpoints(tmp_path / "three")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_an_evaluation(rank: int, files: Path, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    both = start(tmp_path / "logs", words(files, tmp_path / "run", *SHORT), where=rank,
                 harm=at_call(Forward, "submit", 1, broken))  # fmt: skip
    codes = both.exit_codes()
    assert codes[1 - rank] == 7
    assert codes[rank] == 1
    assert "a bug" in both.said(0)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_that_follows(sent: signal.Signals, files: Path, tmp_path: Path) -> None:
    """The leader hears of it, saves, and ends all."""
    both = start(tmp_path / "logs", words(files, tmp_path / "run", *LONG))
    wait_for(lambda: len(steps(tmp_path / "run")) > 3)
    os.kill(both.pids[1], sent)
    assert both.results() == [143, 0]
    assert checkpoints(tmp_path / "run")[-1] == steps(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all(sent: signal.Signals, code: int, files: Path, tmp_path: Path) -> None:
    """Ctrl-C in a terminal, and torchrun's SIGTERM, go to every process."""
    three = start(tmp_path / "logs", words(files, tmp_path / "run", *LONG), count=3)
    wait_for(lambda: len(steps(tmp_path / "run")) > 3)
    for pid in reversed(three.pids):  # the leader ends the others, and some may have ended by the time they are told
        os.kill(pid, sent)
    assert three.results() == [code, 0, 0]
    assert "all is saved" in three.said(0)
    assert _TORCH_WARNS.sub("", three.said(1)) == ""


@pytest.mark.slow
def test_early_stop_and_fallback_are_for_all(files: Path, tmp_path: Path) -> None:
    """The leader finds the first batch to differ on the fast path: all take the slow one, and end when it does."""

    def work(place: Place) -> int:
        if place.leads:
            from brimful.engine import first_batch

            original, seen = first_batch.compare, []

            def compare(*given: Any) -> FirstBatch:
                found = original(*given)
                seen.append(1)
                return found if len(seen) > 1 else FirstBatch(**vars(found) | {"passed": False, "reason": "a test"})

            first_batch.compare = compare
        early = ["--metric-for-best-model", "loss", "--early-stopping-patience", "1", "--eval-steps", "1"]
        ask = words(files, tmp_path / "run", "--num-train-epochs", "50", "--hang-timeout", "10", *early)
        ask[ask.index("1e-3")] = "1e-12"
        return run(ask)

    both = Forked(tmp_path / "logs", 2, work)
    assert both.results() == [0, 0]
    assert "the plain model on padded rows runs" in both.said(0)
    assert "weights of processes" not in both.said(0)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["steps"] < 50


@pytest.mark.thorough
def test_any_number_of_processes_goes_on(files: Path, tmp_path: Path) -> None:
    """From one to three to two: batches are those of one process all the way."""
    constant = words(files, tmp_path / "constant", "--max-steps", "27", "--lr-scheduler-type", "constant")
    assert run(constant) == 0
    output = tmp_path / "parts"
    for count, steps_in_all in ((1, 7), (3, 14), (2, 27)):
        ask = words(files, output, "--max-steps", str(steps_in_all), "--lr-scheduler-type", "constant", "--resume")
        assert start(tmp_path / f"parts-{count}", ask, count=count).results() == [0] * count
    for one, parts in zip(steps(tmp_path / "constant"), steps(output), strict=True):
        assert parts["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert parts["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


@pytest.mark.slow
def test_an_evaluation_that_was_due_when_a_signal_came(files: Path, tmp_path: Path) -> None:
    """It is made up for before the first step to come: other processes take part in it then, too."""
    output = tmp_path / "run"

    def work(place: Place) -> int:
        if place.leads:

            def land(loop: TrainingLoop, *step: Any) -> None:
                landed(loop, *step)
                if loop._state.applied == 7:  # the last one of the epoch, the ninth, is under way
                    loop._signals.received = signal.SIGTERM

            landed, TrainingLoop._land = TrainingLoop._land, land  # type: ignore[method-assign]
        return run(words(files, output, "--max-steps", "12"))

    assert Forked(tmp_path / "first", 2, work).results() == [143, 0]
    assert checkpoints(output) == [9]
    assert events(output, "evaluated") == []
    again = start(tmp_path / "second", words(files, output, "--max-steps", "12", "--resume"))
    assert again.results() == [0, 0]
    assert [found["step"] for found in events(output, "evaluated")] == [9, 12]


@pytest.mark.slow
def test_a_run_that_memory_ran_out_in_goes_on_in_smaller_micro_batches_of_all(files: Path, tmp_path: Path) -> None:
    """With parts of gradients, each micro-batch is summed: one process with other sizes would keep others waiting."""
    ask = words(files, tmp_path / "run", "--sharding", "gradients", "--lr-scheduler-type", "constant")
    harm = at_call(Step, "accumulate", 1, fail)
    assert start(tmp_path / "once", [*ask, "--max-steps", "6"], harm=harm).results() == [0, 0]
    assert events(tmp_path / "run", "out_of_memory")
    again = start(tmp_path / "again", [*ask, "--max-steps", "12", "--resume"])
    assert again.results() == [0, 0]
    assert len(steps(tmp_path / "run")) == 12


@pytest.mark.slow
def test_memory_that_runs_out_in_the_update_of_one_process(files: Path, tmp_path: Path) -> None:
    """Others have made theirs by then: it does not take the step again by itself, and all end."""
    harm = at_call(TorchUpdate, "apply", 4, fail)
    both = start(tmp_path / "logs", words(files, tmp_path / "run", *LONG), harm=harm)
    assert both.exit_codes() == [7, 6]
    assert "error: process 1 of 2 (" in both.said(0)
    assert "memory ran out in the step of batch 4 while weights were being changed, or other" in both.said(0)
