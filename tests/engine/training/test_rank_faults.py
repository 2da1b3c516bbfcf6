"""SIGKILL, SIGSTOP and SIGTERM of one random process of several at random moments: named, resumed, the same weights.

make thorough  one at a chosen step
make faults    the campaign; BRIMFUL_RANK_KILLS=50, which SIGTERMs are not counted among, and BRIMFUL_SEED=7 change its
               size and repeat its moments

Half of its runs have dropout, as many processes and one --sharding all the way, and end with the bits of a run left
alone. The others have no dropout; the number of processes and --sharding are drawn anew for each part.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
#: Of the campaign: three and one of five.
SENT = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGTERM)
SHARDINGS = ("none", "states", "gradients", "parameters")
#: Seconds within which the others must have named the one that is gone, and ended.
WITHIN_S = 10.0
#: Seconds in which a checkpoint is begun, if a strike is to come while one is written.
BEGUN_S = 2.0
#: Losses and weights of runs by other numbers of processes, whose sums are rounded otherwise.
NEAR = {"rel": 1e-3, "abs": 1e-4}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of 28 steps with dropout, checkpoints and evaluations, without its --output."""
    folder = tmp_path_factory.mktemp("rank-faults")
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "no-dropout", dropout=0.0)
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


def started(words: list[str], output: Path, logs: Path, count: int = COUNT) -> Forked:
    ask = [*words, "--output", str(output), *(["--resume"] if (output / "run.json").exists() else [])]
    return Forked(logs, count, lambda _: run(list(ask)))


def met(processes: Forked) -> None:
    """Wait until all processes have met: one that never comes is waited for, as one that is slow to start."""
    until = time.monotonic() + 240
    while not processes.said(0).strip():
        assert time.monotonic() < until
        time.sleep(0.01)


def last_step(output: Path) -> int:
    """Return the last step that a run has told of, while it may be writing."""
    path = output / "events.jsonl"
    return max((each["step"] for each in events(output, "step")), default=0) if path.exists() else 0


def half_written(output: Path) -> int:
    """Return how many checkpoints have files and no manifest."""
    folders = (output / "checkpoints").glob("step-*")
    return sum(any(each.iterdir()) and not (each / "manifest.json").exists() for each in list(folders))


def struck(processes: Forked, rank: int, sent: signal.Signals) -> str | None:
    """Send a signal to one process, and return what became of the run: None if it was done before."""
    began, count = time.monotonic(), len(processes.pids)
    os.kill(processes.pids[rank], sent)
    others = [each for each in range(count) if each != rank or sent == signal.SIGTERM]
    codes = {each: processes.exit_code(each) for each in others}
    passed_s = time.monotonic() - began
    if sent != signal.SIGTERM:
        os.kill(processes.pids[rank], signal.SIGKILL)
        processes.exit_code(rank)
    said = "".join(processes.said(each) for each in range(count))
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
    assert f"error: process {rank} of {count} (" in said, said
    return f"named, {passed_s:.1f} s"


@pytest.mark.thorough
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


