"""Windows of rows through four stages at once: reading, tokenising, computing, writing.

One thread reads ahead, others tokenise, this one launches what the device computes, one writes. Few windows are under
way at any time, so memory does not grow with the input. Windows are cut where rows say, not where time does: what is
computed together does not depend on speed, nor on where a run was resumed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from brimful.core.ahead import POLL_S, Ahead
from brimful.core.classification import Stage, StageName

Item = TypeVar("Item")

#: Windows of a device that wait before it is their turn, and as many behind it to be written.
_AHEAD = 2
#: Seconds that the reading thread may take to end: it may wait for a pipe.
_END_S = 1.0


class Busy:
    """Seconds during which at least one piece of work was under way. Any thread may begin and end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._since = 0, 0.0
        self.seconds = 0.0

    def begin(self) -> None:
        """One more piece of work is under way."""
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        """One piece of work is done."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since

    def add(self, seconds: float) -> None:
        """Work that was timed elsewhere."""
        with self._lock:
            self.seconds += seconds

    @contextmanager
    def working(self) -> Generator[None]:
        """A piece of work that begins and ends here."""
        self.begin()
        try:
            yield
        finally:
            self.end()


class Stages:
    """Busy seconds of each stage."""

    def __init__(self) -> None:
        self.read, self.tokenise, self.compute, self.write = Busy(), Busy(), Busy(), Busy()

    def record(self) -> tuple[Stage, ...]:
        """The stages in the order of the stream."""
        names: tuple[StageName, ...] = ("read", "tokenise", "compute", "write")
        return tuple(Stage(name=name, busy_s=getattr(self, name).seconds) for name in names)

    def limit(self) -> StageName:
        """The stage that was busy the longest: the others waited for it."""
        return max(self.record(), key=lambda stage: stage.busy_s).name


def run_stages(
    windows: Iterable[Item],
    *,
    tokenise: Callable[[Item], Callable[[], Any]],
    compute: Callable[[Any], Any],
    write: Callable[[Item, Any, Any], None],
    stages: Stages,
    stop: Callable[[], bool],
    devices: Callable[[], int] = lambda: 1,
    most_devices: int = 1,
) -> None:
    """Takes every window through all stages, and writes them in order.

    tokenise(window) begins to and returns what waits for it; compute(asked) launches, and its `Result` says how long
    that took; write(window, asked, logits) ends it. stages.tokenise is for `tokenise` to keep.
    stop: asked before each window, and while none comes; what is under way then is still written. devices: how many
    compute at once by now, of `most_devices`. Whatever a stage raises is raised here, with the windows before it
    written, and none behind it.
    """
    writing: deque[Future[None]] = deque()
    failed = threading.Event()

    def finish(window: Item, asked: Any, pending: Any) -> None:
        if failed.is_set():
            return
        try:
            logits = pending.result()
            stages.compute.add(pending.busy_s / devices())
            with stages.write.working():
                write(window, asked, logits)
        except BaseException:
            failed.set()
            raise

    # The thread that reads ahead holds one more window than there is room for.
    ahead = Ahead(_submitted(windows, tokenise, stages), _AHEAD * most_devices - 1, name="brimful-read")
    with ExitStack() as stack:
        stack.callback(ahead.close, _END_S)
        writer = stack.enter_context(ThreadPoolExecutor(1, "brimful-write"))
        while not stop() and not failed.is_set():
            try:
                item = ahead.take(POLL_S)
            except queue.Empty:
                continue
            if item is None:
                break
            window, waiting = item
            asked = waiting()
            writing.append(writer.submit(finish, window, asked, compute(asked)))
            while len(writing) > _AHEAD * devices():
                writing.popleft().result()
        for future in writing:
            future.result()


def _submitted(
    windows: Iterable[Item], tokenise: Callable[[Item], Callable[[], Any]], stages: Stages
) -> Iterator[tuple[Item, Callable[[], Any]]]:
    """Each window as it is read, with what waits for its tokens."""
    coming = iter(windows)
    while True:
        with stages.read.working():
            window = next(coming, None)
        if window is None:
            return
        yield window, tokenise(window)
