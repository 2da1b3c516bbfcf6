"""Processes that run a command line beside one another, forked of this one, which has imported what takes seconds.

Each is a real process: it can be killed, stopped and continued from outside, or by a plan of `kill_driver` at an
operation of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401
import torch
import transformers.models.bert.modeling_bert  # noqa: F401

import brimful.api
import brimful.cli.flags  # noqa: F401

_FORKS = multiprocessing.get_context("fork")
_DRIVER = str(Path(__file__).with_name("engine") / "training")


class Worker:
    """A command line in a process of its own. log: all that it says."""

    def __init__(self, words: list[str], log: Path, plan: str = "") -> None:
        self.log = log
        log.touch()
        self.process = _FORKS.Process(target=_run, args=(words, str(log), plan), daemon=True)
        self.process.start()

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    @property
    def stopped(self) -> bool:
        """True for a process that SIGSTOP holds."""
        assert self.process.pid is not None
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except FileNotFoundError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        self.process.join(240)
        assert self.process.exitcode is not None, self.said
        return self.process.exitcode

    def wait_for(self, found: Callable[[], Any]) -> None:
        """Wait for something to be so. Against hanging: a busy machine takes its time."""
        until = time.monotonic() + 240
        while not found():
            assert time.monotonic() < until, self.said
            time.sleep(0.01)

    def close(self) -> None:
        """End the process, whatever it does."""
        if not self.ended:
            self.send(signal.SIGKILL)
            self.process.join()


def _run(words: list[str], log: str, plan: str) -> None:
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
        signal.signal(signal.SIGINT if number == 1 else signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    torch.set_num_threads(1)
    sys.path.insert(0, _DRIVER)
    import kill_driver

    code = 70
    try:
        kill_driver.run(plan, words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
