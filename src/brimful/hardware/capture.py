"""Recording a CUDA graph in a process that goes on working beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from brimful.hardware.streams import stream_for


def is_capturing() -> bool:
    """True where what is launched now is recorded, and not computed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Records what the block launches on the current device into `graph`; none of it is computed.

    pool: of `torch.cuda.graph_pool_handle`, for graphs that share memory; without it, the graph's memory is its own.

    Other threads may go on allocating and copying. Garbage waits until the end: another graph that is freed meanwhile,
    such as one of an earlier run in the process, would make the capture fail. As torch has it, there is one capture at
    a time in a process.

    Raises RuntimeError or torch.AcceleratorError where something in the block cannot be captured. The device, its
    current stream, its memory and its generator can then be used again, the latter as it was. The pool must not be.
    """
    collected, stream = gc.isenabled(), torch.cuda.current_stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    recording, pool = stream_for("captures", torch.cuda.current_device()), pool or torch.cuda.graph_pool_handle()
    with torch.cuda.stream(recording):
        # What torch allocates for a generator's first graph lies beside this. A graph that this fails for ends the
        # process when it is freed (CUDAGeneratorImpl.cpp of torch 2.11: "The graph should be registered").
        room = torch.empty(1, dtype=torch.int64, device="cuda")
    gc.disable()
    torch.clear_autocast_cache()  # casts of weights that live as long as the caller's autocast, and not as the graph
    try:
        with torch.cuda.graph(graph, pool=pool, stream=recording, capture_error_mode="thread_local"):
            del room
            yield
    except (RuntimeError, torch.AcceleratorError):
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        generator.graphsafe_set_state(state)  # its own believes to be in the capture still
        _leave_pool(pool)
        raise
    finally:
        torch.clear_autocast_cache()  # casts that lie in the graph's memory, and were not computed
        if collected:
            gc.enable()


def _leave_pool(pool: Any) -> None:
    """Have the allocator take the capture into a pool for ended, if it does not yet.

    torch's `CUDAGraph.capture_end` tells it so once the driver has ended the capture, and not where the driver refuses
    (CUDAGraph.cpp of torch 2.11): in all the rest of the process no memory would be given back to the device. The
    allocator of pinned memory, which later versions tell it too, cannot be told from Python.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # of a pool that was left already, and of functions that are gone
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]
