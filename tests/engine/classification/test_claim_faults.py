"""Processes that share files by claims, and are killed, or stopped for longer than a lease and continued.

make test      kills and stops at chosen events
make faults    the campaign; BRIMFUL_KILLS=100 and BRIMFUL_SEED=7 change its size and repeat its choices

Whatever happens, the results are those of one process that was left alone: the same bytes, so every row once and in its
place, and files that the manifest knows by their hash.
"""

from __future__ import annotations

import json
import os
import platform
import random
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from claim_workers import Worker
from runs import sha256
from tiny_files import review, save_classifier

pytestmark = pytest.mark.xdist_group("claim faults")  # one process makes what they share

LOG = Path(__file__).parents[3] / "benchmarks" / "faults" / "claims.log"
FILES, ROWS = 4, 150
#: Of the campaign: files that take a process about a second.
CAMPAIGN_FILES, CAMPAIGN_ROWS, CAMPAIGN_LEASE_S, CAMPAIGN_WORKERS = 8, 1500, 2.0, 3
#: A lease that is over by the time that another process has looked twice.
SHORT = 0.2
OPTIONS = ["--claim", "--device", "cpu", "--max-length", "16", "--verify", "8", "--shard-rows", "50", "--num-workers"]


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers, and ends those that are left."""
    workers: list[Worker] = []

    def start(arguments: list[str], plan: str = "") -> Worker:
        workers.append(Worker(arguments, tmp_path / f"{len(workers)}.log", plan))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, files of rows of which one is without any, and the results of one process left alone."""
    folder = tmp_path_factory.mktemp("claims")
    save_classifier(folder / "model", ["bad", "good"])
    write_files(folder / "rows", FILES, ROWS)
    worker = Worker(words(folder, folder / "alone" / "results"), folder / "alone.log")
    assert worker.end() == 0, worker.said
    return folder


def write_files(folder: Path, files: int, rows: int) -> None:
    """Parquet files of consecutive rows, texts long enough that windows are short; the second one has no rows."""
    folder.mkdir()
    schema, first = pa.schema([("id", pa.int64()), ("text", pa.large_string())]), 0
    for number in range(files):
        here = 0 if number == 1 else rows
        table = [{"id": first + row, "text": long_text(first + row)} for row in range(here)]
        pq.write_table(pa.Table.from_pylist(table, schema=schema), folder / f"file-{number}.parquet")
        first += here


def long_text(number: int) -> str | None:
    """A review, and much that is not read after it; null now and then."""
    return None if number % 37 == 5 else review(bool(number % 3), number) + " and so on" * 1600


def words(home: Path, output: Path, lease_s: float = SHORT, rows: str = "rows") -> list[str]:
    output.parent.mkdir(exist_ok=True)
    data = str(home / rows / "*.parquet")
    return ["classify", str(home / "model"), data, "--output", str(output), *OPTIONS, "0", "--lease", str(lease_s)]


def results(output: Path) -> dict[str, Any]:
    """Hashes of all that is in a folder of results, as its manifest has them, and what was counted."""
    said = json.loads((output / "_manifest.json").read_text("utf-8"))
    files = {path.name: sha256(path) for path in output.iterdir() if path.name != "_manifest.json"}
    assert files == {shard["file"]: shard["sha256"] for shard in said["shards"]}
    assert said["status"] == "finished"
    return {"files": files, "counts": said["record"]["counts"], "shards": said["shards"]}


def ids(output: Path) -> list[int]:
    tables = [pq.read_table(path) for path in sorted(output.glob("*.parquet"))]
    found: list[int] = pa.concat_tables(tables)["id"].to_pylist()
    return found


@pytest.mark.slow
def test_one_process_has_every_row_once(home: Path) -> None:
    output = home / "alone" / "results"
    assert ids(output) == list(range((FILES - 1) * ROWS))
    assert len(results(output)["shards"]) == FILES
    record = json.loads((output / "_manifest.json").read_text("utf-8"))["record"]
    assert (record["claimed"]["num_files"], len(record["claimed"]["workers"])) == (FILES, 1)
    assert record["counts"]["num_empty"] == sum(not long_text(number) for number in range((FILES - 1) * ROWS))
    assert "4 files by 1 process" in (home / "alone.log").read_text()


@pytest.mark.slow
def test_several_processes_share_the_files(home: Path, tmp_path: Path, start: Start) -> None:
    output = tmp_path / "results"
    workers = [start(words(home, output, 60.0)) for _ in range(3)]
    assert [worker.end() for worker in workers] == [0, 0, 0], workers[0].said
    assert results(output) == results(home / "alone" / "results")


