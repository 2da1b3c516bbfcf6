"""Peak memory in one line: all of it, the readings, and its components."""

from __future__ import annotations

from brimful.core.records import PeakMemory
from brimful.core.units import bytes_text, parse_bytes

_NAMES = {"optimizer_states": "optimizer states", "outside_torch": "outside torch", "all_else": "all else"}


def memory_names(component: str) -> str:
    """A component of memory as it is called in words."""
    return _NAMES.get(component, component)


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
        f"{memory_names(name)} {bytes_text(value)}"
        for name, value in peak.components.items()
        if value >= 0.05 * (1 << 20)
    ]
    return f"{_of_all(peak, readings)}: {', '.join(parts)}" if parts else _of_all(peak, readings)


def limit_text(peak: PeakMemory, limit: str | None) -> str | None:
    """Say whether a run kept to its limit, by the driver's highest reading; None without a limit."""
    if limit is None:
        return None
    if peak.nvml is None:
        return f"--memory-limit {limit}: the driver cannot be read, torch reserved {bytes_text(peak.reserved)} at most"
    kept = "within" if peak.nvml <= parse_bytes(limit) else "MORE THAN"
    return f"{bytes_text(peak.nvml)} by the driver at most, {kept} --memory-limit {limit}"


def _of_all(peak: PeakMemory, readings: str) -> str:
    return readings if peak.total == peak.resident else f"{bytes_text(peak.total)} ({readings})"
