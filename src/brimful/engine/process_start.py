"""Imports of a command in the order that takes least time, and the GPU's start beside them.

A process pays for torch's libraries, the driver, a context and the matrix library before its first kernel: one to two
seconds of C code, in threads of their own while this one runs Python. Importing this module loads no torch.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from brimful.hardware.driver import load_library, make_context
from brimful.models.hub.model_names import import_model_names
from brimful.models.hub.put_off import put_off

#: What torch and transformers import that brings libraries: loading one waits for any other that is being loaded.
_WITH_LIBRARIES = ("pyarrow", "tokenizers", "huggingface_hub", "yaml", "PIL.Image", "regex", "markupsafe")
#: The same of Python's own modules that these and sympy import.
_OWN_WITH_LIBRARIES = ("asyncio", "cmath", "fcntl", "hashlib", "mmap", "ssl", "unicodedata")


@contextmanager
def importing() -> Iterator[None]:
    """Import without what a command has no use for, and without the garbage collector, whose repeated passes over a
    million new objects take a fifth of the time.

    The objects live until the process ends, so they stay frozen until then.
    """
    gc.disable()
    try:
        with put_off():
            yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)


def start_process(*, on_gpu: bool) -> None:
    """Import torch and transformers. What fails beside torch shows where it is used.

    on_gpu: start the first visible GPU meanwhile, where there is a driver.
    """
    context = threading.Thread(target=make_context, name="device-context")
    libraries = threading.Thread(target=_load_torch, name="torch-libraries")
    if on_gpu:
        context.start()
    for name in (*_WITH_LIBRARIES, *_OWN_WITH_LIBRARIES):
        with suppress(Exception):
            import_module(name)
    libraries.start()
    with suppress(Exception):
        import_module("sympy")
        import_model_names()
    import_module("torch")
    if on_gpu:
        threading.Thread(target=_load_matrix_library, args=(context,), name="device-library").start()


def _load_torch() -> None:
    """Load the libraries of torch that know no Python, which importing it then finds."""
    with suppress(Exception):
        found = find_spec("torch")
        package = None if found is None else next(iter(found.submodule_search_locations or ()), None)
        if package is not None and not os.environ.get("TORCH_USE_RTLD_GLOBAL") and not _has_choice(Path(package)):
            load_library(Path(package) / "lib" / "libtorch.so")


def _has_choice(package: Path) -> bool:
    """Return whether LD_LIBRARY_PATH holds a library that torch, installed at `package`, or a CUDA package beside it
    brings too: which of the two is taken is torch's to say."""
    brought = {file.name for file in (package / "lib").glob("*.so*")}
    brought |= {file.name for file in (package.parent / "nvidia").glob("*/lib/*.so*")}
    named = os.environ.get("LD_LIBRARY_PATH")
    folders = [Path(folder or ".") for folder in named.split(":")] if named else []
    return any(file.name in brought for folder in folders if folder.is_dir() for file in folder.iterdir())


def _load_matrix_library(context: threading.Thread) -> None:
    """Make the first product, which loads the library of products, once there is a context."""
    import torch

    context.join()
    with suppress(Exception):
        if torch.cuda.is_available():
            for dtype in (torch.bfloat16, torch.float32):
                square = torch.zeros(64, 64, device="cuda", dtype=dtype)
                square @ square
            torch.cuda.synchronize()
