"""Packages that a bench needs beside brimful's own: looked for before its first row."""

from __future__ import annotations

from importlib.util import find_spec

from brimful.core.errors import OptionError, first_line

_HINT = "pip install 'brimful[compare]'"


def check_accelerate() -> None:
    """Look for the package that Trainer needs, without importing it. Raises: OptionError."""
    if find_spec("accelerate") is None:
        raise OptionError("a bench has rows of Trainer, which needs the package accelerate", hint=_HINT)


def check_trainer() -> None:
    """Import Trainer and make arguments of it, as its rows do. Raises: OptionError where packages do not fit it."""
    try:
        from transformers import Trainer, TrainingArguments

        del Trainer  # its module is imported when it is named
        TrainingArguments(report_to="none", use_cpu=True)
    except (ImportError, RuntimeError) as error:
        said = f"a bench has rows of Trainer, which cannot start: {first_line(error)}"
        raise OptionError(said, hint=_HINT) from error
