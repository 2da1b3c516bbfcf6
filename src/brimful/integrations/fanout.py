"""Several listeners as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from brimful.core.callbacks import Callbacks


class Fanout(Callbacks):
    """Tells each of several listeners, in order."""

    def __init__(self, *listeners: Callbacks) -> None:
        for name, _ in inspect.getmembers(Callbacks, inspect.isfunction):
            setattr(self, name, partial(_tell, [getattr(each, name) for each in listeners]))


def _tell(listeners: Sequence[Callable[..., None]], *said: Any, **named: Any) -> None:
    for each in listeners:
        each(*said, **named)
