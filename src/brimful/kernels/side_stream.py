"""Work that nothing waits for until the weights are updated, on a stream of its own.

In a backward pass only gradients of activations have a successor; those of weights may run beside them, which fills a
GPU that one small product leaves half empty. Meant for captured steps: the streams become branches of one graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: Pieces of work whose inputs are kept alive for it; the main stream waits for older ones.
_IN_FLIGHT = 6


class SideStream:
    """A side stream. While it is `active`, `beside` runs there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device)
        self._flying: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, `beside` runs on the side stream; at the end the current stream has waited for all of it."""
        global _active
        _active = self
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            yield
            torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            _active = None
            self._flying.clear()

    def run(self, work: Callable[[], T], inputs: tuple[Tensor, ...]) -> T:
        """Runs `work`, which reads `inputs`, after all that was launched so far. Its results must wait for the end."""
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            result = work()
        event = torch.cuda.Event()
        event.record(self._stream)
        self._flying.append((event, inputs))
        if len(self._flying) > _IN_FLIGHT:
            main.wait_event(self._flying.popleft()[0])
        return result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch hands out 32 in turn, and one that copies for others must not be part of a capture."""
    return torch.cuda.Stream(device)


_active: SideStream | None = None


def beside(work: Callable[[], T], *inputs: Tensor, leaf: bool) -> T:
    """Runs `work`, on the side stream if there is one. inputs: all that it reads and that may be freed meanwhile.

    leaf: whether its results are gradients of leaves, which nothing reads before the end.
    """
    return work() if _active is None or not leaf else _active.run(work, inputs)
