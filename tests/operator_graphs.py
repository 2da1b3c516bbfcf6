"""Graphs on the CPU of the operators that a computation calls, on the memory that it had then.

As in a CUDA graph, what is recorded stays as it was until it is replayed, nothing of Python runs again, and tensors are
where they were at the record: a parameter that has been given other memory since is not followed. Random numbers are
drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.step.graphs.cache import GraphCache


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _alias(leaf: Any) -> Any:
    """The same memory, whatever becomes of the tensor."""
    return torch.ops.aten.detach(leaf) if isinstance(leaf, Tensor) else leaf


class _Calls(TorchDispatchMode):
    """Operators that are called within, and memory of before that they write to, as it was."""

    def __init__(self, refuse_at: int | None, refusal: str) -> None:
        super().__init__()
        self._refuse_at, self._refusal = refuse_at, refusal
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._made = set[int]()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.calls) == self._refuse_at:
            raise RuntimeError(self._refusal)
        given = pytree.tree_map(_alias, (args, kwargs or {}))
        for tensor in self._written(func, *given):
            self._keep(tensor)
        memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(given)}
        found = func(*args, **(kwargs or {}))
        self._made |= {tensor.untyped_storage().data_ptr() for tensor in _tensors(found)} - memory
        self.calls.append((func, *given, pytree.tree_map(_alias, found)))
        return found

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        found = list[Tensor]()
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        return found

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
            self._before[storage.data_ptr()] = whole, whole.clone()

    def undo(self) -> None:
        """Write what was there before."""
        for now, before in self._before.values():
            now.copy_(before)


class _Graph:
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._calls = calls

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                for output, found in zip(_tensors(outputs), _tensors(func(*args, **kwargs)), strict=True):
                    if output.data_ptr() != found.data_ptr():
                        output.copy_(found)


class OperatorPool:
    """Records as `GraphPool` does, with the same arguments. refuse_at: the number of the call that cannot be recorded,
    None for none. refusal: what is said then; of what may pass, once."""

    device = torch.device("cpu")

    def __init__(self, *_: Any) -> None:
        self.refuse_at: int | None = None
        self.refusal = "not permitted"
        self.caches: WeakSet[GraphCache] = WeakSet()

    def measured(self, num_tokens: int) -> AbstractContextManager[None]:
        """Nothing: it has no memory of its own."""
        return nullcontext()

    def renew(self) -> None:
        """Nothing: each graph keeps its memory."""

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        """The recorded computation, and the tensors that a replay writes."""
        calls = _Calls(self.refuse_at, self.refusal)
        if "legacy stream" in self.refusal:
            self.refuse_at = None
        try:
            with calls:
                outputs = compute()
        finally:
            calls.undo()
        return _Graph(calls.calls), pytree.tree_map(_alias, outputs)
