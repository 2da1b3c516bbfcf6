"""Slices that a loop takes of one tensor, position by position, as views that share one gradient.

transformers' scan of Mamba's layers (Jamba, Zamba) reads `states[:, :, position]` in a loop where the package mamba_ssm
is missing. Torch's gradient of a slice is as large as the whole tensor: on rows of 512 tokens 512 such tensors are
filled with zeros and added up, for each of the three that are read so. Taken apart by `unbind`, all but the first have
one gradient, put together once. The numbers are the same where each place is read once: all others that were added are
zeros. Where some layers are compiled all take their slices one by one: torch would trace what looks on.

Parts of `unbind` cannot be changed in place, which the scan does not: torch would refuse it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Functions of transformers that read one tensor by slices in a loop, and change none in place.
_LOOPS = ("mamba_selective_scan",)


def has_loops(model: nn.Module) -> bool:
    """Return whether a module of the model is of a file with such a loop, and no kernel is installed for it."""
    if find_spec("mamba_ssm") is not None:
        return False
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    return any(hasattr(file, name) for file in files for name in _LOOPS)


@contextmanager
def slices_apart() -> Iterator[None]:
    """Within, the second slice of a tensor, at place 1 after place 0 of the same dimension, takes it apart."""
    with _Apart():
        yield


@dataclass
class _Walk:
    """A tensor that was sliced at place 0, its in-place version then, and what it was taken apart into."""

    tensor: weakref.ref[Tensor]
    version: int
    parts: tuple[Tensor, ...] | None = None


class _Apart(TorchFunctionMode):
    """Gives slices by one number, as long as the places follow one another from 0. What is walked to its end is
    forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self._walks: dict[tuple[int, int], _Walk] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__ and args[0].requires_grad:
            dim_and_place = _one_number(args[1], args[0].ndim)
            part = None if dim_and_place is None else self._part(args[0], *dim_and_place)
            if part is not None:
                return part
        return function(*args, **(kwargs or {}))

    def _part(self, tensor: Tensor, dim: int, place: int) -> Tensor | None:
        """The slice; None where torch takes it."""
        key = (id(tensor), dim)
        if place == 0:
            self._walks[key] = _Walk(weakref.ref(tensor), tensor._version)
            return None
        walk = self._walks.get(key)
        if walk is None or walk.tensor() is not tensor or not 0 < place < tensor.shape[dim]:
            return None
        if walk.version != tensor._version:  # torch refuses parts whose whole was written into since
            return None
        if walk.parts is None:
            if place != 1:
                return None
            walk.parts = tensor.unbind(dim)
        if place == tensor.shape[dim] - 1:
            del self._walks[key]
        return walk.parts[place]


def _one_number(index: Any, num_dims: int) -> tuple[int, int] | None:
    """Return dimension and number of an index of one number, all else whole; None for any other."""
    each = index if isinstance(index, tuple) else (index,)
    numbers = [dim for dim, part in enumerate(each) if type(part) is int]
    whole = all(type(part) is int or (isinstance(part, slice) and part == slice(None)) for part in each)
    if len(numbers) != 1 or not whole or len(each) > num_dims:
        return None
    return numbers[0], each[numbers[0]]
