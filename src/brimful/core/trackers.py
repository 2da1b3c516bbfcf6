"""Names of trackers, their checks, and the part of them that a training loop knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brimful.core.errors import OptionError, did_you_mean, printable

#: Trackers that a run can be reported to: each is the name of its package and of the extra that installs it.
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
NONE = "none"


def tracker_names(report_to: str) -> tuple[str, ...]:
    """Trackers in `tensorboard,wandb`, each once; none of `none`. Raises: OptionError for another name."""
    names = dict.fromkeys(name.strip() for name in report_to.split(","))
    if tuple(names) == (NONE,):
        return ()
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS) if name != NONE else "give it alone"
            raise OptionError(
                f"--report-to is '{printable(report_to)}': there is no tracker '{printable(name)}'",
                hint=hint or f"none, or one or more of {', '.join(TRACKERS)}, separated by commas",
            )
    return tuple(names)


def check_trackers(report_to: str) -> None:
    """Check that the trackers' packages are installed, without importing them. Raises: OptionError."""
    for name in tracker_names(report_to):
        if importlib.util.find_spec(name) is None:
            raise OptionError(
                f"--report-to {name} needs {name}, which is not installed", hint=f"pip install 'brimful[{name}]'"
            )


@dataclass(frozen=True, kw_only=True)
class TrackerFailure:
    """A tracker that does not get a run, or not all of it, and why."""

    tracker: str
    why: str


class Trackers:
    """Followers of a run's log. None of these calls raises or waits, but `end`. This one follows nothing."""

    def begin(self, run: Path) -> None:
        """Follow the log in the folder of a run from here on; nothing where it is followed already."""

    def failures(self) -> Sequence[TrackerFailure]:
        """Return failures since this was asked last."""
        return ()

    def end(self, *, wait_s: float | None = None) -> Sequence[TrackerFailure]:
        """Send the rest and stop following; return failures since `failures` was asked last.

        wait_s: most seconds that this may take; default as long as is usual.
        """
        return ()
