"""Graphs on the CPU: what was recorded is computed again on the same memory, and written to the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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


class OperationRecorder(CpuRecorder):
    """Records operations alone, as a GPU does: whatever the host decided or read meanwhile is the same at each replay.

    Nothing is computed: what an operation wrote is put back.
    """

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        operations = _Operations()
        with operations:
            outputs = compute()
        with torch.no_grad():
            for tensor, before in operations.before.values():
                tensor.copy_(before)
        self.num_recorded += 1
        return operations, outputs


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in given if isinstance(given, list) else [given]:
                    self.before.setdefault(id(tensor), (tensor.detach(), tensor.detach().clone()))
        out = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self._done:
            found = func(*args, **kwargs)
            for kept, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(found), strict=True):
                if isinstance(new, Tensor) and kept is not new:
                    kept.detach().copy_(new)
