"""Time that the threads of this process ran and waited for a core, as Linux counts it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

#: Nanoseconds that each thread ran, and that it could have run and waited for a core, by its number.
ThreadTimes: TypeAlias = Mapping[str, tuple[int, int]]

_TASKS = Path("/proc/self/task")


def thread_times(tasks: Path = _TASKS) -> ThreadTimes:
    """Times of the threads until now; none where the system does not count them."""
    found = dict[str, tuple[int, int]]()
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError, ValueError):  # a thread that has ended meanwhile
                ran, waited, *_ = map(int, (task / "schedstat").read_text("ascii").split())
                found[task.name] = ran, waited
    return found


def waiting_share(before: ThreadTimes, after: ThreadTimes) -> float | None:
    """Time in which threads waited for a core over the time in which they ran or waited, between two readings, of those
    that are in the later one; None where the system counts none."""
    pairs = [(after[each], before.get(each, (0, 0))) for each in after]
    ran, waited = (sum(max(0, now[i] - then[i]) for now, then in pairs) for i in range(2))
    return waited / (ran + waited) if ran > 0 else None
