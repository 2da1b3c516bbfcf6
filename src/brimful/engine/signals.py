"""SIGTERM and Ctrl-C as a question the loop asks at each step: was I told to stop?"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from brimful.hardware.ranks import ALONE, Ranks

_STOPS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While open, the first signal to stop is remembered in `received`; a second Ctrl-C interrupts at once.

    tell: called at the first one, to answer it before the loop gets to it. ranks: processes that this one leads, which
    have nothing to pass on to it then: their word may come when nobody listens any more.
    Outside the main thread, where signals cannot be handled, it hears nothing.
    """

    def __init__(self, tell: Callable[[], None] = lambda: None, *, ranks: Ranks = ALONE) -> None:
        self.received: int | None = None
        self._tell, self._ranks = tell, ranks
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in _STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = number
            if self._ranks.watch is not None:
                self._ranks.pulse.told = number
            self._tell()


@contextmanager
def passing_on(ranks: Ranks) -> Iterator[None]:
    """Within, signals to stop are the leader's to hear: it saves, and gives the order. It is told of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, _: object) -> None:
        ranks.pulse.told = number

    before = {number: signal.signal(number, tell) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
