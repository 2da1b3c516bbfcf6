"""Triton kernels compiled together, before they are needed.

A kernel is compiled when it is first launched, and the host waits for it: a first training step does so for a dozen
kernels, one after another. A pass in which none of those is launched finds out which ones they are, and threads compile
them at once; most of a compilation is outside of Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

try:
    from triton import knobs
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    knobs = None


@contextmanager
def compiled_together() -> Iterator[None]:
    """Within, a kernel that this process has not compiled yet is not launched; at the end all of these are compiled.

    What they were to write is whatever was in that memory. So what runs within must change nothing that lasts, and
    its results are of no use. A kernel that cannot be compiled says so where it is launched.

    Source: Triton's `jit_cache_hook`, and `JITFunction.preload`, which compiles what the hook was told of.
    """
    if knobs is None:
        yield
        return
    met: dict[tuple[str, str, str], tuple[Any, str]] = {}

    def instead_of_launching(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        met[fn.module, fn.name, key] = (fn.jit_function, compile["specialization_data"])
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = instead_of_launching
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
    if met:
        threads = min(len(met), os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, initializer=_use, initargs=_device()) as pool:
            list(pool.map(_compile, met.values()))


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
