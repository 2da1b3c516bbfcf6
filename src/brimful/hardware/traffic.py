"""Seconds in which sums are on their way between processes, and those of them in which this one did something else.

On a CPU alone: what a GPU does beside its other work the host does not see.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any


class Traffic:
    """Collectives that were begun, and may be under way together.

    sent_s: seconds in which at least one was. Others that come to it late are waited for meanwhile. blocked_s: of
    these, seconds in which this process did nothing else.
    """

    def __init__(self) -> None:
        self._lock, self._under_way, self._since = threading.Lock(), 0, 0.0
        self.sent_s = self.blocked_s = 0.0

    def begin(self, work: Any) -> None:
        """Take account of a collective that was begun just now."""
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._since = time.monotonic()
        with suppress(RuntimeError):  # one that has failed by now
            work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self.sent_s += time.monotonic() - self._since

    def wait(self, work: Any) -> None:
        """Wait for a collective, with nothing else to do."""
        began = time.monotonic()
        work.wait()
        self.blocked_s += time.monotonic() - began

    @property
    def hidden_s(self) -> float:
        """Seconds on the way beside other work."""
        return max(0.0, self.sent_s - self.blocked_s)
