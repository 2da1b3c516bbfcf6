"""Options of `report`."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.options.checks import check_types
from brimful.core.trackers import tracker_names


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """A page about a run, from what is in its folder."""

    run: str
    """Folder of a run, finished or under way, of a bench, or of an evaluation; or its JSON file; or what classify
    wrote, a folder or a file."""
    output: str | None = None
    """The page, a name that ends in .html. Default: report.html in the folder, in one of classify's _report.html."""
    report_to: str = "none"
    """Send the run's log to these trackers too, as far as they do not have it: tensorboard, wandb, mlflow, trackio."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print one JSON document on stdout at the end."""

    def __post_init__(self) -> None:
        check_types(self)
        tracker_names(self.report_to)
