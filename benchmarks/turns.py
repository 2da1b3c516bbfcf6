"""Turns of processes that share a GPU: one times its rounds while the others load, compile and wait.

With a file's name in BENCHMARK_TURNS, a process that takes its turn holds that file's lock until it gives the turn
back; a process that ends gives it back, too. Without the variable every call returns at once.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

_VARIABLE = "BENCHMARK_TURNS"
_held: list[IO[str]] = []
_waits_s: list[float] = []


def begin(folder: Path) -> None:
    """Have processes that are started from now on take turns, by a file in this folder."""
    os.environ[_VARIABLE] = str(folder / "turns")


def end() -> None:
    """Have processes that are started from now on run as they come."""
    os.environ.pop(_VARIABLE, None)


def shared() -> bool:
    """True if this process takes turns with others."""
    return bool(os.environ.get(_VARIABLE))


def take() -> float:
    """Wait until no other process has its turn, and hold it; the seconds that it took. Nothing happens where it is held
    already."""
    began = time.perf_counter()
    if not shared() or _held:
        return 0.0
    file = Path(os.environ[_VARIABLE]).open("a")  # noqa: SIM115 (held until the turn is given back)
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)
    _waits_s.append(time.perf_counter() - began)
    return _waits_s[-1]


def waited_s() -> float:
    """Seconds that this process has waited for its turns so far."""
    return sum(_waits_s)


def give() -> None:
    """Let the next process have its turn."""
    while _held:
        with _held.pop() as file:
            fcntl.flock(file, fcntl.LOCK_UN)  # processes that were forked meanwhile have it open, too
