"""Messages of other libraries: kept off the terminal, or made one line of ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from brimful.core.errors import printable


class _Quiet:
    """transformers' talk, which is one of the process: the first thread silences it, the last one restores it."""

    def __init__(self) -> None:
        self._alone, self._num_within = threading.Lock(), 0
        self._verbosity, self._bars = 0, False

    def enter(self) -> None:
        from transformers.utils import logging

        with self._alone:
            self._num_within += 1
            if self._num_within == 1:
                self._verbosity, self._bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
                logging.set_verbosity(logging.CRITICAL)
                logging.disable_progress_bar()

    def leave(self) -> None:
        from transformers.utils import logging

        with self._alone:
            self._num_within -= 1
            if not self._num_within:
                logging.set_verbosity(self._verbosity)
                if self._bars:
                    logging.enable_progress_bar()


_QUIET = _Quiet()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own warnings, reports and bars off the terminal, in all threads while one is within."""
    _QUIET.enter()
    try:
        yield
    finally:
        _QUIET.leave()


def first_line(error: BaseException) -> str:
    """Kind and message of another library's error, on one printable line."""
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, 200)
