"""Rate and time left of a pass, from its last half minute.

rich's `TimeRemainingColumn` forgets every sample that is older than its period: a pass that reports once a minute would
show neither rate nor time left. Here the last two marks are always kept.
"""

from __future__ import annotations

from collections import deque

#: Seconds that the rate is measured over: long enough to be steady, short enough to forget a slow start.
_WINDOW_S = 30.0
#: Least seconds between two marks that are kept.
_APART_S = 0.25


class Pace:
    """The pace of one pass, whose number of rows may be unknown (a stream).

    Rows done before the first mark, by an earlier run that this one resumes, do not count.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, float | None]] = deque()

    def mark(self, now_s: float, done: int, share: float | None) -> None:
        """Note that `done` rows are done at `now_s`. share: of all rows, None if unknown."""
        if len(self._marks) > 1 and now_s - self._marks[-2][0] < _APART_S:
            self._marks.pop()
        self._marks.append((now_s, done, share))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= _WINDOW_S:
            self._marks.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second; None before two marks differ."""
        seconds, rows, _ = self._gone()
        return rows / seconds if seconds > 0 and rows > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds until all is done, at this pace; None if unknown."""
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
