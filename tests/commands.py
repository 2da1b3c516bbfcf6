"""The command line in this process, and what it works on."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from brimful.cli.commands import run


@dataclass(frozen=True, kw_only=True)
class Said:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str


class Brimful(Protocol):
    """brimful("train", data, "--model", model, ...) runs one command line."""

    def __call__(self, *words: object) -> Said: ...


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of one test session that no test changes. Labels of `classifier`: bad, good."""

    base: Path
    classifier: Path
    reviews: Path


def train_words(data: object, model: object, output: object, *more: object) -> Sequence[object]:
    """The words of a short training."""
    return ("train", data, "--model", model, "--output", output, "--batch-size", 8, "--num-train-epochs", 1, *more)


def call(*words: object) -> Said:
    """Runs one command line."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n", write_through=True), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    out.seek(0)
    return Said(code=code, out=out.read(), err=err.getvalue())
