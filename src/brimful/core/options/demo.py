"""Options of `demo`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The demonstration: MiniLM-L6 on BBC News, both from Python packages, on this machine."""

    output: str = "demo-run"
    """Folder to work in; a number is added if it is taken."""
    seed: int = 42
    """Seed of the run."""
    num_train_epochs: float = 1.0
    """Passes over the training rows."""
    max_length: int = 96
    """Longest sequence in tokens."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print one JSON document on stdout at the end."""
