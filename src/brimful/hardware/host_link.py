"""Rate of copies between a GPU and pinned host memory, as measured."""

from __future__ import annotations

import torch

#: Bytes of a copy that reaches the link's rate.
_BYTES = 64 << 20


def host_link_bytes_per_s(device: torch.device) -> float | None:
    """Return the rate of the slower direction; None for a device without a link of its own."""
    if device.type != "cuda":
        return None
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    slowest_s = 0.0
    for into, given in ((host, there), (there, host)):
        into.copy_(given, non_blocking=True)  # the first touches pages
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        into.copy_(given, non_blocking=True)
        ended.record()
        ended.synchronize()
        slowest_s = max(slowest_s, float(began.elapsed_time(ended)) / 1000)
    return _BYTES / slowest_s
