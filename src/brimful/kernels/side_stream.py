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
    """A second stream of one model's step. is_active: whether work may run there now, in whichever thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device)
        self._flying: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.is_active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, work may run on the side stream; at the end the current stream has waited for all of it."""
        self.is_active = True
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            yield
            torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            self.is_active = False
            self._flying.clear()

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Have `stream` go on after all work so far, if any may be there."""
        if self.is_active:
            stream.wait_stream(self._stream)

    def run(self, work: Callable[[], T], inputs: tuple[Tensor, ...]) -> T:
        """Run `work`, which reads `inputs`, after all that was launched so far. Its results must wait for the end."""
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
