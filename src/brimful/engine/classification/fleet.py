"""Several GPUs: this process drives the first, a process of its own each of the others. Windows go round in turn.

A window's logits do not depend on which GPU has computed it, and results are asked for in the order of submission, so
rows keep their order. What goes to a process are arrays of token ids, what comes back are logits.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from brimful.core.errors import DeviceError
from brimful.core.options import ClassifyOptions
from brimful.data.tokens import Tokens
from brimful.engine.classification.runner import Result, Runner
from brimful.engine.predict import Done

#: Windows that a process has at a time: one that it computes, one that it launches.
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process needs to make the same runner as this one has."""

    options: ClassifyOptions
    precision: str
    packing_wanted: bool
    sample: Tokens
    num_tokens: int


class Fleet:
    """The forward pass by several runners in turn. A context manager: leaving it ends the processes.

    first: of this process. places: what is set in the environment of each other process, to show it its GPU.
    Raises: DeviceError, where a result is asked for, if a process ended.
    """

    def __init__(self, first: Runner, job: Job, places: Sequence[Mapping[str, str]]) -> None:
        self._members: list[Runner | _Member] = [first, *(_Member(job, place) for place in places)]
        self._next = 0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            if isinstance(member, _Member):
                member.close()

    def __len__(self) -> int:
        return len(self._members)

    def submit(self, tokens: Tokens) -> Result:
        """Starts on a window."""
        member = self._members[self._next]
        self._next = (self._next + 1) % len(self)
        return member.submit(tokens)


class _Later:
    """Logits that another process will send."""

    def __init__(self) -> None:
        self.future: Future[Done] = Future()
        self.busy_s = 0.0

    def result(self) -> np.ndarray:
        done = self.future.result()
        self.busy_s = done.busy_s
        return done.logits_NC


class _Member:
    """A process and the thread that talks to it."""

    def __init__(self, job: Job, place: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "brimful.engine.classification.fleet_worker", str(theirs.fileno())]
        environment = os.environ | dict(place)
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._connection: Connection[Any, Any] = ours
        self._waiting: queue.Queue[tuple[Tokens, _Later] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._talk, args=(job,), name="brimful-gpu", daemon=True)
        self._thread.start()

    def submit(self, tokens: Tokens) -> _Later:
        later = _Later()
        self._waiting.put((tokens, later))
        return later

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._waiting.put(None)
        self._thread.join()
        self._connection.close()

    def _talk(self, job: Job) -> None:
        in_flight: deque[_Later] = deque()
        with suppress(OSError):
            self._connection.send(job)
        while True:
            if in_flight and (len(in_flight) == _IN_FLIGHT or self._waiting.empty()):
                self._receive(in_flight.popleft())
                continue
            item = self._waiting.get()
            if item is None:
                return
            with suppress(OSError):  # that it ended is told by what it does not send
                self._connection.send(item[0])
            in_flight.append(item[1])

    def _receive(self, later: _Later) -> None:
        try:
            found = self._connection.recv()
        except Exception:  # it is gone, or what it sent cannot be read: nobody may wait for it
            found = DeviceError(
                "the process of one of the GPUs ended before its work was done",
                hint="its last words are above; --num-gpus 1 does without",
            )
        if isinstance(found, Exception):
            later.future.set_exception(found)
        else:
            later.future.set_result(found)


def other_gpus(num_gpus: int) -> list[dict[str, str]]:
    """The environments that show each GPU but the first to a process of its own."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(number) for number in range(num_gpus)]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[1:num_gpus]]


def job_of(runner: Runner, options: ClassifyOptions, sample: Tokens, num_tokens: int) -> Job:
    """What makes a runner such as this one."""
    return Job(
        options=replace(options, execution=runner.execution_mode),
        precision=runner.precision.value,
        packing_wanted=runner.packing.wanted,
        sample=sample,
        num_tokens=num_tokens,
    )
