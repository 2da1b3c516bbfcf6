"""Our Triton kernels compiled together, before they are needed.

A kernel is compiled when it is first launched, and the host waits for it: a first training step does so for two dozen,
one after another. A pass in which none of those is launched finds out which ones they are, and threads compile them at
once: Triton's passes, its assembler and the C compiler of what launches a kernel do not hold Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from brimful.core.cores import num_cores
from brimful.core.process_lock import PROCESS_LOCK

try:
    from triton import knobs
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    knobs = None


class _NotOursError(Exception):
    """A kernel of someone else's: it may choose by its own results, or write numbers that rows are looked up by."""


class Compiling:
    """Kernels on their way to be compiled."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._on_their_way: list[Future[None]] = []

    def begin(self, met: Collection[tuple[Any, str]]) -> None:
        """Have threads compile kernels, each with a specialization."""
        if met:
            self._pool = ThreadPoolExecutor(min(len(met), num_cores() or 1), initializer=_use, initargs=_device())
            self._on_their_way = [self._pool.submit(_compile, each) for each in met]

    def wait(self) -> None:
        """Wait for all. An interrupt leaves those out that were not begun."""
        try:
            for each in self._on_their_way:
                each.result()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Leave out those that were not begun: the end of the process would wait for them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


@contextmanager
def precompiled(*, wait: bool = True) -> Iterator[Compiling]:
    """Within, a kernel of ours that this process has not compiled yet is not launched; at the end all of these are
    compiled, or begin to be where the caller is to wait.

    What they were to write is whatever was in that memory. So what runs within must change nothing that lasts, its
    results are of no use, and neither are its errors, which are not raised: a kernel that cannot be compiled says so
    where it is launched. It ends where a kernel that is not ours would be compiled. Backward passes run in the
    calling thread; launches of other threads are theirs.

    Source: Triton's `jit_cache_hook`, and `JITFunction.preload`, which compiles what the hook was told of.
    """
    compiling = Compiling()
    if knobs is None:
        yield compiling
        return
    met: dict[tuple[str, str, str], tuple[Any, str]] = {}
    thread = threading.get_ident()

    def instead_of_launching(*, key: str, fn: Any, compile: dict[str, Any], **told: Any) -> bool | None:
        if threading.get_ident() != thread:
            return before(key=key, fn=fn, compile=compile, **told) if before is not None else None
        if not fn.module.startswith("brimful."):
            raise _NotOursError(fn.name)
        met[fn.module, fn.name, key] = (fn.jit_function, compile["specialization_data"])
        return True

    with PROCESS_LOCK:  # Triton has one place for a hook
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = instead_of_launching
        try:
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.autograd.set_detect_anomaly(False),
                suppress(Exception),
            ):
                yield compiling
        finally:
            knobs.runtime.jit_cache_hook = before
        compiling.begin(met.values())
        if wait:
            compiling.wait()


def _device() -> tuple[int, ...]:
    return (torch.cuda.current_device(),) if torch.cuda.is_available() else ()


def _use(*device: int) -> None:
    """A new thread is on the first GPU, whichever the others are on."""
    if device:
        torch.cuda.set_device(*device)


def _compile(asked: tuple[Any, str]) -> None:
    function, specialization = asked
    with suppress(Exception):
        kernel = function.preload(specialization)
        kernel.run  # noqa: B018  (loads it, and compiles what launches it)
