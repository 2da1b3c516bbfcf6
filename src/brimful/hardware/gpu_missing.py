"""A GPU that was asked for and cannot be there, seen without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

from brimful.core.errors import DeviceError, OptionError
from brimful.hardware.driver import DRIVER

#: Names or numbers of the GPUs that CUDA shows a process, where it is set.
_SHOWN = "CUDA_VISIBLE_DEVICES"


def no_gpu(version: str, cuda: str | None, gpus: str | None = None) -> DeviceError:
    """The error that torch sees no GPU. version, cuda: of torch, and the CUDA that it is built for. gpus: that were
    asked for by their number."""
    built = f"for CUDA {cuda}" if cuda else "without CUDA"
    said, instead = "--device cuda was asked for, and torch sees no GPU", "use --device cpu"
    if gpus is not None:
        said, instead = f"--gpus is {gpus}, and there is no GPU to run on", "leave it out"
    return DeviceError(
        f"{said}: torch {version} is built {built}", hint=f"check nvidia-smi and the torch build, or {instead}"
    )


def check_gpu(device: str, gpus: str | None) -> None:
    """Raises: DeviceError where `device` or `gpus` asks for one and torch's build, or the machine, plainly has none."""
    if device != "cuda" and gpus is None:
        return
    build = _torch_build()
    if build is None or "hip" in build:
        return  # torch itself will say
    if "cuda" not in build or (sys.platform == "linux" and not _has_driver()):
        raise no_gpu(build["__version__"], build.get("cuda"), gpus)


def check_count(gpus: str, there: int | None = None) -> None:
    """Raises: OptionError where `gpus` is a number of more GPUs than there are. there: as torch counts them; without
    it, as NVIDIA's driver lets this process see them."""
    there = _num_visible() if there is None else there
    if there == 0 and _SHOWN in os.environ:
        hint = "unset it, name some there, or leave --gpus out"
        raise OptionError(f"--gpus is {gpus}, and {_SHOWN} shows no GPU", hint=hint)
    if there == 0:
        raise OptionError(f"--gpus is {gpus}, and there is no GPU to run on", hint="check nvidia-smi, or leave it out")
    if there is not None and gpus != "all" and int(gpus) > there:
        found = "is 1 GPU" if there == 1 else f"are {there} GPUs"
        raise OptionError(f"--gpus is {gpus}, and there {found} to run on", hint=f"use at most {there}, or all")


def check_not_launched(gpus: str, count: int) -> None:
    """Raises: OptionError where `gpus` is given to one of `count` processes that a launcher has started."""
    if count > 1:
        said = f"--gpus is {gpus}, and a launcher has started {count} processes"
        raise OptionError(said, hint="leave it out: each of them has a GPU")


def _num_visible() -> int | None:
    """GPUs by the driver and CUDA_VISIBLE_DEVICES; None where the driver does not say, or GPUs are cut up (MIG)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        there = int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no pynvml, or no NVIDIA driver
        return None
    shown = os.environ.get(_SHOWN)
    if shown is None:
        return there
    named = [each.strip() for each in shown.split(",")]
    if any("MIG" in each for each in named):
        return None
    known = [each.startswith("GPU-") or (each.isdigit() and int(each) < there) for each in named]
    seen = named[: [*known, False].index(False)]  # CUDA reads no further
    return len(seen) if len(set(seen)) == len(seen) else 0


def _torch_build() -> dict[str, str] | None:
    """Read `__version__`, `cuda` and `hip` of torch's version.py, without those that are None; None if it cannot be."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return None
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *['\"]([^'\"\n]+)['\"]", text, re.M))
    return found if "__version__" in found and re.search(r"^cuda\b", text, re.M) else None


def _has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
