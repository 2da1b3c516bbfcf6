"""Peak memory in one line: all of it, the readings, and its components."""

from __future__ import annotations

from brimful.core.records import PeakMemory
from brimful.core.units import bytes_text

_NAMES = {"optimizer_states": "optimizer states", "outside_torch": "outside torch", "all_else": "all else"}


def memory_text(peak: PeakMemory) -> str | None:
    """Return `5.0 GiB (3.0 GiB allocated, ...): weights 1.0 GiB, ...`, None where nothing is known.

    Components that would be shown as 0.0 MiB are left out.
    """
    known = (
        (peak.allocated, "allocated"), (peak.reserved, "reserved"), (peak.nvml, "by the driver"),
        (peak.resident, "resident"),
    )  # fmt: skip
    readings = ", ".join(f"{bytes_text(value)} {by}" for value, by in known if value is not None)
    if peak.total is None:
        return readings or None
    parts = [
        f"{_NAMES.get(name, name)} {bytes_text(value)}"
        for name, value in peak.components.items()
        if value >= 0.05 * (1 << 20)
    ]
    return f"{_of_all(peak, readings)}: {', '.join(parts)}" if parts else _of_all(peak, readings)


def _of_all(peak: PeakMemory, readings: str) -> str:
    return readings if peak.total == peak.resident else f"{bytes_text(peak.total)} ({readings})"
