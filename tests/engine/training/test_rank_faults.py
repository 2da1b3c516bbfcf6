"""SIGKILL, SIGSTOP and SIGTERM of one random process of several at random moments: named, resumed, the same weights.

make test      one at a chosen step
make faults    the campaign; BRIMFUL_RANK_KILLS=50 and BRIMFUL_SEED=7 change its size and repeat its moments
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import signal
import time
from pathlib import Path

import pytest
import torch

from brimful.cli.commands import run
from forked_ranks import Forked
from runs import checkpoints, events, learned, save_tiny_model, single_label_rows, write_rows

COUNT = 3
LOG = Path(__file__).parents[3] / "benchmarks" / "faults" / "ranks.log"
LEARNING = [
    *("--max-length", "48", "--batch-size", "8", "--num-train-epochs", "4", "--learning-rate", "3e-3"),
    *("--eval-steps", "4", "--save-steps", "3", "--save-total-limit", "2", "--metric-for-best-model", "loss"),
    *("--logging-steps", "1", "--token-budget", "96", "--no-baselines", "--device", "cpu"),
]
SENT = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
#: Seconds within which the others must have named the one that is gone, and ended.
WITHIN_S = 10.0


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of 28 steps with dropout, checkpoints and evaluations, without its --output."""
    folder = tmp_path_factory.mktemp("rank-faults")
    save_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", single_label_rows(60))
    return ["train", str(folder / "rows.jsonl"), "--model", str(folder / "model"), *LEARNING]


@pytest.fixture(scope="module")
def alone(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run whose processes were left alone, and its seconds."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("first", "run"):  # the equivalence check is kept
        began = time.perf_counter()
        assert started(words, folder / name, folder / f"{name}-logs").results() == [0] * COUNT
    return folder / "run", time.perf_counter() - began


def started(words: list[str], output: Path, logs: Path) -> Forked:
    ask = [*words, "--output", str(output), *(["--resume"] if (output / "run.json").exists() else [])]
    return Forked(logs, COUNT, lambda _: run(list(ask)))


def met(processes: Forked) -> None:
    """Wait until all processes have met: one that never comes is waited for, as one that is slow to start."""
    until = time.monotonic() + 240
    while not processes.said(0).strip():
        assert time.monotonic() < until
        time.sleep(0.01)


def struck(processes: Forked, rank: int, sent: signal.Signals) -> str | None:
    """Send a signal to one process, and return what became of the run: None if it was done before."""
    began = time.monotonic()
    os.kill(processes.pids[rank], sent)
    others = [each for each in range(COUNT) if each != rank or sent == signal.SIGTERM]
    codes = {each: processes.exit_code(each) for each in others}
    passed_s = time.monotonic() - began
    if sent != signal.SIGTERM:
        os.kill(processes.pids[rank], signal.SIGKILL)
        processes.exit_code(rank)
    said = "".join(processes.said(each) for each in range(COUNT))
    if 0 in codes.values() and set(codes.values()) <= {0, None}:  # done, but for the end of one that SIGTERM came to
        return None
    assert passed_s < WITHIN_S + 1, f"{passed_s:.1f} s: {said}"
    if sent == signal.SIGTERM and codes[0] == 143:
        assert set(codes.values()) <= {143, 0}, (codes, said)
        return f"all saved, {passed_s:.1f} s"
    if sent == signal.SIGTERM:  # it came before signals are heard, and ended that process
        assert set(codes.values()) <= {7, None, 1}, (codes, said)
        return f"ended by it, {passed_s:.1f} s"
    assert set(codes.values()) == {7}, (codes, said)
    assert f"error: process {rank} of {COUNT} (" in said, said
    return f"named, {passed_s:.1f} s"


def test_one(words: list[str], alone: tuple[Path, float], tmp_path: Path) -> None:
    output = tmp_path / "run"
    processes = started(words, output, tmp_path / "first")
    until = time.monotonic() + 240
    while not ((output / "events.jsonl").exists() and len(events(output, "step")) >= 5):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert struck(processes, 1, signal.SIGKILL) is not None
    assert started(words, output, tmp_path / "second").results() == [0] * COUNT
    assert learned(output) == learned(alone[0])
    assert checkpoints(output) == checkpoints(alone[0])


@pytest.mark.faults
def test_rank_campaign(words: list[str], alone: tuple[Path, float], tmp_path: Path) -> None:
    """Runs of which one process is struck at random moments, up to three times each, resumed until they are done."""
    wanted = int(os.environ.get("BRIMFUL_RANK_KILLS", "50"))
    seed = int(os.environ.get("BRIMFUL_SEED", secrets.randbelow(2**32)))
    draw, began, expected = random.Random(seed), time.perf_counter(), learned(alone[0])
    say(header(seed, wanted, alone[1], str(expected["weights"])), new=True)
    kills, number = 0, 0
    while kills < wanted:
        number += 1
        output, times = tmp_path / f"run-{number}", draw.randint(1, 3)
        for strike in range(times + 1):
            processes = started(words, output, tmp_path / f"logs-{number}-{strike}")
            if strike == times:
                assert processes.results() == [0] * COUNT
                break
            after_s, rank, sent = draw.uniform(0, 0.6 * alone[1]), draw.randrange(COUNT), draw.choice(SENT)
            met(processes)
            time.sleep(after_s)
            found = struck(processes, rank, sent)
            if found is None:  # it was done
                break
            kills += 1
            there = " ".join(map(str, checkpoints(output))) or "none"
            say(f"{kills:5}  {number:4}  {after_s:7.3f}  {rank:4}  {sent.name:<8}  {found:<20}  {there}")
        assert learned(output) == expected, f"seed {seed}, run {number}"
    say(
        f"\n{kills} of {number} runs in {time.perf_counter() - began:.0f} s. Each run, resumed, ended with the weights,"
        " metrics and losses of the one left alone, bit for bit."
    )


def header(seed: int, wanted: int, typical_s: float, weights: str) -> str:
    return (
        f"One random process of {COUNT} of a training run on gloo, struck at a random moment ({' '.join(LEARNING)}).\n"
        f"seed {seed}, at least {wanted}, a run alone takes {typical_s:.2f} s; torch {torch.__version__},"
        f" {platform.system()} {platform.machine()}\n"
        f"weights of the run left alone: SHA-256 {weights}\n\n"
        " kill   run  after s  rank  signal    then                  checkpoints there"
    )


def say(text: str, *, new: bool = False) -> None:
    """Print a line and keep it in the log."""
    print(text, flush=True)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("w" if new else "a", encoding="utf-8") as log:
        log.write(text + "\n")
