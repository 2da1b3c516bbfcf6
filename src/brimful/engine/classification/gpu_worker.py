"""A process of `gpu_workers.GpuWorkers`: makes its runner, warms it up, then computes windows until its connection
ends."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from brimful.core.callbacks import Callbacks
from brimful.core.errors import DeviceError, MemoryFullError, printable
from brimful.core.records import OutOfMemory
from brimful.data.tokens.encoder import Tokens
from brimful.engine.classification.gpu_workers import READY, Job
from brimful.engine.classification.runner import Result, Runner, check_model, make_runner
from brimful.engine.inference import Done
from brimful.hardware.device_memory import device_memory
from brimful.hardware.probe import choose_device
from brimful.levers.precision import choose_forward_precision
from brimful.step.precision import Precision

#: Windows that have come, None behind the last one.
_Windows = queue.Queue[Tokens | None]


def work(connection: Connection[Any, Any]) -> int:
    """Take the job that comes, say READY, then answer each window with its logits, in order; an exception with itself.
    Return the exit code."""
    try:
        _work(connection)
    except (EOFError, BrokenPipeError):  # the parent is gone
        return 0
    except MemoryFullError as error:
        with suppress(OSError):
            connection.send(error)
        return error.exit_code
    except Exception as error:
        with suppress(OSError):
            said = f"the process of a GPU failed with {type(error).__name__}: {printable(error, 300)}"
            connection.send(DeviceError(said, hint="--gpus 1 does without"))
        raise
    return 0


def _work(connection: Connection[Any, Any]) -> None:
    heard: list[OutOfMemory] = []
    job: Job = connection.recv()
    device = choose_device(job.options.device)
    with device_memory(device, job.options.memory_limit, job.options.allocator):
        _answer(connection, job, choose_forward_precision(job.precision, device), heard)  # type: ignore[arg-type]


def _answer(connection: Connection[Any, Any], job: Job, precision: Precision, heard: list[OutOfMemory]) -> None:
    runner = make_runner(
        check_model(job.options),
        job.options,
        precision,
        sample=job.sample,
        num_tokens=job.num_tokens,
        callbacks=Callbacks(),
        hear=heard.append,
    )
    for _ in range(2):  # layers are compiled, and shapes met again are captured
        runner.submit(job.sample).result()
    connection.send(READY)
    _serve(connection, runner, heard)


def _serve(connection: Connection[Any, Any], runner: Runner, heard: list[OutOfMemory]) -> None:
    """Launch each window as it comes, behind the one that the device computes.

    A thread reads windows, another one sends logits: were they one, both ends could wait for the other to read what
    they send. heard: each time that memory ran out, which is told with the next logits.
    """
    windows: _Windows = queue.Queue()
    launched: queue.Queue[Result | None] = queue.Queue()
    failed: list[Exception] = []
    sends = partial(_send, connection, windows, launched, failed=failed, heard=heard)
    sender = threading.Thread(target=sends, name="brimful-send", daemon=True)
    sender.start()
    threading.Thread(target=_read, args=(connection, windows), name="brimful-read", daemon=True).start()
    try:
        while (tokens := windows.get()) is not None:
            launched.put(runner.submit(tokens))
    except Exception:
        launched.put(None)
        sender.join()  # logits of the windows before come first, and nobody else writes to the connection then
        if not failed:
            raise
    if failed:
        raise failed[0]


def _send(
    connection: Connection[Any, Any], windows: _Windows, launched: queue.Queue[Result | None], *,
    failed: list[Exception], heard: list[OutOfMemory],
) -> None:  # fmt: skip
    """Send the logits of each window that was launched, in order. An error ends both, and is put into `failed`."""
    try:
        while (result := launched.get()) is not None:
            logits_NC = result.result()
            told = tuple(heard)
            del heard[: len(told)]
            connection.send(Done(logits_NC, result.busy_s, told))
    except Exception as error:
        failed.append(error)
        windows.put(None)


def _read(connection: Connection[Any, Any], windows: _Windows) -> None:
    try:
        while True:
            windows.put(connection.recv())
    except (EOFError, OSError):
        windows.put(None)
