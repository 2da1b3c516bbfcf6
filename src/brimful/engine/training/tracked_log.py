"""The log of a run while trackers follow it: their failures are said once, written down, and stop nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.trackers import TrackerFailure, Trackers
from brimful.engine.training.events import EventLog

#: Seconds that a run which was interrupted waits for trackers: who stopped it may not wait long.
_WAIT_INTERRUPTED_S = 5.0


@contextmanager
def tracked(log: EventLog, trackers: Trackers, folder: Path, callbacks: Callbacks) -> Iterator[None]:
    """Within, `trackers` follow `log` from its next line on. At the end they get the rest."""

    def tell(failures: Sequence[TrackerFailure]) -> None:
        for each in failures:
            log.write("tracker_failed", tracker=each.tracker, why=each.why)
            callbacks.warning(
                f"{each.tracker} does not have all of this run: {each.why}; nothing else is touched by that, and "
                f"`brimful report {atomic_files.path_text(folder)} --report-to {each.tracker}` sends the rest"
            )

    def heard() -> None:
        trackers.begin(folder)
        tell(trackers.failures())

    log.heard = heard
    try:
        yield
    except BaseException:
        log.heard = None
        tell(trackers.end(wait_s=_WAIT_INTERRUPTED_S))
        raise
    log.heard = None
    tell(trackers.end())
