"""Processes of one training as forks of this warm one, with the environment that a launcher gives them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from brimful.core.place import Place

_TRIED = itertools.count()


class Forked:
    """`count` forks that each do `work(place)`. Their results come from `results`, which waits for them."""

    started: ClassVar[list[Forked]] = []

    @classmethod
    def end_all(cls) -> None:
        """End what a test that failed has left."""
        for each in cls.started:
            for rank, pid in enumerate(each.pids):
                if each._waited(rank, os.WNOHANG) is None:
                    os.kill(pid, signal.SIGKILL)
                    each._waited(rank)
        cls.started.clear()

    def __init__(self, folder: Path, count: int, work: Callable[[Place], Any]) -> None:
        self.started.append(self)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, port = folder, free_port()
        self._statuses: dict[int, int] = {}
        self.pids: list[int] = []
        for rank in range(count):
            if pid := os.fork():
                self.pids.append(pid)
                continue
            code = 1
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
                log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
                if (commands := sys.modules.get("brimful.cli.commands")) is not None:
                    vars(commands)["_LEADER_S"] = 0.0
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                found = work(Place(rank=rank, count=count, local_rank=rank))
                (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(found))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def results(self) -> list[Any]:
        """Return what each has returned; None of one that was killed."""
        for rank in range(len(self.pids)):
            status = self._waited(rank)
            assert status is not None
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, self.said(rank)
        files = [self._folder / f"rank-{rank}.pickle" for rank in range(len(self.pids))]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]

    def exit_code(self, rank: int) -> int | None:
        """Wait for one process; return what it has returned, or the code that it ended with."""
        status = self._waited(rank)
        assert status is not None
        file = self._folder / f"rank-{rank}.pickle"
        if file.exists():
            return int(pickle.loads(file.read_bytes()))
        return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def exit_codes(self) -> list[int | None]:
        """Return `exit_code` of each."""
        return [self.exit_code(rank) for rank in range(len(self.pids))]

    def check_running(self) -> None:
        """Fail with what all have said if one has ended."""
        for rank in range(len(self.pids)):
            status = self._waited(rank, os.WNOHANG)
            if status is not None:
                said = "\n".join(f"{each}: {self.said(each)}" for each in range(len(self.pids)))
                raise AssertionError(f"process {rank} ended with {os.waitstatus_to_exitcode(status)}\n{said}")

    def _waited(self, rank: int, options: int = 0) -> int | None:
        """Wait for a process, once; None while it runs and that is not to be waited for."""
        if rank not in self._statuses:
            pid, status = os.waitpid(self.pids[rank], options)
            if not pid:
                return None
            self._statuses[rank] = status
        return self._statuses[rank]

    def said(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text("utf-8", "replace")


def free_port() -> int:
    """Return a port that this process of tests alone asks for, and below those that the system gives to anybody."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")
    first = 25_000 + 1_000 * (int(worker) % 7)
    while True:
        port = first + next(_TRIED) % 1_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
