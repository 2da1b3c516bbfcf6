"""Memory of host and device: what the driver counts (NVML), what is free, and what says that there was none."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

#: How allocators and libraries say that memory ran out, where they have no exception of their own for it.
_SAID = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")

#: Most bytes of what torch takes for small.
_SMALL_BYTES = 1 << 20


class CaptureMemoryError(RuntimeError):
    """Memory ran out while a graph was captured. Its message is the allocator's."""


class ElsewhereMemoryError(MemoryError):
    """Memory ran out in another process that takes the step together with this one."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, or an error that followed from that: a capture may end with one of its own."""
    for found in _chain(error):
        if isinstance(found, torch.OutOfMemoryError | CaptureMemoryError | MemoryError):
            return True
        if isinstance(found, RuntimeError | torch.AcceleratorError) and any(said in str(found) for said in _SAID):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error, and those that it followed from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        yield found
        seen.add(id(found))
        found = found.__cause__ or found.__context__


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated: on a GPU those of the driver, and those that torch keeps and nothing uses; on
    a CPU those of the host. None where unknown."""
    if device.type == "cuda":
        try:
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return device_free_bytes(device) + idle
        except (RuntimeError, torch.AcceleratorError):
            return None
    return free_host_bytes()


def device_free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch can still reserve: what the driver has, within the process's limit if it has one."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def allowed_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that torch may reserve in all under the process's limit; None where it has none."""
    if device.type != "cuda":
        return None
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return None if fraction >= 1 else int(fraction * torch.cuda.get_device_properties(device).total_memory)


def once_more(work: Callable[[], T], device: torch.device) -> T:
    """Return what `work` returns, done again after what nothing uses was given back if memory ran out."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_unused(device)
    return work()


def release_unused(device: torch.device) -> None:
    """Gives back what nothing uses any more: cycles of Python's, and what torch keeps of a GPU. Waits for the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def let_go(error: BaseException) -> None:
    """Drop what the frames hold that an error, and those that it followed from, came through: it can then be kept
    without the memory of what failed."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def set_aside(device: torch.device) -> None:
    """Have torch keep 1 MiB for small tensors of the current stream, if it has none: the next ones take no more.

    Raises: torch.OutOfMemoryError.
    """
    if device.type == "cuda":
        torch.empty(_SMALL_BYTES, dtype=torch.uint8, device=device)


def release_workspaces() -> None:
    """Have torch forget the workspaces of matrix products, one for each thread and stream of the process, until each
    has its next product.

    In a capture they are made anew in the graph's own pool, which is scratch to whatever runs from it.
    """
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # torch for CPUs has none
    if release is not None:
        release()


def process_bytes(device: torch.device) -> int | None:
    """Bytes of this process on a GPU as nvidia-smi shows them; where the driver does not tell processes apart (in a
    container or a virtual machine), all that is used on the GPU. None where NVML cannot be read."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except (AttributeError, pynvml.NVMLError):
        return None


def free_host_bytes() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say.

    The least of what the system has and what the process's control group (v2) has left; cached files give way.
    """
    found: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        statistics = (line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        cached = next((int(count) for name, count in statistics if name == "inactive_file"), 0)
        found.append(max(limit - used + cached, 0))
    return min(found, default=None)
