"""Questions of a model's code on the host about numbers of the device, and what it copies there, as a pass asks them.

Read are single numbers, lists of them, counts of nonzero elements, and runs of equal ones; indexing by a mask counts
what is in it. `host_decisions` answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: File and line of the model's code that asks, or copies.
Place = tuple[str, int]


class HostNeededError(RuntimeError):
    """A pass looks at numbers of the device, or copies the host's own there, and nothing was recorded of it."""


class Source(Protocol):
    """Answers of one pass, and its constants."""

    def answer(self, ask: Callable[[], Any], is_true: Callable[[Any], Tensor]) -> Any:
        """Answer to what `ask` would ask the device. is_true: tells on the device if an answer is."""
        ...

    def constant(self, values: Tensor, device: torch.device) -> Tensor:
        """Values of the host on the device."""
        ...

    def keep_mask(self) -> None:
        """Take note that a mask may have been left out."""
        ...


def said(place: Place) -> str:
    """A place in words."""
    file, number = place
    return f"line {number} of {Path(file).name}"


#: The file of transformers that makes masks.
_MASKS = str(Path("transformers", "masking_utils.py"))
#: Packages whose code stands between the model's and what is asked.
_NOT_ASKING = frozenset({"torch", "contextlib"})
#: This module, and the one that answers.
_ANSWERING = frozenset({__name__, "brimful.models.packed.host_decisions"})


def asker() -> Place:
    """The innermost line that is neither torch's nor of what asks and answers here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals["__name__"].partition(".")[0] in _NOT_ASKING or _is_own(frame)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_own(frame: FrameType) -> bool:
    return frame.f_globals["__name__"] in _ANSWERING


class Modes:
    """All operators and functions of a pass, as `source` answers them."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source = source
        self._modes: tuple[Any, ...] = (_Operators(source, device), _Functions(device))

    def enter(self) -> None:
        """From now on."""
        for mode in self._modes:
            mode.__enter__()

    def leave(self) -> None:
        """Until now."""
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)


aten = torch.ops.aten


