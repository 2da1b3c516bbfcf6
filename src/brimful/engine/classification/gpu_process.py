"""A process for one of several GPUs: it begins with what needs no model, and then waits for its job.

Importing this module loads no torch: a command starts such processes before it does, and all of them load it at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from typing import Any

from brimful.engine.process_start import importing, start_process


class GpuProcess:
    """A process that has begun, and waits for its job. place: set in its environment, to show it its GPU."""

    def __init__(self, place: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "brimful.engine.classification.gpu_process", str(theirs.fileno())]
        environment = os.environ | dict(place)
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.connection: Connection[Any, Any] = ours

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def begin_processes(num_gpus: int, stack: ExitStack) -> list[GpuProcess]:
    """Begin a process for each GPU but the first; `stack` ends them."""
    begun = []
    for place in other_gpus(num_gpus):
        begun.append(GpuProcess(place))
        stack.callback(begun[-1].kill)
    return begun


def other_gpus(num_gpus: int) -> list[dict[str, str]]:
    """Return the environments that show each GPU but the first to a process of its own."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(number) for number in range(num_gpus)]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[1:num_gpus]]


def _main(descriptor: int) -> int:
    """Work for whoever holds the other end of a connection; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and its end is ours
    with importing():
        start_process(on_gpu=True)
        from brimful.engine.classification.gpu_worker import work

    return work(Connection(descriptor))


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
