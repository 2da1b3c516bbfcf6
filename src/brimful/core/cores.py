"""The processor's cores."""

from __future__ import annotations

import os


def num_cores() -> int | None:
    """Cores that this process may use; None where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
