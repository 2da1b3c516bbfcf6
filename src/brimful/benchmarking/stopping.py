"""SIGTERM as Ctrl-C: an exception that ends what is going on, once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from brimful.core.errors import Interrupted

#: Hint of a bench that was stopped.
GOES_ON = "the same command goes on"


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Within, the first SIGTERM raises Interrupted; later ones are let go, as what was found is written then. Outside
    the main thread, where signals cannot be handled, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise Interrupted("stopped by SIGTERM", signal_number=number, hint=GOES_ON)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: it was not set by Python


def name_of(stop: KeyboardInterrupt) -> tuple[int, str]:
    """Number of the signal that stopped a bench, and what the user knows it as."""
    number = stop.exit_code - 128 if isinstance(stop, Interrupted) else int(signal.SIGINT)
    return number, "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
