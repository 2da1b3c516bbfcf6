"""The GPU's start beside a command's imports, which are Python's and leave the driver and most cores alone.

A process pays for the driver, a context and the matrix library before its first kernel: about a second on hosts with
several GPUs, in C code that other threads need not wait for.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress


class DeviceStart:
    """Starts the first visible GPU in threads of its own; without one, nothing. What goes wrong shows in later calls.

    `begin` needs no torch: driver and context. `go_on` needs it imported: its part, and the matrix library's.
    """

    def __init__(self) -> None:
        self._context = threading.Thread(target=_make_context, name="device-context")
        self._library = threading.Thread(target=self._load_library, name="device-library")

    def begin(self) -> None:
        """Begin with the context."""
        self._context.start()

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


def _make_context() -> None:
    """Make the primary context, which torch takes up.

    Source: CUDA driver API, cuInit and cuDevicePrimaryCtxRetain.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
