"""Torch's allocator as a run asks for it: a limit, as of a smaller card, and how segments are taken from the driver.

Both are settings of the process, lent to one run and given back as they were.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from brimful.core.errors import DeviceError, OptionError
from brimful.core.options.choices import AllocatorChoice
from brimful.core.units import bytes_text, parse_bytes
from brimful.hardware.memory import process_bytes

#: Left free below a limit for kernels and graphs that the driver loads between two readings: this part of the limit,
#: and at least and at most so many bytes.
_MARGIN_PART, _LEAST_MARGIN, _MOST_MARGIN = 32, 64 << 20, 256 << 20
#: The least before a run's first step: of a tiny model the driver loads 126 MB for it.
_FIRST_MARGIN = 192 << 20
#: Bytes of the block that shows how segments are taken: more than any that torch keeps small blocks in.
_PROBE_BYTES = 64 << 20


@contextmanager
def device_memory(device: torch.device, limit: str | None, allocator: AllocatorChoice) -> Iterator[None]:
    """Within, a run on `device` has at most `limit` (as `8GB`), of segments as `allocator` has them.

    Raises: OptionError for either on a CPU, and for a limit that the process has passed already; DeviceError if torch
    does not take segments as asked.
    """
    check_on_gpu(device, limit, allocator)
    if limit is None and allocator == "default":
        yield
        return
    torch.cuda.init()
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    try:
        if allocator == "expandable":
            _set("expandable_segments:True")
            check_expandable(device)
        if limit is not None:
            _load_libraries(device)
            outside, kept = hold_limit(device, parse_bytes(limit), least=_FIRST_MARGIN)
            if outside + kept >= parse_bytes(limit):
                raise OptionError(
                    f"--memory-limit is {limit}, and {bytes_text(outside)} are in use outside torch already: driver,"
                    " libraries, and other processes where the driver does not tell them apart;"
                    f" {bytes_text(kept)} more are for kernels that the driver loads",
                    hint="give more, or end what else is on this GPU",
                )
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        if allocator == "expandable":
            _set(f"expandable_segments:{'expandable_segments:True' in _environment()}")


def check_on_gpu(device: torch.device, limit: str | None, allocator: AllocatorChoice) -> None:
    """Check that what is asked of a GPU's memory is not asked of a CPU. Raises: OptionError."""
    asked = [("--memory-limit", limit)] * (limit is not None) + [("--allocator", allocator)] * (allocator != "default")
    if asked and device.type != "cuda":
        name, value = asked[0]
        hint = "leave it out; `ulimit -v` or a container limits host memory" if limit else "leave it out"
        raise OptionError(f"{name} is {value}: it is for GPUs, and this run is on a CPU", hint=hint)


def hold_limit(device: torch.device, limit_bytes: int, *, least: int = _LEAST_MARGIN) -> tuple[int, int]:
    """Let torch reserve what a limit leaves beside the rest of the process; return bytes of that rest by now, and those
    that are left free for what it may come to. least: of these."""
    process = process_bytes(device)
    outside = 0 if process is None else max(0, process - torch.cuda.memory_reserved(device))
    margin = min(_MOST_MARGIN, max(least, limit_bytes // _MARGIN_PART))
    left = limit_bytes - outside - margin
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, left / total_bytes)), device)
    return outside, margin


def check_expandable(device: torch.device) -> None:
    """Take a block and look at its segment. Raises: DeviceError if it cannot be expanded."""
    torch.cuda.empty_cache()
    block = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    place, found = block.data_ptr(), False
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= place < segment["address"] + segment["total_size"]:
            found = found or bool(segment.get("is_expandable"))
    del block
    torch.cuda.empty_cache()
    if not found:
        raise DeviceError(
            f"--allocator expandable did not take effect: torch {torch.__version__} took an ordinary segment",
            hint="leave it out; torch needs Linux and its own allocator (PYTORCH_CUDA_ALLOC_CONF without backend:)",
        )


def _load_libraries(device: torch.device) -> None:
    """Have the driver load what every run needs: a context and cuBLAS."""
    square = torch.zeros(64, 64, device=device)
    square @ square
    torch.cuda.synchronize(device)


def _environment() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _set(setting: str) -> None:
    """Change one setting of the allocator, and keep those of the environment."""
    kept = [part for part in _environment().split(",") if part and not part.startswith("expandable_segments")]
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or torch._C._cuda_cudaCachingAllocator_set_allocator_settings  # type: ignore[attr-defined]
    change(",".join([*kept, setting]))
