"""Ctrl-C and SIGTERM during a pass of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from brimful.engine.classification.runner import Runner
from brimful.engine.signals import StopSignals
from brimful.hardware.meeting import store_is_launchers
from brimful.hardware.ranks import Ranks

#: Seconds until it is known that another process is gone, where a launcher then ends the others.
_VERDICT_S = 4.0


class _Stopped(Exception):  # noqa: N818  (it is not an error)
    """A window left undone, as a signal to stop has come."""


def check_why(ranks: Ranks) -> None:
    """Look why a pass was told to stop: torchrun ends all where one process is gone. Raises: RanksError."""
    if store_is_launchers():
        ranks.check_lost(_VERDICT_S)


@contextmanager
def stopping(
    runner: Runner, ranks: Ranks, tell: Callable[[], None], lost: Callable[[], bool] = lambda: False
) -> Iterator[StopSignals]:
    """Within, signals to stop are answered at once by `tell`; on a CPU the window that is computed is left undone.

    lost: whether the pass is of no use any more; its window is left then, too.
    """
    stop = StopSignals(tell, ranks=ranks)

    def leave() -> None:
        if stop.received is not None or lost():
            raise _Stopped

    if runner.precision.device.type == "cpu":
        runner.forward.after_pass = leave
    with stop, suppress(_Stopped):
        yield stop
