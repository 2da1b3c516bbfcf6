"""Mutants: `src` with one line changed for the worse, each of which the tests named beside it must notice.

    python tests/mutants/run_mutants.py              all that a CPU can kill
    python tests/mutants/run_mutants.py --gpu        those that only a GPU can kill
    python tests/mutants/run_mutants.py -k clip      those whose name or file has "clip" in it
    python tests/mutants/run_mutants.py --list       names, files and tests, without running any

`mutants.toml` is the list. Each mutant is made in a copy of `src`, which is what the tests import. The named tests are
first run on a copy without a mutant: a test that fails anyway kills nothing. Nor do tests that do not end: they are
`TIMED OUT`, and the exit code is 1 unless all mutants are killed.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
#: Exit codes of pytest: all passed, and at least one test failed. All others are no verdict.
_PASSED, _FAILED = 0, 1
#: Tests run in forks of one process that has imported what takes seconds, and nothing of ours.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "transformers", "sklearn.metrics", "scipy.stats", "hypothesis"])


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed line.

    file: below src/brimful. old: a part of one line that occurs once in it, and new: its replacement. tests: pytest's
    node ids below tests/, at least one of which fails on the mutant. gpu: only a GPU can tell.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False

    @property
    def found(self) -> int:
        """Times that the old text occurs in the file: 1 in a list that is up to date."""
        path = ROOT / "src" / "brimful" / self.file
        return path.read_text("utf-8").count(self.old) if path.is_file() else 0

    def apply(self, src: Path) -> None:
        """Change the line in a copy of `src`."""
        path = src / "brimful" / self.file
        path.write_text(path.read_text("utf-8").replace(self.old, self.new), "utf-8")


def read_mutants() -> list[Mutant]:
    """The list, in its own order."""
    with LIST.open("rb") as file:
        return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in tomllib.load(file)["mutant"]]


def run_tests(
    tests: Iterable[str], mutant: Mutant | None, limit_s: float, *, gpu: bool = False
) -> tuple[int | None, str]:
    """Exit code of pytest on a copy of `src` with the mutant, None beyond the limit, and the last line it wrote.

    gpu: run the tests that are marked so, and no others.
    """
    with tempfile.TemporaryDirectory(prefix="brimful-mutant-") as folder:
        src, log = Path(folder) / "src", Path(folder) / "log"
        shutil.copytree(ROOT / "src", src)
        if mutant is not None:
            mutant.apply(src)
        marks = ["-m", "gpu"] if gpu else []
        quiet = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = [*quiet, "--hypothesis-profile=mutants", *marks, *(str(ROOT / "tests" / test) for test in tests)]
        process = _FORKS.Process(target=_run_pytest, args=(src, log, arguments))
        process.start()
        process.join(limit_s)
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            return None, f"no end within {limit_s:.0f} s"
        said = log.read_text("utf-8", "replace").splitlines()
    return process.exitcode, ([line for line in said if line.startswith(("FAILED", "ERROR"))] or said or [""])[-1]


def _run_pytest(src: Path, log: Path, arguments: list[str]) -> None:
    """In a process of its own, with `src` before anything else of that name."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    sys.dont_write_bytecode = False  # tests are compiled once for all mutants
    os.environ |= {"PYTHONPATH": str(src), "TMPDIR": str(src.parent)}
    sys.path.insert(0, str(src))
    sys.exit(int(pytest.main(arguments)))


def verdict(mutant: Mutant, limit_s: float) -> tuple[bool, str]:
    """Run a mutant's tests; return True if it was killed, and a line on it."""
    began = time.monotonic()
    if mutant.found != 1:
        return False, f"NOT FOUND  {mutant.name}: its old text occurs {mutant.found} times in {mutant.file}"
    code, said = run_tests(mutant.tests, mutant, limit_s, gpu=mutant.gpu)
    word = {_FAILED: "killed", None: "TIMED OUT", _PASSED: "SURVIVED"}.get(code, "BROKEN")
    return word == "killed", f"{word:9}  {mutant.name} ({time.monotonic() - began:.0f} s): {said[:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of each mutant.")
    parser.add_argument("-k", metavar="WORD", default="", help="only mutants with WORD in their name or file")
    parser.add_argument("--list", action="store_true", help="print the list and run nothing")
    parser.add_argument("--gpu", action="store_true", help="mutants that only a GPU can kill")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="mutants at a time")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=600.0, help="for the tests of one mutant")
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    chosen = [m for m in read_mutants() if m.gpu == given.gpu and given.k in f"{m.name} {m.file}"]
    if given.list:
        print(*(f"{m.name}\n    {m.file}: {', '.join(m.tests)}" for m in chosen), sep="\n")
        return 0
    if not chosen:
        print("no such mutant", file=sys.stderr)
        return 2
    compileall.compile_dir(ROOT / "src", quiet=2)  # copies take it along
    tests = dict.fromkeys(test for mutant in chosen for test in mutant.tests)
    code, said = run_tests(tests, None, given.limit * len(chosen), gpu=given.gpu)
    if code != _PASSED:
        print(f"the tests fail without a mutant: {said}", file=sys.stderr)
        return 2
    killed = 0
    with ThreadPoolExecutor(1 if given.gpu else given.jobs) as pool:
        for is_killed, line in pool.map(lambda mutant: verdict(mutant, given.limit), chosen):
            killed += is_killed
            print(line, flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