@dataclass
class Campaign:
    """Runs that are struck, of which each is held to one that was left alone."""

    words: list[str]
    folder: Path
    draw: random.Random
    kills: int = 0
    strikes: int = 0
    while_writing: int = 0
    left_alone: dict[tuple[bool, str], Path] = field(default_factory=dict)

    def asked(self, dropout: bool, sharding: str) -> list[str]:
        """Return the words of a part of a run."""
        words = [each if dropout or not each.endswith("/model") else each[:-5] + "no-dropout" for each in self.words]
        return [*words, "--sharding", sharding]

    def reference(self, dropout: bool, sharding: str) -> Path:
        """Return a run that was left alone."""
        if (dropout, sharding) not in self.left_alone:
            output = self.folder / f"alone-{dropout}-{sharding}"
            processes = started(self.asked(dropout, sharding), output, self.folder / f"{output.name}-logs")
            assert processes.results() == [0] * COUNT
            self.left_alone[dropout, sharding] = output
        return self.left_alone[dropout, sharding]

    def one(self, number: int) -> None:
        """Strike one run up to three times, and resume it until it is done."""
        draw, output, fixed = self.draw, self.folder / f"run-{number}", self.draw.random() < 0.5
        sharding, times = draw.choice(SHARDINGS), draw.randint(1, 3)
        for part in itertools.count():
            struck_now = part < times
            count = COUNT if fixed else draw.randint(2 if struck_now else 1, 3)
            sharding = sharding if fixed else draw.choice(SHARDINGS)
            logs = self.folder / f"logs-{number}-{part}"
            processes = started(self.asked(fixed, sharding), output, logs, count)
            if not struck_now:
                assert processes.results() == [0] * count
                say(f"{'':5}  {number:4}  {'':4}  {count:2}  {sharding:<10}  {'':4}  {'':<8}  done")
                break
            if not self.strike(number, processes, output, sharding):
                break
        self.check(output, fixed, sharding)

    def strike(self, number: int, processes: Forked, output: Path, sharding: str) -> bool:
        """Strike one process at a random moment, or as a checkpoint is written; return False if all was done."""
        draw, count = self.draw, len(processes.pids)
        step, after_s = draw.randint(0, 27), draw.uniform(0, 0.3)
        rank, sent = draw.randrange(count), draw.choice(SENT)
        met(processes)
        until = time.monotonic() + 240
        while step > last_step(output) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(after_s if step else 5 * after_s)
        if draw.random() < 0.5:
            until = time.monotonic() + BEGUN_S
            while not half_written(output) and time.monotonic() < until:
                time.sleep(0.0005)
        found = struck(processes, rank, sent)
        if found is None:
            return False
        begun = half_written(output)
        self.strikes += 1
        self.kills += sent != signal.SIGTERM
        self.while_writing += bool(begun)
        there = " ".join(map(str, checkpoints(output))) or "none"
        there += f", {begun} half written" if begun else ""
        at = f"{self.strikes:5}  {number:4}  {step:4}  {count:2}  {sharding:<10}  {rank:4}  {sent.name:<8}"
        say(f"{at}  {found:<20}  {there}")
        return True

    def check(self, output: Path, fixed: bool, sharding: str) -> None:
        """Hold a run to the one left alone."""
        expected, found = learned(reference := self.reference(fixed, sharding if fixed else "none")), learned(output)
        if fixed:
            assert found == expected
            return
        for name in ("status", "steps", "skipped_steps"):
            assert found[name] == expected[name]
        for told, left in zip(found["told"], expected["told"], strict=True):
            assert told[:3:2] == left[:3:2]  # step and learning rate
            assert told[1] == pytest.approx(left[1], **NEAR)
        for (step, metrics), (left_step, left_metrics) in zip(found["evaluated"], expected["evaluated"], strict=True):
            assert (step, metrics["loss"]) == (left_step, pytest.approx(left_metrics["loss"], **NEAR))
        weights, others = (load_file(each / "model" / "model.safetensors") for each in (output, reference))
        for name, tensor in others.items():
            if name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes whole steps
                continue
            torch.testing.assert_close(weights[name], tensor, rtol=NEAR["rel"], atol=NEAR["abs"])


@pytest.mark.faults
def test_rank_campaign(words: list[str], alone: tuple[Path, float], tmp_path: Path) -> None:
    """Runs of which one process is struck at random moments, up to three times each, resumed until they are done."""
    wanted = int(os.environ.get("BRIMFUL_RANK_KILLS", "50"))
    seed = int(os.environ.get("BRIMFUL_SEED", secrets.randbelow(2**32)))
    began = time.perf_counter()
    campaign = Campaign(words, tmp_path, random.Random(seed))
    say(header(seed, wanted, alone[1], str(learned(alone[0])["weights"])), new=True)
    number = 0
    while campaign.kills < wanted:
        number += 1
        try:
            campaign.one(number)
        except BaseException:
            say(f"seed {seed}, run {number} failed")
            raise
    say(
        f"\n{campaign.kills} SIGKILLs and SIGSTOPs, {campaign.strikes - campaign.kills} SIGTERMs, in {number} runs and"
        f" {time.perf_counter() - began:.0f} s; {campaign.while_writing} while a checkpoint was written. Each run,"
        " resumed, ended with the weights, metrics and losses of one left alone: bit for bit with 3 processes and one"
        f" --sharding all the way, within {NEAR['rel']:g} (or {NEAR['abs']:g} of weights) where they were drawn anew."
    )


def header(seed: int, wanted: int, typical_s: float, weights: str) -> str:
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h"], cwd=LOG.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"One random process of 2 or 3 of a training run on gloo, struck at a random moment ({' '.join(LEARNING)}).\n"
        f"commit {commit or 'unknown'}, {datetime.now(UTC):%Y-%m-%d}; seed {seed}, at least {wanted} SIGKILLs and"
        f" SIGSTOPs, a run alone takes {typical_s:.2f} s; torch {torch.__version__},"
        f" {platform.system()} {platform.machine()}\n"
        f"weights of the run left alone: SHA-256 {weights}\n\n"
        " strike  run  step   of  sharding    rank  signal    then                  checkpoints there"
    )


def say(text: str, *, new: bool = False) -> None:
    """Print a line and keep it in the log."""
    print(text, flush=True)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("w" if new else "a", encoding="utf-8") as log:
        log.write(text + "\n")
