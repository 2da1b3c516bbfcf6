"""The GPU's start beside a command's imports, which are Python's and leave the driver and most cores alone.

A process pays for the driver, a context and the matrix library before its first kernel: about a second on hosts with
several GPUs, in C code that other threads need not wait for. Loading torch's own libraries is such code, too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

#: What torch and transformers import, and what needs neither of them.
_WITHOUT_TORCH = ("pyarrow", "sympy", "scipy.optimize", "tokenizers", "huggingface_hub")


class DeviceStart:
    """Starts the first visible GPU, where there is a driver, in threads of its own. What fails shows in later calls.

    `begin` needs no torch: driver and context, and torch's libraries, while this thread imports what needs none of
    them. `go_on` needs it imported: its part, and the matrix library's.
    """

    def __init__(self) -> None:
        self._context = threading.Thread(target=_make_context, name="device-context")
        self._torch = threading.Thread(target=_load_torch, name="device-torch")
        self._library = threading.Thread(target=self._load_library, name="device-library")

    def begin(self) -> None:
        """Begin with the context and torch's libraries, and import what needs none of them."""
        self._torch.start()
        self._context.start()
        for name in _WITHOUT_TORCH:
            with suppress(ImportError):
                import_module(name)

    def go_on(self) -> None:
        """Go on with torch."""
        self._library.start()

    def _load_library(self) -> None:
        import torch

        self._context.join()
        with suppress(Exception):
            if torch.cuda.is_available():
                for dtype in (torch.bfloat16, torch.float32):
                    square = torch.zeros(64, 64, device="cuda", dtype=dtype)
                    square @ square
                torch.cuda.synchronize()


def count_gpus() -> int:
    """Count the GPUs that the driver shows this process; 0 where there is none, or no driver.

    Source: CUDA driver API, cuDeviceGetCount.
    """
    count = ctypes.c_int()
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _load_torch() -> None:
    """Load the libraries that torch's extension is linked to, which importing it then finds."""
    found = find_spec("torch")
    package = Path(next(iter((found and found.submodule_search_locations) or ()), ""))
    if os.environ.get("TORCH_USE_RTLD_GLOBAL") or _has_choice(package):
        return
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        ctypes.CDLL(str(package / "lib" / "libtorch_python.so"))


def _has_choice(package: Path) -> bool:
    """Return whether LD_LIBRARY_PATH holds a library that torch, installed at `package`, or a CUDA package beside it
    brings too: which of the two is taken is torch's to say."""
    brought = {file.name for file in (package / "lib").glob("*.so*")}
    brought |= {file.name for file in (package.parent / "nvidia").glob("*/lib/*.so*")}
    named = os.environ.get("LD_LIBRARY_PATH")
    folders = [Path(folder or ".") for folder in named.split(":")] if named else []
    return any(file.name in brought for folder in folders if folder.is_dir() for file in folder.iterdir())


def _make_context() -> None:
    """Make the primary context, which torch takes up.

    Source: CUDA driver API, cuInit and cuDevicePrimaryCtxRetain.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