class _Operators(TorchDispatchMode):
    """Answers what operators ask, and sees what they copy."""

    def __init__(self, source: Source, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source, self._device = source, device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if self._device.type != "cpu":
            if function is aten._to_copy.default and given is not None and self._leaves_host(given, kwargs):
                sent = self._source.constant(given, self._device)
                return function(sent, **kwargs)
            args = self._with_constants(function, args)
        if given is None or given.device.type != self._device.type:
            return function(*args, **kwargs)
        if function is aten._local_scalar_dense.default:
            number: Tensor = given
            if number.dtype == torch.bool and asker()[0].endswith(_MASKS):
                self._source.keep_mask()
                return False
            return self._source.answer(lambda: function(number), lambda found: (number == found).all())
        if function is aten.nonzero.default:
            return _nonzero(given, self._source)
        if function is aten.unique_consecutive.default and len(args) == 1 and not kwargs:
            return self._unique(given)
        return function(*args, **kwargs)

    def _leaves_host(self, given: Tensor, kwargs: dict[str, Any]) -> bool:
        to = kwargs.get("device")
        return given.device.type == "cpu" and to is not None and torch.device(to).type == self._device.type

    def _with_constants(self, function: Any, args: Any) -> Any:
        """Arguments that the operator would copy to the device, there."""
        if function is aten.copy_.default and args[0].device.type == self._device.type:
            return (args[0], self._sent(args[1]), *args[2:])
        if function in _INDEXING and args[0].device.type == self._device.type:
            indices = [None if index is None else self._sent(index) for index in args[1]]
            return (args[0], indices, *(self._sent(value) for value in args[2:3]), *args[3:])
        if function is aten.where.self and args[0].device.type == self._device.type:
            return tuple(self._sent(value) for value in args)
        return args

    def _sent(self, values: Tensor) -> Tensor:
        return self._source.constant(values, self._device) if values.device.type == "cpu" else values

    def _unique(self, values: Tensor) -> Any:
        """Values without repeats, of which there must be one: no others have a shape that is known."""
        flat = values.flatten()
        number = self._source.answer(
            lambda: int(aten.unique_consecutive(values)[0].numel()), lambda _: (flat == flat[:1]).all()
        )
        if number != 1:
            raise HostNeededError(f"the model's code looks for runs of equal numbers, and finds {number}")
        nothing = values.new_empty(0, dtype=torch.int64)
        return flat[:1].clone(), nothing, nothing.clone()


#: Operators that take places, and values for them, from either side.
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
#: Functions that make a tensor of Python's numbers on the host, and copy it to the device.
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


class _Functions(TorchFunctionMode):
    """Functions that hide what they ask or copy from operators' modes, as others that do not.

    Indexing by a mask is indexing by places, above autograd: the gradient asks nothing then. Tensors of Python's
    numbers are made on the host, and then copied.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.__getitem__:
            return function(args[0], self._places(args[0], args[1]))
        if function is Tensor.__setitem__:
            whole = self._is_mask(args[1]) and args[1].shape == args[0].shape
            if whole and not isinstance(args[2], Tensor):
                args[0].masked_fill_(args[1], args[2])
                return None
            places = self._places(args[0], args[1])
            return function(args[0], places, self._value(args[0], places, args[2]))
        if function is Tensor.tolist and args[0].device.type == self._device.type and args[0].numel() <= _MOST_LISTED:
            return _listed(args[0])
        if self._device.type == "cpu" or kwargs.get("requires_grad"):
            return function(*args, **kwargs)
        if function in _OF_NUMBERS and args and _of_host(args[0]) and kwargs.get("device") is not None:
            return function(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if function is Tensor.new_tensor and len(args) > 1 and _of_host(args[1]):
            to, kind = kwargs.get("device", args[0].device), kwargs.get("dtype", args[0].dtype)
            return torch.tensor(args[1], dtype=kind).to(to)
        return function(*args, **kwargs)

    def _is_mask(self, index: Any) -> bool:
        boolean = isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim > 0
        return boolean and bool(index.device.type == self._device.type)

    def _value(self, indexed: Tensor, places: Any, value: Any) -> Any:
        """Return, on the device, the value for these places: a number of the host would be copied there once in the
        forward pass, and once more in the backward pass, where autograd fills the places with zeros like it."""
        each = places if isinstance(places, tuple) else (places,)
        on_device = self._device.type != "cpu" and indexed.device.type == self._device.type
        if not on_device or not any(isinstance(part, Tensor) for part in each) or not _of_host(value):
            return value
        return torch.as_tensor(value, dtype=indexed.dtype).to(indexed.device)

    def _places(self, indexed: Tensor, index: Any) -> Any:
        """The same index without masks, nor numbers of the host beside a tensor of the device."""
        each = index if isinstance(index, tuple) else (index,)
        copies = self._device.type != "cpu" and indexed.device.type == self._device.type
        found: list[Any] = []
        for part in map(_numbers, each) if copies else each:
            is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim > 0
            if is_mask and (copies or self._is_mask(part)):
                found.extend(aten.nonzero.default(part).unbind(1))  # which `_Operators` answers
            else:
                found.append(part)
        if copies:
            found = [part.to(indexed.device) if isinstance(part, Tensor) and part.ndim else part for part in found]
        return tuple(found) if len(found) > 1 or isinstance(index, tuple) else found[0]


#: Numbers of a list that are taken for granted, each by itself; of longer ones a capture is refused.
_MOST_LISTED = 64


def _listed(values: Tensor) -> Any:
    """Numbers as `Tensor.tolist` has them, each read by itself, which operators' modes see."""
    return [_listed(part) for part in values.unbind()] if values.ndim else values.item()


def _of_host(values: Any) -> bool:
    return not isinstance(values, Tensor) or values.device.type == "cpu"


def _numbers(part: Any) -> Any:
    """Lists in an index as tensors of the host; else the part itself."""
    return torch.tensor(part) if isinstance(part, list | np.ndarray) else part


def _nonzero(values: Tensor, source: Source) -> Tensor:
    """(K, D) places of the nonzero elements, in order; K is asked for, and no more are looked for."""
    is_there = (values != 0).flatten()
    count = is_there.sum()
    number = source.answer(lambda: int(aten._local_scalar_dense(count)), lambda found: count == found)
    places = torch.arange(len(is_there), device=values.device)
    # The last place takes what is not there, and what there is too much of.
    rank = torch.where(is_there, is_there.cumsum(0) - 1, number).clamp(max=number)
    flat = places.new_zeros(number + 1).scatter_(0, rank, places)[:number]
    columns, size = [], values.shape
    for length in reversed(size):
        columns.append(flat % length)
        flat = flat // length
    return torch.stack(columns[::-1], 1) if columns else flat.new_zeros(number, 0)
