"""Two processes, a GPU each, that take one command line after another: what a start costs, they pay once.

python pair.py FOLDER      their launcher, and under it one of the processes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: Against hanging.
_MOST_S = 300.0
_POLL_S = 0.02


class Pair:
    """Processes that are started with the first command, and again after one that ended them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number, self._starts = folder, 0, 0
        self._launcher: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str]) -> tuple[list[int], str]:
        """Have both run a command to its end. Return their exit codes, and what the first one said, or both where it
        failed."""
        self.begin(words)
        self.wait_for(lambda: all(self._told(rank, "code") for rank in (0, 1)))
        codes, said = [int(self._told(rank, "code")) for rank in (0, 1)], self._told(0, "log")
        return codes, f"{said}\nthe other one:\n{self._told(1, 'log')}" if any(codes) else said

    def begin(self, words: Sequence[str]) -> None:
        """Have both begin a command."""
        if not self._runs():
            self._start()
        self._number += 1
        _write(self._here / f"{self._number}.json", json.dumps(list(words)))

    def wait_for(self, found: Callable[[], object]) -> None:
        """Wait until something is there, while both run."""
        until = time.monotonic() + _MOST_S
        while not found():
            said = "\n".join(f"{rank}: {self._told(rank, 'log')}" for rank in (0, 1))
            assert self._runs(), f"the processes have ended\n{said}"
            assert time.monotonic() < until, f"nothing after {_MOST_S:.0f} s\n{said}"
            time.sleep(_POLL_S)

    def pid(self, rank: int) -> int:
        """The number of a process."""
        return int((self._here / f"pid-{rank}").read_text())

    def ended(self) -> tuple[str, str]:
        """Wait until both processes have ended; return the exit code of the first one, and what it said."""
        assert self._launcher is not None
        code = self._launcher.wait(_MOST_S)
        return self._told(0, "code") or str(code), self._told(0, "log")

    def close(self) -> None:
        """End both."""
        if self._launcher is not None and self._runs():
            (self._here / "end").touch()
            self._launcher.wait(_MOST_S)

    def _runs(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is None

    @property
    def _here(self) -> Path:
        return self._folder / str(self._starts)

    def _start(self) -> None:
        self._starts += 1
        self._number = 0
        self._here.mkdir(parents=True)
        self._launcher = subprocess.Popen([sys.executable, __file__, str(self._here)])

    def _told(self, rank: int, what: str) -> str:
        file = self._here / f"{self._number}-{rank}.{what}"
        return file.read_text() if file.exists() else ""


def _write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def _work(folder: Path) -> None:
    from brimful.cli.commands import run
    from brimful.cli.launch import watch_launcher

    watch_launcher()
    rank = os.environ["RANK"]
    _write(folder / f"pid-{rank}", str(os.getpid()))
    number = 1
    while not (folder / "end").exists():
        if not (folder / f"{number}.json").exists():
            time.sleep(_POLL_S)
            continue
        words = json.loads((folder / f"{number}.json").read_text())
        log = os.open(folder / f"{number}-{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code = run(words)
        sys.stdout.flush()
        sys.stderr.flush()
        _write(folder / f"{number}-{rank}.code", str(code))
        if code == 7:  # connections of the other one are gone
            return
        number += 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        _work(Path(sys.argv[1]))
    else:
        from brimful.cli.launch import launch

        sys.exit(launch([sys.executable, *sys.argv], 2))
