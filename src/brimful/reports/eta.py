"""How fast a pass goes, and how long it will still take: from what it did in the last half minute."""

from __future__ import annotations

from collections import deque

#: Seconds that are looked back on: long enough for a steady rate, short enough to forget a slow start.
_WINDOW_S = 30.0
#: Seconds between two marks that are kept.
_APART_S = 0.25


class Pace:
    """Follows one pass over rows whose number may not be known, such as those of a stream.

    A pass that goes on where an earlier one stopped begins at its first mark: rows done before it are nobody's speed.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, float | None]] = deque()

    def mark(self, now_s: float, done: int, share: float | None) -> None:
        """At `now_s`, `done` rows are done, which are `share` of all; None if that is not known."""
        if len(self._marks) > 1 and now_s - self._marks[-2][0] < _APART_S:
            self._marks.pop()
        self._marks.append((now_s, done, share))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= _WINDOW_S:
            self._marks.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """None before there is something to divide."""
        seconds, rows, _ = self._gone()
        return rows / seconds if seconds > 0 and rows > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds until all is done, at this pace; None if it is not known."""
        seconds, _, share = self._gone()
        if seconds <= 0 or not share or share < 0:
            return None
        return (1 - (self._marks[-1][2] or 0.0)) * seconds / share

    def _gone(self) -> tuple[float, int, float | None]:
        """Seconds, rows and share between the first mark and the last."""
        if not self._marks:
            return 0.0, 0, None
        (from_s, before, start), (to_s, done, end) = self._marks[0], self._marks[-1]
        return to_s - from_s, done - before, None if start is None or end is None else end - start
