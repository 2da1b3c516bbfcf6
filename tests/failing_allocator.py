"""Memory that runs out on the CPU at chosen allocations, and graphs of whole steps, whose replays allocate nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.data.tokens.encoder import Tokens
from brimful.step.forward import Forward
from brimful.step.updates.torch_update import TorchUpdate
from recorder import CpuRecorder


@cache
def _allocates(operator: Any) -> bool:
    """True if an operator returns memory of its own: not a view, nor what it was given and has changed."""
    return any("Tensor" in str(returned.type) and returned.alias_info is None for returned in operator._schema.returns)


class FailingAllocator(TorchDispatchMode):
    """Within, the allocations of this thread that are in `fail_at`, counted from 1, raise what torch raises on a GPU.

    fits: of each new tensor; one that it is False of never fits. None: all do. num_allocations: so far. failed:
    operators that did.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled within, and to say so to torch's compiler at every operator costs as much as it does."""
        return False

    def __init__(self, fail_at: Collection[int] = (), *, fits: Callable[[torch.Tensor], bool] | None = None) -> None:
        super().__init__()
        self.fail_at, self.fits = frozenset(fail_at), fits
        self.num_allocations, self.failed = 0, list[str]()
        self._idle = False

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within, nothing is counted."""
        before, self._idle = self._idle, True
        try:
            yield
        finally:
            self._idle = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._idle or not _allocates(func):
            return func(*args, **(kwargs or {}))
        self.num_allocations += 1
        if self.num_allocations in self.fail_at:
            self._fail(func)
        made = func(*args, **(kwargs or {}))
        if self.fits is None:
            return made
        if not all(self.fits(each) for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor)):
            self._fail(func)
        return made

    def _fail(self, func: Any) -> None:
        self.failed.append(str(func))
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate for {func}")


@contextmanager
def in_passes(allocator: FailingAllocator) -> Iterator[None]:
    """Within, what windows are computed with is allocated there."""
    submit = Forward.submit

    def submitted(forward: Forward, tokens: Tokens) -> Any:
        with allocator:
            return submit(forward, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "submit", submitted)
        yield


class StepRecorder(CpuRecorder):
    """Records steps and passes: to record computes nothing that stays, as on a GPU, and to replay allocates nothing."""

    def __init__(self, allocator: Callable[[], FailingAllocator], update: TorchUpdate | None = None) -> None:
        super().__init__()
        self._allocator, self._update = allocator, update

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        yield

    def record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        with self._nothing_stays():
            outputs = pytree.tree_map(torch.zeros_like, compute())
        self.num_recorded += 1
        return _Replayed(compute, outputs, self._allocator), outputs

    @contextmanager
    def _nothing_stays(self) -> Iterator[None]:
        update = self._update
        if update is None or torch.is_inference_mode_enabled():  # a pass changes nothing
            yield
            return
        tensors = (
            *update.parameters,
            *update.model.buffers(),
            update.loss,
            update.applied,
            update.scale,
            update.growth,
        )
        with self._allocator().idle():
            kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
            gradients = [None if p.grad is None else p.grad.clone() for p in update.parameters]
            optimizer = copy.deepcopy(dict(update._optimizers[0].state))
            states = list(update._optimizers[0].state)
        try:
            yield
        finally:
            with self._allocator().idle(), torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
                for parameter, gradient in zip(update.parameters, gradients, strict=True):
                    parameter.grad = gradient
                update._optimizers[0].state.clear()
                update._optimizers[0].state.update(zip(states, optimizer.values(), strict=True))


class _Replayed:
    def __init__(self, compute: Callable[[], Any], outputs: Any, allocator: Callable[[], FailingAllocator]) -> None:
        self._compute, self._outputs, self._allocator = compute, outputs, allocator

    def replay(self) -> None:
        with self._allocator().idle():
            found = pytree.tree_leaves(self._compute())
            for output, value in zip(pytree.tree_leaves(self._outputs), found, strict=True):
                output.copy_(value)
