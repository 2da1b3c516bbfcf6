"""SIGKILL at chosen points and at random moments: every resumed run ends with the weights of the one left alone.

make thorough  five kills at chosen points, of which make test has one
make faults    the campaign; BRIMFUL_KILLS=1000 and BRIMFUL_SEED=7 change its size and repeat its moments
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import shutil
import time
from pathlib import Path

import pytest
import torch

from runs import Ended, Runner, checkpoints, learned

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

LOG = Path(__file__).parents[3] / "benchmarks" / "faults" / "train.log"
LEARNING = [
    *("--max-length", "48", "--batch-size", "8", "--num-train-epochs", "4", "--learning-rate", "3e-3"),
    *("--eval-steps", "4", "--save-steps", "3", "--save-total-limit", "2", "--metric-for-best-model", "loss"),
    *("--logging-steps", "1", "--token-budget", "96"),
]
#: A run that saves, evaluates, rotates and exports in as little as can be.
SHORT = [
    *("--max-length", "48", "--batch-size", "27", "--num-train-epochs", "2", "--learning-rate", "3e-3"),
    *("--eval-steps", "1", "--save-steps", "1", "--save-total-limit", "1", "--logging-steps", "2"),
    *("--metric-for-best-model", "accuracy"),
]
#: What a run does to the disk besides writing.
RARE = ("open", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate")


@pytest.fixture(scope="session")
def words(rows: Path, model: Path) -> list[str]:
    """A run of 28 steps with dropout, 10 checkpoints, 7 evaluations and a best model, without its --output."""
    return ["train", str(rows), "--model", str(model), *LEARNING]


@pytest.fixture(scope="session")
def alone(home: Path, runner: Runner, words: list[str]) -> tuple[Path, Ended]:
    """The run that was left alone."""
    ended = runner([*words, "--output", str(home / "alone")])
    assert ended.code == 0, ended.said
    return home / "alone", ended


@pytest.mark.sampled
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("kill:write:weights.safetensors:2", id="during the first checkpoint's weights"),
        pytest.param("kill:open:state.json:3", id="between the files of the third checkpoint"),
        pytest.param("kill:replace:manifest.json:2", id="before the second manifest is renamed into place"),
        pytest.param("kill:fsync:tokenizer.json:1", id="during the export of the model"),
        pytest.param("kill:replace:run.json:2", id="before the final record is renamed into place"),
    ],
)
def test_five_kills(plan: str, runner: Runner, words: list[str], alone: tuple[Path, Ended], tmp_path: Path) -> None:
    output = tmp_path / "run"
    ended = runner([*words, "--output", str(output)], plan)
    assert ended.code == -9, ended.said
    ended = runner([*words, "--output", str(output), "--resume"])
    assert ended.code == 0, ended.said
    assert learned(output) == learned(alone[0])
    left = [path for path in output.rglob("*") if path.name.startswith((".tmp-", ".old-"))]
    assert left == []
    assert checkpoints(output) == checkpoints(alone[0])


@pytest.mark.thorough
def test_killed_before_the_last_old_checkpoint_is_removed(
    runner: Runner, words: list[str], alone: tuple[Path, Ended], tmp_path: Path
) -> None:
    """The resumed run has nothing to save, and removes what was to be removed."""
    output = tmp_path / "run"
    removed = operations(runner, words, tmp_path / "counted", "unlink", "manifest.json")
    ended = runner([*words, "--output", str(output)], f"kill:unlink:manifest.json:{removed}")
    assert ended.code == -9, ended.said
    assert len(checkpoints(output)) == len(checkpoints(alone[0])) + 1
    ended = runner([*words, "--output", str(output), "--resume"])
    assert ended.code == 0, ended.said
    assert checkpoints(output) == checkpoints(alone[0])


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 0.95])
def test_kills_before_any_operation(
    share: float, runner: Runner, words: list[str], alone: tuple[Path, Ended], home: Path, tmp_path: Path
) -> None:
    """Of all that a run does to the disk, some more points of every kind."""
    count = operations(runner, words, home / "counted", "any")
    output = tmp_path / "run"
    ended = runner([*words, "--output", str(output)], f"kill:any:*:{1 + int(share * count)}")
    assert ended.code == -9, ended.said
    ended = runner([*words, "--output", str(output), "--resume"])
    assert ended.code == 0, ended.said
    assert learned(output) == learned(alone[0])


def operations(runner: Runner, words: list[str], output: Path, kind: str, name: str = "*") -> int:
    """The number of times that an uninterrupted run changes the disk under its folder."""
    counts = output.with_suffix(".txt")
    if not counts.exists():
        ended = runner([*words, "--output", str(output)], f"count:{kind}:{name}:{counts}")
        assert ended.code == 0, ended.said
    return int(counts.read_text("utf-8"))


# --- the campaign ---------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_campaign(runner: Runner, words: list[str], alone: tuple[Path, Ended], tmp_path: Path) -> None:
    """Runs killed at uniformly random moments, up to three times each, and resumed until they are done."""
    wanted = int(os.environ.get("BRIMFUL_KILLS", "200"))
    seed = int(os.environ.get("BRIMFUL_SEED", secrets.randbelow(2**32)))
    draw, began = random.Random(seed), time.perf_counter()
    typical_s = runner([*words, "--output", str(tmp_path / "timed")]).seconds
    expected, number_of_kills, number_of_runs, missed = learned(alone[0]), 0, 0, 0
    say(header(seed, wanted, typical_s, expected["weights"]), new=True)
    while number_of_kills < wanted:
        number_of_runs += 1
        output, found, starts = tmp_path / f"run-{number_of_runs}", list[tuple[float, str]](), list[str]()
        for chances_left in range(draw.randint(1, 3), -1, -1):
            after_s = draw.uniform(0, typical_s)
            limit = {"kill_after_s": after_s} if chances_left else {}
            ended = runner([*words, "--output", str(output), *(["--resume"] if found else [])], **limit)
            starts += [went_on(ended)] if found else []
            if ended.code == 0:
                missed += bool(chances_left)
                break
            assert ended.code == -9, ended.said
            found.append((after_s, what_is_there(output)))
        equal = learned(output) == expected
        for (after_s, there), start in zip(found, starts, strict=True):
            number_of_kills += 1
            number = f"{number_of_kills:5}  {number_of_runs:4}  {after_s:7.3f}"
            say(f"{number}  {there:<58}  {start:<15}  {'yes' if equal else 'NO'}")
        assert equal, f"seed {seed}, run {number_of_runs}"
    say(
        f"\n{number_of_kills} kills of {number_of_runs} runs in {time.perf_counter() - began:.0f} s; {missed} came too"
        " late. Each run, resumed, ended with the weights, metrics and losses of the one left alone, bit for bit."
    )


@pytest.mark.faults
def test_every_operation(rows: Path, model: Path, runner: Runner, tmp_path: Path) -> None:
    """A short run, killed before each thing that it does to the disk, and with writes torn; resumed each time."""
    words = ["train", str(rows), "--model", str(model), *SHORT]
    assert runner([*words, "--output", str(tmp_path / "alone")]).code == 0
    expected, began = learned(tmp_path / "alone"), time.perf_counter()
    counts = {kind: operations(runner, words, tmp_path / f"count-{kind}", kind) for kind in (*RARE, "write")}
    plans = [f"kill:{kind}:*:{place + 1}" for kind in RARE for place in range(counts[kind])]
    # A checkpoint is hundreds of writes, one a tensor, and all alike: a few of each file, and those of small files.
    for act in ("kill", "tear"):
        plans += [f"{act}:write:*:{place + 1}" for place in range(0, counts["write"], counts["write"] // 40)]
        plans += [f"{act}:write:{name}:1" for name in ("state.json", "manifest.json", "run.json", "events.jsonl")]
    num_writes = sum(":write:" in plan for plan in plans)
    for index, plan in enumerate(plans):
        output = tmp_path / f"run-{index}"
        ended = runner([*words, "--output", str(output)], plan)
        assert ended.code == -9, f"{plan}: {ended.said}"
        ended = runner([*words, "--output", str(output), "--resume"])
        assert ended.code == 0, f"{plan}: {ended.said}"
        assert learned(output) == expected, plan
        shutil.rmtree(output)
    say(
        f"\nA short run ({' '.join(SHORT)}), killed {len(plans)} times: before each of the {len(plans) - num_writes}"
        f" things that it does to the disk besides writing, and before and in the middle of some of its writes. Each,"
        f" resumed, ended with equal weights, metrics and losses ({time.perf_counter() - began:.0f} s)."
    )


def header(seed: int, wanted: int, typical_s: float, weights: str) -> str:
    return (
        f"SIGKILL at uniformly random moments of a training run ({' '.join(LEARNING)}).\n"
        f"seed {seed}, at least {wanted} kills, a run alone takes {typical_s:.2f} s;"
        f" torch {torch.__version__}, {platform.system()} {platform.machine()}\n"
        f"weights of the run left alone: SHA-256 {weights}\n\n"
        f" kill   run  after s  {'what was there':<58}  next start from  equal in the end"
    )


def what_is_there(folder: Path) -> str:
    """A description of the files that a kill left."""
    if not (folder / "run.json").exists():
        names = sorted(path.name.split("-")[0] for path in folder.glob("*")) if folder.exists() else []
        return ", ".join(names) or "nothing"
    whole = checkpoints(folder)
    torn = len(list((folder / "checkpoints").glob("step-*"))) - len(whole)
    parts = [f"checkpoints {' '.join(map(str, whole)) or 'none'}"]
    parts += [f"{torn} torn"] if torn else []
    parts += ["model"] if (folder / "model").exists() else []
    parts += ["unfinished files"] if list(folder.rglob(".tmp-*")) else []
    return ", ".join(parts)


def went_on(ended: Ended) -> str:
    """The place that a start began at, by its own words."""
    if "had finished" in ended.said:
        return "was finished"
    for line in ended.said.splitlines():
        if "going on after step" in line:
            return line.strip().removeprefix("going on after ")
    return "the beginning" if "starting from the beginning" in ended.said else "(killed first)"


def say(text: str, *, new: bool = False) -> None:
    """Prints a line and keeps it in the log."""
    print(text, flush=True)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("w" if new else "a", encoding="utf-8") as log:
        log.write(text + "\n")
