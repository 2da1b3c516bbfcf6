"""CUDA's driver, without torch: how many GPUs there are, and the first one's context."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

#: Library of NVIDIA's driver.
DRIVER = "libcuda.so.1"


def count_gpus() -> int:
    """Count the GPUs that the driver shows this process; 0 where there is none, or no driver.

    Source: CUDA driver API, cuDeviceGetCount.
    """
    count = ctypes.c_int()
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(DRIVER)
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def make_context() -> None:
    """Make the primary context of the first GPU, which torch takes up.

    Source: CUDA driver API, cuInit and cuDevicePrimaryCtxRetain.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def load_library(path: Path) -> bool:
    """Load a library that knows no Python, for good; return whether it is there and loads.

    Other threads run Python meanwhile: `ctypes.CDLL` would hold the GIL. What a library calls of Python as it is loaded
    needs the GIL. Source: dlopen(3), called as any function of C.
    """
    opens = ctypes.CDLL(None).dlopen
    opens.argtypes, opens.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    return opens(os.fsencode(path), os.RTLD_NOW) is not None
