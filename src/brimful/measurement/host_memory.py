"""Host memory that the process has resident, now and at most, as the system counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class HostRecords:
    """Resident memory in place of an allocator's records. The system keeps its peak for as long as the process lives:
    a phase in which that grew has had the most so far. What of it is allocated is unknown."""

    def allocated(self) -> int:
        """Return 0: unknown."""
        return 0

    def peak(self) -> int:
        """Most that the process has had at once."""
        return peak_resident_bytes() or 0

    def reset(self) -> None:
        """Do nothing: the peak stays."""

    def reserved(self) -> int:
        """Resident now."""
        return resident_bytes() or 0

    def reserved_peak(self) -> int:
        """As `peak`."""
        return self.peak()

    def workspaces(self, known: set[int]) -> int:
        """Return 0: none are known."""
        return 0

    def process(self) -> int | None:
        """Return None: there is no driver."""
        return None


def resident_bytes() -> int | None:
    """Host memory that the process has now; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def peak_resident_bytes() -> int | None:
    """Most host memory that the process has had at once; None where the system does not say."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    try:
        import resource
        import sys
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
