"""SIGKILL during a classification of a file: a run that is resumed ends with the bytes of the one left alone.

make test      kills at chosen events, into one file and into a folder of shards
make faults    the campaign; BRIMFUL_KILLS=1000 and BRIMFUL_SEED=7 change its size and repeat its moments

Texts are long and the model reads their beginnings only: a window ends by its bytes after few rows, and --shard-rows
has these committed every other window.
"""

from __future__ import annotations

import json
import os
import platform
import random
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from runs import Runner, sha256
from tiny_files import review, save_classifier

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

LOG = Path(__file__).parents[3] / "benchmarks" / "faults" / "classify.log"
#: A window has 1 MiB of text on a CPU: 64 rows of these.
TEXT_BYTES, ROWS = 16 << 10, 500
#: Of the campaign: enough that most kills come while rows are classified, not before.
CAMPAIGN_ROWS = 4000
OPTIONS = ["--device", "cpu", "--max-length", "16", "--top-k", "0", "--shard-rows", "100"]
OUTPUTS = ["results.parquet", "results.csv", "results"]
#: Folder and name of an input for each output.
INPUTS = {"results.parquet": "rows.parquet", "results.csv": "rows.jsonl", "results": "rows.parquet"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier and its rows: some without text, and one that cannot be read where the form allows it."""
    return write_inputs(tmp_path_factory.mktemp("classify"), ROWS)


def write_inputs(folder: Path, num_rows: int) -> Path:
    """A model, and the same rows in two forms."""
    save_classifier(folder / "model", ["bad", "good"])
    rows = [{"id": number, "text": long_text(number)} for number in range(num_rows)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=150)
    lines = [json.dumps(row) for row in rows]
    lines[333] = lines[333][:-9]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return folder


def long_text(number: int) -> str | None:
    """A review, and much that is not read after it; null or empty now and then."""
    if number % 37 == 5:
        return None if number % 2 else ""
    text = review(bool(number % 3), number)
    return text + " and so on" * ((TEXT_BYTES - len(text)) // 10)


@pytest.fixture(scope="module")
def runner(runner: Runner, inputs: Path) -> Runner:
    """The loops' warm process, which has classified once."""
    ended = runner.warm(words(inputs, inputs / "warm" / "results.parquet"))
    assert ended.code == 0, ended.said
    return runner


@pytest.fixture(scope="module")
def alone(inputs: Path, runner: Runner) -> dict[str, dict[str, Any]]:
    """By the name of an output, the results of the run that was left alone."""
    return run_alone(runner, inputs)


def run_alone(runner: Runner, home: Path) -> dict[str, dict[str, Any]]:
    """One run into each output."""
    found = {}
    for name in OUTPUTS:
        output = home / f"alone-{name}" / name
        ended = runner(words(home, output))
        assert ended.code == 0, ended.said
        found[name] = results(output)
    return found


def words(home: Path, output: Path, *, resume: bool = False) -> list[str]:
    data = home / INPUTS[output.name]
    return ["classify", str(home / "model"), str(data), "--output", str(output), *OPTIONS, *["--resume"] * resume]


def results(output: Path) -> dict[str, Any]:
    """Hashes of all files in the folder of an output, and what its manifest counted; times differ from run to run."""
    manifest = output.with_name(output.name + ".manifest.json") if output.suffix else output / "_manifest.json"
    said = json.loads(manifest.read_text("utf-8"))
    files = sorted(path for path in output.parent.rglob("*") if path.is_file() and path != manifest)
    return {
        "files": {path.relative_to(output.parent).as_posix(): sha256(path) for path in files},
        "shards": said["shards"],
        "wal": said["wal"],
        "counts": said["record"]["counts"],
        "status": said["status"],
    }


PLANS = {
    "as the first window is written": "kill:write:{file}:2",
    "in the middle of a window": "tear:write:.wal-*:6",
    "at a commit": "kill:replace:_manifest.json:4",
    "before a file gets its name": "kill:replace:{file}:1",
    "after all is done": "kill:unlink:.lock:1",
}
#: A file of text differs from one of Parquet in how it is written, and not in how it is kept.
TEXT_PLANS = ("in the middle of a window", "before a file gets its name")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("event", "name"),
    [(event, name) for event in PLANS for name in OUTPUTS if name != "results.csv" or event in TEXT_PLANS],
)
@pytest.mark.sampled
def test_five_kills(
    event: str, name: str, runner: Runner, inputs: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / name
    file = name if output.suffix else "part-00001.parquet"
    ended = runner(words(inputs, output), PLANS[event].format(file=file))
    assert ended.code == -9, ended.said
    ended = runner(words(inputs, output, resume=True))
    assert ended.code == 0, ended.said
    assert results(output) == alone[name]


def test_a_run_that_was_left_alone(alone: dict[str, dict[str, Any]], inputs: Path) -> None:
    """The run that kills are compared with is right: every row once and in its place, shards cut where they were."""
    table = pq.read_table(inputs / "alone-results.parquet" / "results.parquet")
    shards = [pq.read_table(path) for path in sorted((inputs / "alone-results" / "results").glob("*.parquet"))]
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["text"].to_pylist() == [long_text(number) for number in range(ROWS)]
    assert len(shards) >= 4
    assert pa.concat_tables(shards).equals(table)
    assert alone["results.parquet"]["counts"]["num_empty"] == sum(not long_text(number) for number in range(ROWS))
    assert alone["results.csv"]["counts"]["num_errors"] == 1


# --- the campaign ---------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_campaign(runner: Runner, tmp_path: Path) -> None:
    """Runs killed at uniformly random moments, up to three times each, and resumed until they are done."""
    wanted = int(os.environ.get("BRIMFUL_KILLS", "100"))
    seed = int(os.environ.get("BRIMFUL_SEED", secrets.randbelow(2**32)))
    draw, began = random.Random(seed), time.perf_counter()
    home = write_inputs(tmp_path / "inputs", CAMPAIGN_ROWS)
    alone = run_alone(runner, home)
    typical_s = {name: runner(words(home, tmp_path / f"timed-{name}" / name)).seconds for name in OUTPUTS}
    say(header(seed, wanted, typical_s), new=True)
    number_of_kills = number_of_runs = missed = 0
    while number_of_kills < wanted:
        number_of_runs += 1
        name = draw.choice(OUTPUTS)
        output, found = tmp_path / f"run-{number_of_runs}" / name, list[tuple[float, str]]()
        for chances_left in range(draw.randint(1, 3), -1, -1):
            after_s = draw.uniform(0, typical_s[name])
            limit = {"kill_after_s": after_s} if chances_left else {}
            ended = runner(words(home, output, resume=bool(found)), **limit)
            if ended.code == 0:
                missed += bool(chances_left)
                break
            assert ended.code == -9, ended.said
            found.append((after_s, what_is_there(output)))
        equal = results(output) == alone[name]
        for after_s, there in found:
            number_of_kills += 1
            number = f"{number_of_kills:5}  {number_of_runs:4}  {after_s:7.3f}"
            say(f"{number}  {name:<15}  {there:<44}  {'yes' if equal else 'NO'}")
        assert equal, f"seed {seed}, run {number_of_runs}"
        shutil.rmtree(output.parent)
    say(
        f"\n{number_of_kills} kills of {number_of_runs} runs in {time.perf_counter() - began:.0f} s; {missed} came too"
        " late. Each run, resumed, ended with the files of the one left alone, byte for byte."
    )


def header(seed: int, wanted: int, typical_s: dict[str, float]) -> str:
    alone = ", ".join(f"{name} in {seconds:.2f} s" for name, seconds in typical_s.items())
    return (
        f"SIGKILL at uniformly random moments of classifying {CAMPAIGN_ROWS} rows of {TEXT_BYTES >> 10} KiB"
        f" ({' '.join(OPTIONS)}).\n"
        f"seed {seed}, at least {wanted} kills; alone {alone};"
        f" torch {torch.__version__}, pyarrow {pa.__version__}, {platform.system()} {platform.machine()}\n\n"
        f" kill   run  after s  {'output':<15}  {'what was there':<44}  equal in the end"
    )


def what_is_there(output: Path) -> str:
    """A description of the files that a kill left."""
    folder = output.with_name(output.name + ".parts") if output.suffix else output
    if not (folder / "_manifest.json").exists():
        return "all results" if output.suffix and output.exists() else "nothing"
    said = json.loads((folder / "_manifest.json").read_text("utf-8"))
    if said["status"] == "finished":
        return "all results"
    kept = {kind: sum(shard["num_rows"] for shard in said[kind]) for kind in ("shards", "wal")}
    return f"{kept['shards']} rows in shards, {kept['wal']} in the log"


def say(text: str, *, new: bool = False) -> None:
    """Prints a line and keeps it in the log."""
    print(text, flush=True)
    with LOG.open("w" if new else "a", encoding="utf-8") as log:
        log.write(text + "\n")
