"""Copies of device tensors on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised host memory for the copy of a tensor of `device`."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


class ReadBack:
    """A copy of a tensor as it is once the device has done what is queued by now. On the CPU it is there at once.

    room: of `host_room`, for a copy that must not allocate. since: a timed event recorded earlier, from which `wait`
    knows the device's `seconds`. blocking: the host's thread sleeps while it waits, where other threads need its core;
    otherwise it spins, and wakes sooner.
    """

    def __init__(
        self, tensor: Tensor, *, room: Tensor | None = None, since: torch.cuda.Event | None = None,
        blocking: bool = False,
    ) -> None:  # fmt: skip
        self._since, self._ended = since, None
        self.seconds = 0.0
        self._copy = host_room(tensor.shape, tensor.dtype, tensor.device) if room is None else room
        self._copy.copy_(tensor, non_blocking=True)
        if tensor.device.type != "cuda":
            return
        self._ended = torch.cuda.Event(enable_timing=since is not None, blocking=blocking)
        self._ended.record()

    def wait(self) -> Tensor:
        """The copy, on the host. Waits for the work queued before it, not for what is queued behind."""
        if self._ended is not None:
            self._ended.synchronize()
            if self._since is not None:
                self.seconds = self._since.elapsed_time(self._ended) / 1e3
        return self._copy
