"""Numbers that a model's code reads of the device on the host, or makes there and copies to the device: recorded in one
pass, taken for granted in a capture, which allows neither.

A head that looks for end tokens asks how many there are; a model with global attention asks which tokens have it. In a
batch of the same shape the answer is nearly always the same. A capture is given the answers of the first pass, and
computes on the device whether they are still true. Where one is not, all logits are NaN: the update is skipped on the
device, and the step runs again, eagerly (`step.graphs.captured_step`); so do rows that are only read
(`step.graphs.captured_forward`).

Read are single numbers, lists of them, counts of nonzero elements, and runs of equal ones; indexing by a mask counts
what is in it. An answer belongs to the line of the model's code that asks.

transformers asks of each mask whether it can be left out, but in a capture, where it is always made: here it is told
no, so that the pass that is recorded has the form of the capture.

Constants, such as a mask's zero or a table of positions, stay on the device from the first pass on. A capture makes
them on the host once more, and is refused where they are other ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: File and line of the model's code that asks, or copies.
_Place = tuple[str, int]
#: Values of a constant, and the same on the device.
_Constant = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Recorded:
    """Answers and constants of one shape by place, in their order; masks: places that ask if one can be left out."""

    answers: dict[_Place, list[Any]] = field(default_factory=dict)
    constants: dict[_Place, list[_Constant]] = field(default_factory=dict)
    masks: list[_Place] = field(default_factory=list)


class HostNeededError(RuntimeError):
    """A pass looks at numbers of the device, or copies the host's own there, and nothing was recorded of it."""


class HostDecisions:
    """Answers and constants by shape and place.

    device: that of the model. On the CPU nothing is copied, and all tensors are its own.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008  (it is a constant)
        self.device = device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._modes: _Modes | None = None

    def forget(self) -> None:
        """Have the next pass of each shape answer for it again."""
        self._recorded.clear()

    @property
    def grants(self) -> bool:
        """True if something is taken for granted that may not be true of another batch."""
        return any(recorded.answers for recorded in self._recorded.values())

    @property
    def asked_of_masks(self) -> bool:
        """True if a pass that was recorded asks whether masks can be left out, and is told no here."""
        return any(recorded.masks for recorded in self._recorded.values())

    def on(self, device: torch.device) -> HostDecisions:
        """The same answers for a model on another device, without constants."""
        moved = HostDecisions(device)
        moved._recorded = {key: _Recorded(recorded.answers) for key, recorded in self._recorded.items()}
        return moved

    @contextmanager
    def recorded(self, key: Hashable) -> Iterator[None]:
        """Within, a pass answers for its shape, unless one has done so before."""
        if key in self._recorded:
            yield
            return
        recording = _Recording(_Recorded())
        with self._active(recording):
            yield
        self._recorded[key] = recording.found

    @contextmanager
    def granted(self, key: Hashable) -> Iterator[list[Tensor]]:
        """Within, a pass is given the answers and constants of its shape, and adds to the list that it is given ()
        bools: False where an answer is not true.

        Raises: HostNeededError where none were recorded, or more is asked, or a constant is another one.
        """
        if key not in self._recorded:
            raise HostNeededError("no pass over rows of this shape was recorded")
        granting = _Granting(self._recorded[key])
        with self._active(granting):
            yield granting.truths

    @contextmanager
    def traced(self, key: Hashable) -> Iterator[None]:
        """Within, a pass without numbers is given the answers of its shape, and constants as empty memory; while paused
        it is refused both."""
        with self._active(_Tracing(self._recorded.get(key, _Recorded()))):
            yield

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Within, a pass that asks or copies raises `HostNeededError`."""
        with self._active(_Refusing()):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, the pass decides for itself again: torch compiles nothing where somebody looks on."""
        modes = self._modes
        if modes is None:
            yield
            return
        self._modes = None
        modes.leave()
        try:
            with self.refused() if isinstance(modes.source, _Tracing) else nullcontext():
                yield
        finally:
            modes.enter()
            self._modes = modes

    @contextmanager
    def _active(self, source: _Source) -> Iterator[None]:
        self._modes = modes = _Modes(source, self.device)
        modes.enter()
        try:
            yield
        finally:
            modes.leave()
            self._modes = None


class _Source(Protocol):
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


class _Recording:
    def __init__(self, found: _Recorded) -> None:
        self.found = found

    def answer(self, ask: Callable[[], Any], _: Callable[[Any], Tensor]) -> Any:
        found = ask()
        self.found.answers.setdefault(_asker(), []).append(found)
        return found

    def constant(self, values: Tensor, device: torch.device) -> Tensor:
        on_device = values.to(device)
        self.found.constants.setdefault(_asker(), []).append((values.clone(), on_device))
        return on_device.clone()  # which may be written to

    def keep_mask(self) -> None:
        self.found.masks.append(_asker())


class _Granting:
    def __init__(self, recorded: _Recorded) -> None:
        self._answers = {place: list(answers) for place, answers in recorded.answers.items()}
        self._constants = {place: list(constants) for place, constants in recorded.constants.items()}
        self.truths: list[Tensor] = []

    def answer(self, _: Callable[[], Any], is_true: Callable[[Any], Tensor]) -> Any:
        if not self._answers.get(place := _asker()):
            raise HostNeededError(f"{_said(place)} reads more of the device than before")
        found = self._answers[place].pop(0)
        self.truths.append(is_true(found))
        return found

    def constant(self, values: Tensor, _: torch.device) -> Tensor:
        if not self._constants.get(place := _asker()):
            raise HostNeededError(f"{_said(place)} copies more to the device than before")
        before, on_device = self._constants[place].pop(0)
        if before.dtype != values.dtype or not torch.equal(before, values):
            raise HostNeededError(f"{_said(place)} copies other numbers to the device than before")
        return on_device.clone()

    def keep_mask(self) -> None: ...


class _Tracing(_Granting):
    def constant(self, values: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(values, device=device)


class _Refusing:
    def answer(self, _: Callable[[], Any], __: Callable[[Any], Tensor]) -> Any:
        raise HostNeededError(f"the host must look at numbers of the device in each pass ({_said(_asker())})")

    def constant(self, _: Tensor, __: torch.device) -> Tensor:
        raise HostNeededError(f"numbers of the host are copied to the device in each pass ({_said(_asker())})")

    def keep_mask(self) -> None: ...


def _said(place: _Place) -> str:
    file, number = place
    return f"line {number} of {Path(file).name}"


#: The file of transformers that makes masks.
_MASKS = str(Path("transformers", "masking_utils.py"))
#: Packages whose code stands between the model's and what is asked.
_NOT_ASKING = frozenset({"torch", "contextlib"})


def _asker() -> _Place:
    """The innermost line that is neither torch's nor of this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals["__name__"].partition(".")[0] in _NOT_ASKING or _is_own(frame)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_own(frame: FrameType) -> bool:
    return bool(frame.f_globals["__name__"] == __name__)


class _Modes:
    """All operators and functions of a pass, as `source` answers them."""

    def __init__(self, source: _Source, device: torch.device) -> None:
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

    def __init__(self, source: _Source, device: torch.device) -> None:
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
            if number.dtype == torch.bool and _asker()[0].endswith(_MASKS):
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


def _nonzero(values: Tensor, source: _Source) -> Tensor:
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
