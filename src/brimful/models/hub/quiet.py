"""Messages of other libraries: kept off the terminal, or made one line of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brimful.core.errors import printable


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own warnings, reports and bars off the terminal."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Kind and message of another library's error, on one printable line."""
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, 200)
