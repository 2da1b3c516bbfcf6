"""Results within a layer that a backward pass computes again instead of keeping them, told by functions that know how.

An activation's result is made again from its input, which is kept anyway: a pass over memory, and no product. A layer
that is computed twice need not multiply for what comes out of it: nobody reads it the second time.

Both are active within a call of a layer, on its thread, and there is nothing to tell outside of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Remade:
    """Results of one call of a layer that are not kept for its backward pass, and how to make them again."""

    def __init__(self) -> None:
        self._makers: dict[int, Maker] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, functions tell how their results are made again."""
        token = _remade.set(self)
        try:
            yield
        finally:
            _remade.reset(token)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, what is saved for a backward pass is left out, too, where it is known how to make it again."""
        with self.listening(), saved_tensors_hooks(self._pack, _unpack):
            yield

    def note(self, maker: Maker) -> None:
        """Take in how a result is made again."""
        self._makers[maker.storage.cdata] = maker

    def maker(self, x: Tensor) -> Maker | None:
        """Return how to make the result that a tensor is, or is a view of; None where that is not known."""
        if type(x) is not Tensor:  # a tensor that is traced has no storage to speak of
            return None
        found = self._makers.get(x.untyped_storage()._cdata)
        return found if found is not None and found.makes(x) else None

    def _pack(self, x: Tensor) -> Any:
        maker = self.maker(x)
        return x.detach() if maker is None else _Again(maker, x)  # an output that is kept would keep what keeps it


class Maker:
    """Makes a result again, bit for bit and with its storage whole, from `inputs`, which it keeps."""

    def __init__(self, result: Tensor, make: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self.storage = StorageWeakRef(result.untyped_storage())  # for as long as it lives, the address is no other's
        self._version = _version(result)
        self._make, self._inputs = make, inputs
        self._versions = [_version(each) for each in self.inputs]
        self._made: weakref.ref[Tensor] | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors that are kept for it."""
        return [each for each in self._inputs if isinstance(each, Tensor)]

    def makes(self, x: Tensor) -> bool:
        """True if a tensor of the same address is the result yet, and neither it nor an input was written to since."""
        return not self.storage.expired() and _version(x) == self._version and self._inputs_are_same()

    def _inputs_are_same(self) -> bool:
        return [_version(each) for each in self.inputs] == self._versions

    def make(self) -> Tensor:
        """Return the result; the same as before where that is there yet: a function may have saved it twice.

        Raises: RuntimeError where an input was written to since, as autograd does.
        """
        if not self._inputs_are_same():
            raise RuntimeError("what an activation function was given was written to before the backward pass")
        made = None if self._made is None else self._made()
        if made is None:
            with torch.no_grad():
                made = self._make(*self._inputs)
            self._made = weakref.ref(made)
        return made


class _Again:
    """A tensor that is made again when it is asked for."""

    def __init__(self, maker: Maker, x: Tensor) -> None:
        self._maker, self._layout = maker, (x.size(), x.stride(), x.storage_offset())

    def tensor(self) -> Tensor:
        made = self._maker.make()
        layout = (made.size(), made.stride(), made.storage_offset())
        return made if layout == self._layout else made.as_strided(*self._layout)


class Ending:
    """Knows what the last function of a layer has of its first call, so that its product is not computed again.

    Each function that may be the last asks for what is `known`, and offers what it has. keeps: False where nothing may
    be kept, and only a function that needs nothing can leave out its product. kept: tensors of the first call, for
    whoever calls the layer to keep until the second, and to give back to it.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._turn, self._last = 0, -1
        self._again = False
        self.kept: tuple[Tensor, ...] = ()
        self._result: StorageWeakRef | None = None

    @contextmanager
    def active(self, *, again: bool) -> Iterator[None]:
        """Within, the layer is called for the first time, or again."""
        self._turn, self._again = 0, again
        token = _ending.set(self)
        try:
            yield
        finally:
            _ending.reset(token)

    def known(self) -> tuple[Tensor, ...] | None:
        """Return what the function whose turn it is kept, in the second call of the last one; None for all others."""
        self._turn += 1
        return self.kept if self._again and self._turn == self._last else None

    def offer(self, result: Tensor, *kept: Tensor) -> None:
        """Offer what a second call of this function could do with, in the place of what others did before."""
        if not self._again:
            usable = self._keeps or not kept
            self.kept, self._last = (kept, self._turn) if usable else ((), -1)
            self._result = StorageWeakRef(result.untyped_storage())

    def settle(self, results: Iterable[Tensor]) -> None:
        """Forget what was offered unless it is all that the layer gives a gradient to: another function may have read
        it for the rest."""
        found, self._result = self._result, None
        places = {each.untyped_storage()._cdata for each in results if each.requires_grad}
        if found is None or places != {found.cdata}:
            self.kept, self._last = (), -1


def note_maker(result: Tensor, make: Callable[..., Tensor], *inputs: Any) -> None:
    """Tell that `make` of these inputs is a result, where anybody wants to know."""
    active = _remade.get()
    if active is not None:
        active.note(Maker(result, make, tuple(each.detach() if isinstance(each, Tensor) else each for each in inputs)))


def known_ending() -> tuple[Tensor, ...] | None:
    """Return what `Ending.known` does; None outside of any."""
    active = _ending.get()
    return None if active is None else active.known()


def offer_ending(result: Tensor, *kept: Tensor) -> None:
    """Offer as `Ending.offer` does, where there is one."""
    active = _ending.get()
    if active is not None:
        active.offer(result, *kept)


_remade: ContextVar[Remade | None] = ContextVar("brimful_remade", default=None)
_ending: ContextVar[Ending | None] = ContextVar("brimful_ending", default=None)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _unpack(saved: Any) -> Tensor:
    found: Tensor = saved.tensor() if isinstance(saved, _Again) else saved
    return found
