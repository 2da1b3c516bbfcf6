"""Calls of a layer, by what they give to it: what a recording of one has to follow, and what tells it from others'."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from brimful.kernels.layout import Segments
from brimful.models.fusion.nodes import TOKENS

#: Types of values that say all that there is of them.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


#: The same, of which most values are, found faster.
_COMMON = frozenset(PLAIN)


class CannotRecordError(Exception):
    """A layer that a recording does not show."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers that a recording is made of.

    tokens, longest: of a row, and of its longest segment, 0 where they are what they are. others: lengths of vectors of
    anything but tokens.
    """

    tokens: int = 0
    longest: int = 0
    others: int = 0

    def is_made_of(self, number: int) -> bool:
        """Return whether a number can only be a multiple of these: they are large primes then."""
        return any(size > _LARGE and number % size == 0 for size in (self.tokens, self.longest, self.others))


_LARGE = 1_000_000
#: A row of any size is recorded three times: large, small and odd, and even as token budgets are.
ANY = (
    Sizes(tokens=TOKENS, longest=3_000_017, others=4_000_037),
    Sizes(tokens=31, longest=29, others=37),
    Sizes(tokens=176, longest=112, others=52),
)
#: Of layers whose shapes are fixed.
AS_THEY_ARE = (Sizes(),)


class Call:
    """A call of a layer, by what it gives. Raises: CannotRecordError for anything but tensors and plain values.

    given: arguments, named ones, and what attention is told. tensors: each once. longest: the longest segment's length,
    if there are any. tokens: of its row, 0 where shapes are fixed. shown: all by which its recording is another's.
    """

    def __init__(self, given: Any, *, fixed: bool) -> None:
        self.given, self._tensors, self._longest = given, dict[int, tuple[int, Tensor]](), set[int]()
        shown = self._show(given)
        self.tensors, self.longest = [tensor for _, tensor in self._tensors.values()], list(self._longest)
        rows = (t for t in self.tensors if t.ndim > 1 and t.shape[0] == 1)
        self.tokens = 0 if fixed else next((row.shape[1] for row in rows), 0)
        others = any(type(t) not in (Tensor, nn.Parameter) for t in self.tensors)
        if not self.tensors or others or len(self.longest) > 1 or (not fixed and self.tokens < 2):
            raise CannotRecordError
        self.device = self.tensors[0].device.type
        free = Sizes() if fixed else Sizes(tokens=-1, others=-1)
        kinds = tuple((t.dtype, t.device, t.requires_grad, self._shape(t, free, by_length=False)) for t in self.tensors)
        self.shown = (shown, kinds)

    def _show(self, value: Any) -> Any:
        """Return what is shown of an argument: of a tensor its place."""
        kind: Any = type(value)
        if kind in _COMMON:
            return kind, value
        if isinstance(value, Tensor):
            return self._tensors.setdefault(id(value), (len(self._tensors), value))[0]
        if isinstance(value, PLAIN):
            return kind, value
        if isinstance(value, list | tuple):
            return kind, *map(self._show, value)
        if isinstance(value, dict):
            return dict, *((name, self._show(each)) for name, each in value.items())
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise CannotRecordError
        found = [getattr(value, name) for name in _names_of_fields(kind)]
        if isinstance(value, Segments):
            self._longest.add(value.max_length)
            found[_names_of_fields(kind).index("max_length")] = 0
        return kind, *map(self._show, found)

    def _shape(self, tensor: Tensor, sizes: Sizes, *, by_length: bool = True) -> tuple[int, ...]:
        """The shape of (1, T, ...) or of a vector with other sizes; any other shape as it is.

        by_length: whether a vector with as many numbers as there are tokens has one of each.
        """
        shape = list(tensor.shape)
        if not self.tokens:
            return tuple(shape)
        if len(shape) == 1:
            return (sizes.tokens if by_length and shape[0] == self.tokens else sizes.others,)
        if len(shape) > 1 and shape[:2] == [1, self.tokens]:
            shape[1] = sizes.tokens
        return tuple(shape)

    def empty(self, sizes: Sizes) -> dict[int, Tensor]:
        """Tensors of these sizes in the place of its own."""
        found = {}
        for each in self.tensors:
            made = torch.empty(self._shape(each, sizes), dtype=each.dtype, device=each.device)
            # No leaf: layers may add to it in place.
            found[id(each)] = made.requires_grad_(True).clone() if each.requires_grad else made
        return found

    def over(self, made: dict[int, Tensor], sizes: Sizes) -> Any:
        """The given arguments with other tensors."""
        return self._over(self.given, made, sizes)

    def _over(self, value: Any, made: dict[int, Tensor], sizes: Sizes) -> Any:
        if isinstance(value, Tensor):
            return made[id(value)]
        if isinstance(value, list | tuple):
            return type(value)([self._over(each, made, sizes) for each in value])
        if isinstance(value, dict):
            return {name: self._over(each, made, sizes) for name, each in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            fields = {name: self._over(each, made, sizes) for name, each in fields.items()}
            fields |= {"max_length": sizes.longest} if isinstance(value, Segments) and sizes.longest else {}
            return dataclasses.replace(value, **fields)
        return value


@cache
def _names_of_fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
