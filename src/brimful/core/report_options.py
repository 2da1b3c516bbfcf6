"""Options of `report`."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.option_checks import check_types


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """A page about a run, from what is in its folder."""

    run: str
    """Folder of a run, finished or under way; or a record of an evaluation: its JSON file, or the folder with it."""
    output: str | None = None
    """The page, a name that ends in .html. Default: report.html in the folder."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print one JSON document on stdout at the end."""

    def __post_init__(self) -> None:
        check_types(self)
