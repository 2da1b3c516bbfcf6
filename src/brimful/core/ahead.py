"""Items made ahead of their use by another thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Interval at which a thread that waits looks for an end.
POLL_S = 0.1


class Ahead(Generic[Item]):
    """Items of an iterator that another thread advances: `depth` that are ready, and one more.

    ended: set when they are wanted no more; an iterator that waits for something looks at it.
    """

    def __init__(self, items: Iterator[Item], depth: int, *, name: str) -> None:
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(items,), name=name, daemon=True)
        self._thread.start()

    def take(self, timeout_s: float | None = None) -> Item | None:
        """The next item, None at the end. Raises: queue.Empty after `timeout_s`, and what the iterator raises."""
        item, error = self._ready.get(timeout=timeout_s)
        if error is not None:
            raise error
        return item

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread and drop what nobody took. One that waits too long is left to end with the process."""
        self.ended.set()
        self._thread.join(timeout_s)
        self._ready = queue.Queue(1)

    def _make(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, None))
        except BaseException as error:  # the consumer's to raise
            self._put((None, error))

    def _put(self, item: tuple[Item | None, BaseException | None]) -> bool:
        while not self.ended.is_set():
            try:
                self._ready.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False
