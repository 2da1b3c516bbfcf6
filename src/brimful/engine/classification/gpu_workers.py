"""Several GPUs: this process drives the first, in a thread, a process of its own each of the others.

The first begins at once; the others join when they have loaded the model and computed a sample, which takes them
seconds. Where `--gpus` asks for them, they start while the first loads the model, and from the command line before it
loads torch. A window goes to the member that has the fewest under way, and is under way until its logits are there: not
until they are asked for, which comes in the order of submission, so that rows keep their order. Logits do not depend on
which member computes them. What goes to a process are arrays of token ids, what comes back are logits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from brimful.core.classification import GpuShare
from brimful.core.errors import DeviceError, OptionError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.place import find_place
from brimful.core.records import OutOfMemory
from brimful.data.tokens.encoder import Tokens
from brimful.engine.classification.gpu_process import GpuProcess
from brimful.engine.classification.runner import Result, Runner
from brimful.engine.inference import Done
from brimful.hardware.gpu_missing import check_count, check_not_launched
from brimful.hardware.probe import num_gpus_of

#: What a process says first.
READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Arguments with which another process makes the same runner."""

    options: ClassifyOptions
    precision: str
    sample: Tokens
    num_tokens: int


class GpuWorkers:
    """The forward pass by several runners. A context manager: leaving it ends the processes.

    first: of this process. processes: the others. hear: called with each time that memory ran out in another process.
    Raises: DeviceError, where a result is asked for, if a process ended.
    """

    def __init__(
        self, first: Runner, job: Job, processes: Sequence[GpuProcess],
        hear: Callable[[OutOfMemory], None] = lambda found: None,
    ) -> None:  # fmt: skip
        self._first, self._others, self._hear = first, [_Member(job, each) for each in processes], hear
        # Launching waits while a device has enough to do, and other GPUs' windows are not to wait with it.
        self._launches = ThreadPoolExecutor(1, "brimful-launch") if processes else None
        self._waits = ThreadPoolExecutor(1, "brimful-wait") if processes else None
        self._work: dict[int, _Work] = {}  # of each member that has had a window, the first's number being 0
        self._lock = threading.Lock()  # windows end on other threads

    def __enter__(self) -> GpuWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._others:
            member.close()
        for threads in (self._launches, self._waits):
            if threads is not None:
                threads.shutdown(cancel_futures=True)

    def __len__(self) -> int:
        return 1 + len(self._others)

    @property
    def num_ready(self) -> int:
        """Members that windows go to by now."""
        return len(self._ready())

    def _ready(self) -> list[int]:
        return [0, *(number for number, other in enumerate(self._others, 1) if other.ready.is_set())]

    @property
    def num_used(self) -> int:
        """Members that have had a window, or would have the first one."""
        return max(1, len(self._work))

    def begin_pass(self) -> None:
        """Count anew: windows of a pass that failed are nobody's any more."""
        with self._lock:
            self._work.clear()

    def shares(self, since: float) -> tuple[GpuShare, ...]:
        """Return what each member that had a window has done. since: when the pass began, by `time.perf_counter`."""
        with self._lock:
            return tuple(
                GpuShare(number=number, num_windows=work.num_windows, busy_s=work.busy_s, joined_s=work.joined - since)
                for number, work in sorted(self._work.items())
            )

    def submit(self, tokens: Tokens) -> Result:
        """Starts on a window."""
        if self._launches is None or self._waits is None:
            return self._first.submit(tokens)
        with self._lock:
            idle = _Work(joined=time.perf_counter())
            number = min(self._ready(), key=lambda each: self._work.get(each, idle).burden())
            work = self._work.setdefault(number, idle)
            work.num_under_way += 1
        if number:
            future = self._others[number - 1].submit(tokens)
        else:
            future = self._waits.submit(_wait, self._launches.submit(self._launch, tokens))
        ended = _Once(partial(self._end, work))
        future.add_done_callback(ended)
        return _Coming(future, ended, self._hear)

    def _launch(self, tokens: Tokens) -> Result:
        device = self._first.precision.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._first.submit(tokens)

    def _end(self, work: _Work, future: Future[Done]) -> None:
        is_there = not future.cancelled() and future.exception() is None
        with self._lock:
            work.num_under_way -= 1
            work.num_windows += 1
            work.busy_s += future.result().busy_s if is_there else 0.0


