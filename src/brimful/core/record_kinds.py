"""Kinds of records in JSON files, told by the fields that each kind alone has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

Kind = Literal["run", "evaluation", "classification", "bench", "comparison"]

RUN = "run.json"
_FIELDS: dict[Kind, frozenset[str]] = {
    "run": frozenset({"run", "status", "recipe"}),
    "evaluation": frozenset({"num_rows", "metrics", "intervals"}),
    "classification": frozenset({"counts", "stages", "recipe"}),
    "bench": frozenset({"workload", "rows", "steps"}),
    "comparison": frozenset({"compared", "paired"}),
}


def kind_of(file: Path) -> Kind | None:
    """Kind of the record in a file; None for anything else."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kinds = (kind for kind, fields in _FIELDS.items() if isinstance(found, dict) and fields <= found.keys())
    return next(kinds, None)


def folder_of(given: Path) -> Path:
    """The folder of a run whose run.json was given; anything else as it is."""
    return given.parent if given.name == RUN and given.is_file() else given
