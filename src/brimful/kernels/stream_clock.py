"""Seconds between places of a GPU's streams, captured or not, by the GPU's own clock; the host reads them at any time.

Events of a captured graph are overwritten by its next replay, so that the host would have to wait for each one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


class StreamClock:
    """Seconds by `slots`, each of which one stream at a time starts and stops. Waits for the device when it is made."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._starts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._totals = torch.zeros_like(self._starts)
        self._seen = torch.zeros(slots, dtype=torch.int64, pin_memory=True)  # written by the device
        with self.running(0):  # a kernel cannot be compiled while a graph is captured
            pass
        torch.cuda.synchronize(device)
        self._totals.zero_()
        self._seen.zero_()
        self._read = self._seen.numpy()  # the same memory, without a tensor for each reading

    def start(self, slot: int) -> None:
        """Begin with what the current stream does from now on."""
        clock_start[(1,)](self._starts, slot, num_warps=1)

    def stop(self, slot: int) -> None:
        """End with what it has done by then."""
        clock_stop[(1,)](self._starts, self._totals, self._seen, slot, num_warps=1)

    @contextmanager
    def running(self, slot: int) -> Iterator[None]:
        """Count what the current stream does within."""
        self.start(slot)
        yield
        self.stop(slot)

    def seconds(self, slot: int) -> float:
        """Seconds so far, of what the device has done by now. Waits for nothing."""
        return int(self._read[slot]) / 1e9


@triton.jit(do_not_specialize=["slot"])
def clock_start(STARTS, slot):  # type: ignore[no-untyped-def]
    """Keep the time."""
    tl.store(STARTS + slot, globaltimer())


@triton.jit(do_not_specialize=["slot"])
def clock_stop(STARTS, TOTALS, SEEN, slot):  # type: ignore[no-untyped-def]
    """Add up nanoseconds since the start, in the device's memory and in the host's."""
    total = tl.load(TOTALS + slot) + globaltimer() - tl.load(STARTS + slot)
    tl.store(TOTALS + slot, total)
    tl.store(SEEN + slot, total)