@dataclass
class _Work:
    """Windows of one member that are done, the seconds that they took, and when it was given the first."""

    joined: float
    num_windows: int = 0
    busy_s: float = 0.0
    num_under_way: int = 0

    def burden(self) -> tuple[int, int]:
        """Windows under way, then windows given: of both the next window's member has the least."""
        return self.num_under_way, self.num_windows + self.num_under_way


class _Once:
    """A call that the first of several callers makes."""

    def __init__(self, call: Callable[[Future[Done]], None]) -> None:
        self._call, self._lock, self._is_made = call, threading.Lock(), False

    def __call__(self, future: Future[Done]) -> None:
        with self._lock:
            if not self._is_made:
                self._is_made = True
                self._call(future)


def _wait(launched: Future[Result]) -> Done:
    """Wait for the logits of a window of this process."""
    result = launched.result()
    return Done(result.result(), result.busy_s)


class _Coming:
    """A result that another thread waits for, or another process sends. ended: told when it is there. hear: called with
    each time that memory ran out in that process."""

    def __init__(
        self, future: Future[Done], ended: Callable[[Future[Done]], None], hear: Callable[[OutOfMemory], None]
    ) -> None:
        self._future, self._ended, self._hear, self.busy_s = future, ended, hear, 0.0

    def result(self) -> np.ndarray:
        done = self._future.result()
        self._ended(self._future)  # a future wakes whoever waits for it before it calls back
        self.busy_s = done.busy_s
        for found in done.out_of_memory:
            self._hear(found)
        return done.logits_NC


class _Member:
    """A process and the thread that listens to it. Windows are sent as they come: it launches each behind the one that
    it computes.

    ready: set when it waits for windows; or when it has failed before, which the next window's result says.
    """

    def __init__(self, job: Job, process: GpuProcess) -> None:
        self._process, self._connection = process, process.connection
        self.ready = threading.Event()
        self._in_flight: queue.Queue[Future[Done] | None] = queue.Queue()
        self._sends = ThreadPoolExecutor(1, "brimful-send")  # sending waits for the process to read
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._listen, args=(job,), name="brimful-gpu", daemon=True)
        self._thread.start()

    def submit(self, tokens: Tokens) -> Future[Done]:
        """Send a window to a process that is ready."""
        done: Future[Done] = Future()
        self._in_flight.put(done)
        self._sends.submit(self._send, tokens)
        return done

    def _send(self, tokens: Tokens) -> None:
        try:
            self._connection.send(tokens)
        except OSError:  # that it ended is told by what it does not send
            pass
        except Exception as error:  # it would be waited for, and wait itself
            self._failure = error
            self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._sends.shutdown(cancel_futures=True)
        self._in_flight.put(None)
        self._thread.join()
        self._connection.close()

    def _listen(self, job: Job) -> None:
        with suppress(OSError):
            self._connection.send(job)
        greeting = self._received()
        self.ready.set()
        while (done := self._in_flight.get()) is not None:
            found = greeting if isinstance(greeting, Exception) else self._received()
            if isinstance(found, Exception):
                done.set_exception(found)
            else:
                done.set_result(found)

    def _received(self) -> Any:
        """Next message of the process: ready, a window's logits, or an exception."""
        try:
            return self._connection.recv()
        except Exception:  # it is gone, or what it sent cannot be read: nobody may wait for it
            return self._failure or DeviceError(
                "the process of one of the GPUs ended before its work was done",
                hint="its last words are above; --gpus 1 does without",
            )


def check_gpus_there(options: ClassifyOptions | EvaluateOptions, device: torch.device) -> None:
    """Check that there are as many GPUs as --gpus asks for. Raises: OptionError."""
    asked, there = options.gpus, num_gpus_of(device)
    if asked in (None, "1"):
        return
    check_not_launched(asked, 1 if getattr(options, "claim", False) else find_place().count)
    if device.type == "cpu":
        raise OptionError(f"--gpus is {asked}, and there is no GPU to run on", hint="leave it out")
    check_count(asked, there)


def job_of(runner: Runner, options: ClassifyOptions, sample: Tokens, num_tokens: int) -> Job:
    """Job that makes a runner like this one."""
    return Job(
        options=replace(options, execution=runner.execution, packing="auto" if runner.packing.packed else "off"),
        precision=runner.precision.value,
        sample=sample,
        num_tokens=num_tokens,
    )
