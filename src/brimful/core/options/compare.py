"""Options of `compare`."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.core.options.checks import check_types


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Folders of runs, of evaluations or of benches, side by side."""

    folders: tuple[str, ...]
    """Folders of runs, finished or under way, of evaluations or of benches, or their JSON files: two or more."""
    html: str | None = None
    """Also write the comparison as a page, a name that ends in .html."""
    seed: int = 42
    """Start of the random numbers that resample rows."""
    json: bool = False
    """Print one JSON document on stdout, and nothing else there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folders", tuple(self.folders))
        check_types(self)
        if len(self.folders) < 2:
            raise OptionError("compare needs two folders or more", hint="as in brimful compare run-a run-b")
        if self.seed < 0:
            raise OptionError(f"--seed is {self.seed}: it must be at least 0", hint="the default is 42")
