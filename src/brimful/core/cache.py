"""Cached results in the user's cache folder: one JSON file per result, named by a hash of all it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cache_path(kind: str, depends_on: object) -> Path | None:
    """Cache file of a result, None for a user without a home. depends_on: values that JSON can hold."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    key = json.dumps(depends_on, sort_keys=True, default=str)
    return folder / "brimful" / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def read_cached(path: Path) -> dict[str, Any] | None:
    """Read a cached result; None if there is none, or it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_cached(path: Path, found: Mapping[str, Any]) -> None:
    """Write a result. Errors are ignored: it is computed again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(found), "utf-8")
        temporary.replace(path)
    except OSError:
        pass
