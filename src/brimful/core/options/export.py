"""Options of `export`."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.options.checks import check_positive, check_types


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """A model of one checkpoint of a run, whether the run has finished or not."""

    run: str
    """Folder of the run."""
    output: str | None = None
    """Folder for the model, in Hugging Face form. Default: RUN/model-step-N."""
    merge: bool = False
    """Merge the run's adapter into the model, which then needs no peft. Default: as the run was asked."""
    overwrite: bool = False
    """Replace a model at --output, with all else in its folder."""
    step: int | None = None
    """Applied steps of the checkpoint. Default: the newest that is whole."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print one JSON document on stdout at the end."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "step")
