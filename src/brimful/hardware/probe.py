"""The machine as it is: facts for the record, and the device a run may use."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from brimful.core.cores import num_cores
from brimful.core.errors import DeviceError
from brimful.core.options.choices import DeviceChoice
from brimful.core.records import Gpu, Machine
from brimful.hardware.gpu_missing import no_gpu

_PACKAGES = ("brimful", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "triton")


def choose_device(asked: DeviceChoice, number: int = 0) -> torch.device:
    """The device that was asked for; for `auto` a GPU if there is one.

    number: of this process on the machine, for the GPU of that number if it is not the first; it is made current. Where
    srun shows each task a GPU of its own, that is the first one that the task sees.
    Raises: DeviceError if a GPU was asked for and torch sees none, or not as many.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise no_gpu(torch.__version__, torch.version.cuda)
    if number and not (os.environ.get("SLURM_GPUS_PER_TASK") == "1" and torch.cuda.device_count() == 1):
        if number >= (found := torch.cuda.device_count()):
            raise DeviceError(
                f"process {number + 1} on this machine has no GPU: torch sees {found}",
                hint="start as many processes as there are GPUs",
            )
        torch.cuda.set_device(number)
    return torch.device("cuda", torch.cuda.current_device())


def probe() -> Machine:
    """Facts of this machine; None where they cannot be read."""
    gpus: tuple[Gpu, ...] = ()
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = tuple(Gpu(name=p.name, total_bytes=p.total_memory, compute_capability=(p.major, p.minor)) for p in found)
    return Machine(
        cpu=_cpu_name(),
        num_cores=num_cores(),
        memory_bytes=_memory_bytes(),
        gpus=gpus,
        versions={"python": platform.python_version(), **versions()},
    )


def device_name(device: torch.device) -> str:
    """As torch calls the GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def num_gpus_of(device: torch.device) -> int:
    """GPUs that a run on this device may use; 1 where the device is a CPU."""
    return torch.cuda.device_count() if device.type == "cuda" else 1


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of the packages that work is done by, of those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