@pytest.mark.slow
def test_a_damaged_file_is_named_and_done_once_it_is_mended(home: Path, tmp_path: Path, start: Start) -> None:
    (tmp_path / "model").symlink_to(home / "model")
    shutil.copytree(home / "rows", tmp_path / "rows")
    damaged = tmp_path / "rows" / "file-2.parquet"
    at = pq.ParquetFile(damaged).metadata.row_group(0).column(1).data_page_offset
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:at] + b"\xff" * 64 + whole[at + 64 :])
    output = tmp_path / "results"
    first = start(words(tmp_path, output))
    assert first.end() == 2, first.said
    assert "1 of 4 files cannot be classified" in first.said
    assert [each.name for each in sorted(output.glob("*.parquet"))] == [f"part-0000{n}.parquet" for n in (0, 1, 3)]
    damaged.write_bytes(whole)
    second = start(words(tmp_path, output))
    assert second.end() == 0, second.said
    assert results(output)["files"] == results(home / "alone" / "results")["files"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("number", [0, 2])
def test_a_file_that_is_broken_from_its_start_on(number: int, home: Path, tmp_path: Path, start: Start) -> None:
    """The first file, which would be looked at before the others, and another one."""
    (tmp_path / "model").symlink_to(home / "model")
    shutil.copytree(home / "rows", tmp_path / "rows")
    broken = tmp_path / "rows" / f"file-{number}.parquet"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    output = tmp_path / "results"
    first = start(words(tmp_path, output))
    assert first.end() == 2, first.said
    assert f"1 of 4 files cannot be classified: {broken}: is no whole parquet file" in first.said
    others = [each for each in range(FILES) if each != number]
    assert [each.name for each in sorted(output.glob("*.parquet"))] == [f"part-0000{each}.parquet" for each in others]
    broken.write_bytes(whole)
    second = start(words(tmp_path, output))
    assert second.end() == 0, second.said
    assert results(output)["files"] == results(home / "alone" / "results")["files"]


#: Operations before which a process is killed or stopped.
PLANS = {
    "as the folder of claims is made": "rename:.claims:1",
    "after a part of a file was committed": "replace:_manifest.json:5",
    "as it is published": "rename:00002.done:1",
    "before its result is moved": "rename:part-00002.parquet:1",
}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("event", ["after a part of a file was committed", "before its result is moved"])
def test_a_killed_process(event: str, home: Path, tmp_path: Path, start: Start) -> None:
    output = tmp_path / "results"
    first = start(words(home, output), f"kill:{PLANS[event]}")
    assert first.end() == -9, first.said
    second = start(words(home, output))
    assert second.end() == 0, second.said
    assert results(output) == results(home / "alone" / "results")


@pytest.mark.sampled
@pytest.mark.parametrize("event", PLANS)
def test_a_process_that_is_stopped_for_longer_than_a_lease(
    event: str, home: Path, tmp_path: Path, start: Start
) -> None:
    """Another one does all; then the first goes on, ends as well, and has changed nothing."""
    output = tmp_path / "results"
    first = start(words(home, output), f"stop:{PLANS[event]}")
    first.wait_for(lambda: first.stopped or first.ended)
    second = start(words(home, output))
    assert second.end() == 0, second.said
    before = results(output)
    assert before == results(home / "alone" / "results")
    first.send(signal.SIGCONT)
    assert first.end() == 0, first.said
    assert results(output) == before


# --- the campaign -----------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_campaign(home: Path, tmp_path: Path) -> None:
    """Workers killed, and others stopped beyond the lease and continued, at random moments, until enough were."""
    wanted = int(os.environ.get("BRIMFUL_KILLS", "20"))
    seed = int(os.environ.get("BRIMFUL_SEED", secrets.randbelow(2**32)))
    write_files(home / "many", CAMPAIGN_FILES, CAMPAIGN_ROWS)
    began = time.monotonic()
    alone = Worker(words(home, home / "many-alone" / "results", rows="many"), tmp_path / "alone.log")
    assert alone.end() == 0, alone.said
    say(header(seed, wanted, time.monotonic() - began), new=True)
    draw, left, began, number = random.Random(seed), {"SIGKILL": wanted, "SIGSTOP": wanted}, time.monotonic(), 0
    while any(left.values()):
        number += 1
        campaign = Round(home, tmp_path / f"round-{number}", number, draw, left)
        try:
            campaign.run()
        finally:
            campaign.close()
        assert results(campaign.output) == results(home / "many-alone" / "results"), f"seed {seed}, round {number}"
        rows = len(ids(campaign.output))
        say(f"round {number}: all {CAMPAIGN_FILES} files are done, {rows:,} rows, the bytes of the process left alone")
    say(
        f"\n{wanted} SIGKILLs and {wanted} SIGSTOPs beyond the lease in {number} rounds,"
        f" {time.monotonic() - began:.0f} s. Every row is there once and in order."
    )


class Round:
    """Files done by several workers, some of which come to grief; others come in their place."""

    def __init__(self, home: Path, folder: Path, number: int, draw: random.Random, left: dict[str, int]) -> None:
        folder.mkdir()
        self.output, self._home, self._folder, self._number = folder / "results", home, folder, number
        self._draw, self._left, self._began = draw, left, time.monotonic()
        self._workers: list[Worker] = []
        self._asleep: list[tuple[Worker, set[str]]] = []

    def run(self) -> None:
        """Until all is done and everybody has ended well."""
        while not (self.output / "_manifest.json").exists():
            awake = [worker for worker in self._workers if not worker.ended and not worker.stopped]
            for worker in self._workers:
                assert worker.process.exitcode in (None, 0, -9), worker.said
            if len(awake) < CAMPAIGN_WORKERS:
                log = self._folder / f"{len(self._workers)}.log"
                self._workers.append(Worker(words(self._home, self.output, CAMPAIGN_LEASE_S, "many"), log))
            elif (kind := self._draw.choice([kind for kind in self._left if self._left[kind]] or [""])) and (
                held := self._held(worker := self._draw.choice(awake))
            ):
                self._strike(kind, worker, held)
            self._wake()
            time.sleep(self._draw.uniform(0.0, 0.4))
        for worker, _ in self._asleep:
            worker.send(signal.SIGCONT)
        for worker in self._workers:
            assert worker.end() in (0, -9), worker.said

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _held(self, worker: Worker) -> set[str]:
        """Names of the newest claims of a worker on files that have no result."""
        found = set[str]()
        for claim in (self.output / ".claims").glob("*.claim"):
            text = claim.read_text("utf-8", "replace") if claim.exists() else ""
            piece, generation, _ = claim.name.split(".")
            later = claim.with_name(f"{piece}.{int(generation) + 1}.claim")
            done = claim.with_name(f"{piece}.done").exists() or later.exists()
            if f'"pid": {worker.process.pid},' in text and not done:
                found.add(claim.name)
        return found

    def _strike(self, kind: str, worker: Worker, held: set[str]) -> None:
        try:
            worker.send(getattr(signal, kind))
        except ProcessLookupError:
            return
        self._left[kind] -= 1
        if kind == "SIGKILL":
            worker.process.join()
        else:
            self._asleep.append((worker, held))
        self._tell(kind, worker, ", ".join(sorted(held)))

    def _wake(self) -> None:
        """Continue those whose claims have been followed by others', so that they slept for longer than a lease."""
        for worker, held in list(self._asleep):
            followed = [
                (self.output / ".claims" / f"{name[:5]}.{int(name.split('.')[1]) + 1}.claim").exists()
                or (self.output / ".claims" / f"{name[:5]}.done").exists()
                for name in held
            ]
            if all(followed) and self._draw.random() < 0.3:
                self._asleep.remove((worker, held))
                worker.send(signal.SIGCONT)
                self._tell("SIGCONT", worker, f"{', '.join(sorted(held))}: taken over since")

    def _tell(self, kind: str, worker: Worker, what: str) -> None:
        number = self._workers.index(worker)
        say(f"{self._number:5}  {time.monotonic() - self._began:7.2f}  {kind:<8} {number:6}  {what}")


def header(seed: int, wanted: int, alone_s: float) -> str:
    return (
        f"{CAMPAIGN_WORKERS} processes at a time share {CAMPAIGN_FILES} files of {CAMPAIGN_ROWS} rows of 16 KiB (one"
        f" without rows) by --claim --lease {CAMPAIGN_LEASE_S:g}.\nWhoever is drawn and works on a file is killed, or"
        f" stopped until another process has claimed its file, and then continued.\nseed {seed}, {wanted} of each;"
        f" one process alone {alone_s:.1f} s; torch {torch.__version__}, pyarrow {pa.__version__},"
        f" {platform.system()} {platform.machine()}\n\nround  after s  {'signal':<8} worker  claims held"
    )


def say(text: str, *, new: bool = False) -> None:
    """Prints a line and keeps it in the log."""
    print(text, flush=True)
    with LOG.open("w" if new else "a", encoding="utf-8") as log:
        log.write(text + "\n")
