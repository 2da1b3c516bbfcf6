"""Graphs on the CPU: what was recorded is computed again on the same memory, and written to the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree

from brimful.step.graphs.cache import GraphCache


class CpuRecorder:
    """Records as `GraphPool` does. refusal: what a capture fails with. is_capturing: whether it records or replays."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_recorded = self.num_renewed = 0
        self.caches: WeakSet[GraphCache] = WeakSet()
        self.refusal: str | None = None
        self.is_capturing = False

    def measured(self, num_tokens: int) -> AbstractContextManager[None]:
        """Nothing: it has no memory of its own."""
        return nullcontext()

    def renew(self) -> None:
        """Counted alone: nothing is shared."""
        self.num_renewed += 1

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        """The recorded computation, and the tensors that a replay writes. Until then these hold nothing of use."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        captured = partial(self._capture, compute)
        with torch.random.fork_rng([]):  # a capture draws no numbers
            outputs = pytree.tree_map(torch.zeros_like, captured())
        self.num_recorded += 1
        return _Recorded(captured, outputs), outputs

    def _capture(self, compute: Callable[[], Any]) -> Any:
        self.is_capturing = True
        try:
            return compute()
        finally:
            self.is_capturing = False


class _Recorded:
    def __init__(self, compute: Callable[[], Any], outputs: Any) -> None:
        self._compute, self._outputs = compute, outputs

    def replay(self) -> None:
        for output, found in zip(pytree.tree_leaves(self._outputs), pytree.tree_leaves(self._compute()), strict=True):
            output.copy_(found)
