"""Streams of a GPU, one for each use in a process: torch hands out 32 in turn, and two uses that were given one would
wait for one another, or be part of one another's captures."""

from __future__ import annotations

from functools import cache

import torch


@cache
def stream_for(use: str, device: torch.device | int, *, priority: int = 0) -> torch.cuda.Stream:
    """Return the stream of a use. priority: -1 for work that must not wait for kernels which fill the GPU."""
    return torch.cuda.Stream(device, priority=priority)
