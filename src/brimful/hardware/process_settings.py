"""Torch's process-wide settings, lent to one block at a time and given back as they were.

Default random generators and the precision of fp32 products belong to the process, and so to its user. A block that
needs them otherwise borrows them; blocks of other threads that borrow wait for its end.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from brimful.core.process_lock import PROCESS_LOCK


@contextmanager
def matmul_precision(value: Literal["highest", "high"]) -> Iterator[None]:
    """Within, fp32 products are full ones, or of 10-bit mantissas on matrix units.

    Torch has an old setting and a new one by backend, which follows that of all backends where it says nothing. These
    are given back, also where the block sets them: a Trainer that compiles sets the one of all backends.
    """
    with PROCESS_LOCK:
        cpu: Any = torch.backends.mkldnn
        backends: list[Any] = [torch.backends, torch.backends.cuda.matmul, cpu.matmul]
        were = [backend.fp32_precision for backend in backends]
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # the new setting says tf32, and the old one was never touched
            before = "highest"
        torch.set_float32_matmul_precision(value)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
            for backend, was in zip(backends, were, strict=True):
                backend.fp32_precision = "none"  # as the setting for all backends says, which comes first
                if backend.fp32_precision != was:
                    backend.fp32_precision = was


def products_are_full() -> bool:
    """True if fp32 products on a GPU are full ones, by either of torch's settings."""
    return str(torch.backends.cuda.matmul.fp32_precision) != "tf32"


@contextmanager
def unchanged_random_streams(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Within, default generators may be seeded and drawn from: those of the CPU and of `devices` are restored."""
    with PROCESS_LOCK, torch.random.fork_rng(devices):
        yield


class RandomStream:
    """Random numbers of one model, drawn where torch draws by default.

    On a GPU it owns a generator's state, which stands in for the default one within; graphs that are captured there
    read it at every replay. Nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._own, self._default = None, None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._own = torch.Generator(torch.device("cuda", index))
            self._default = torch.cuda.default_generators[index]

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Within, numbers follow from `seed`; the process's own streams go on as if nothing had been drawn."""
        with PROCESS_LOCK, self._on_device(seed):
            before = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
            try:
                yield
            finally:
                torch.default_generator.set_state(before)

    @contextmanager
    def _on_device(self, seed: int) -> Iterator[None]:
        if self._own is None or self._default is None:
            yield
            return
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._own.graphsafe_get_state())
        self._default.manual_seed(seed)
        try:
            yield
        finally:
            self._own.graphsafe_set_state(self._default.graphsafe_get_state())  # a capture that failed left another
            self._default.graphsafe_set_state(before)


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Only kernels that give equal bits from equal inputs; on the CPU all used here do, and nothing changes."""
    if not asked or not torch.cuda.is_available():
        yield
        return
    before = torch.get_deterministic_debug_mode()
    with environment_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


@contextmanager
def environment_default(name: str, value: str) -> Iterator[None]:
    """Within, an environment variable that is not set has this value."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


#: Parameters of glibc's `mallopt` (malloc.h): memory at the heap's end that is kept, and size from which an allocation
#: is a mapping of its own, 32 MiB at most.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES, _KEPT_BYTES = 32 << 20, 1 << 30


def give_back_freed_memory() -> None:
    """Give what the host's allocator keeps of freed memory back to the system, where it has the switch (glibc's)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Within, the host's allocator keeps up to 1 GiB of what is freed, where work is done on a CPU: each step frees
    what the next one allocates, and pages that went back to the system come empty, one fault each.

    Afterwards it keeps as much as its own rule may come to, and gives the rest back. Nothing but glibc has the switch.
    """
    try:
        library = ctypes.CDLL(None)
        set_option = library.mallopt
    except (OSError, AttributeError, TypeError):
        yield
        return
    if device.type != "cpu":
        yield
        return
    set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    try:
        yield
    finally:
        set_option(_M_TRIM_THRESHOLD, 2 * _MMAP_BYTES)
        give_back_freed_memory()
