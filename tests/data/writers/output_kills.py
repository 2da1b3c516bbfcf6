"""Writes results in forks of one process, ends each before one of the things that it does to the disk, and resumes it.

    python output_kills.py NAME STEP [tear|again]    NAME of the output, such as results.parquet; every STEP-th place

PYTHONPATH has the folders tests and tests/engine.
Prints a line of JSON: the number of `places`, of `kills`, and the `wrong` ones with what was wrong.
    tear: half of a write is done, and synced. again: each resumed run is killed too, and resumed.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import kill_driver

from brimful.data.writers.shards import ShardedOutput
from outputs import RECORD, contents, counts_of, windows

WINDOWS = windows([40, 40, 40, 40, 25])
OLD = windows([3], seed=9)
#: Windows whose `write` returned in the newest fork.
returned = mmap.mmap(-1, 8)


def write(path: Path, *, resume: bool, old: bool = False) -> None:
    """One run. Every window is committed, and what was written is there when it is resumed."""
    with ShardedOutput(path, identity={"old": old}, resume=resume, shard_rows=80, commit_s=0) as output:
        assert not resume or output.finished or output.rows_done >= min(40 * returned[0], 185)
        assert output.lost is None, output.lost
        if output.finished:
            return
        row = 0
        for window in OLD if old else WINDOWS:
            if row >= output.rows_done:
                output.write(window, counts_of(window))
                returned[0] = 1 + row // 40
            row += window.num_rows
        assert output.counts.num_rows == row
        output.finish(RECORD)


def fork(plan: str, path: Path, *, resume: bool) -> int:
    """The exit code of one run; negative for a signal."""

    def work() -> None:
        kill_driver.arrange(plan, str(path.parent))
        write(path, resume=resume)
        for write_down in kill_driver._at_end:
            write_down()

    return forked(work)


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(folder: Path, name: str) -> Path:
    """A new folder, in which a file has its older results already."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if Path(name).suffix:
        forked(lambda: write(folder / name, resume=False, old=True))
    returned[0] = 0
    return folder / name


def main(name: str, step: int, how: str = "") -> None:
    home = Path(tempfile.mkdtemp())
    kinds = "write" if how == "tear" else "any"
    path = start(home / "alone", name)
    old = contents(path)
    assert fork(f"count:{kinds}:*:{home / 'count'}", path, resume=False) == 0
    expected, places = contents(path), int((home / "count").read_text())
    kills, wrong = 0, list[str]()
    for place in range(1, places + 1, step):
        path = start(home / "run", name)
        codes = [fork(f"{'tear' if how == 'tear' else 'kill'}:{kinds}:*:{place}", path, resume=False)]
        if contents(path).get(name) not in (None, old.get(name), expected.get(name)):
            wrong.append(f"{place}: neither the old file nor the new one")
        if how == "again":
            codes.append(fork(f"kill:any:*:{1 + place * 7 % 60}", path, resume=True))
        kills += codes.count(-9)
        begun = contents(path) != old or path.with_name(name + ".parts").exists() or path.is_dir()
        code = fork("", path, resume=begun)
        if codes[0] != -9 or code != 0 or contents(path) != expected:
            wrong.append(f"{place}: {codes}, {code}, {sorted(contents(path))}")
    shutil.rmtree(home)
    print(json.dumps({"places": places, "kills": kills, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
