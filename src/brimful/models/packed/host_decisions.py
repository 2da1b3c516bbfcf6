"""Numbers of the device that a model's code reads on the host: recorded in one pass, taken for granted in a capture.

A head that looks for end tokens asks how many there are; a model with global attention asks which tokens have it. In a
batch of the same shape the answer is nearly always the same. A capture is given the answers of the first pass, and
computes on the device whether they are still true. Where one is not, all logits are NaN: the update is skipped on the
device, and the step runs again, eagerly (`step.graphs.captured_step`).

Read are single numbers, counts of nonzero elements, and runs of equal ones; indexing by a mask counts what is in it. An
answer belongs to the line of the model's code that asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: File and line of the model's code that asks.
_Place = tuple[str, int]


class HostDecisions:
    """Answers by shape and place, in the order of their questions."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, dict[_Place, list[Any]]] = {}

    @contextmanager
    def recorded(self, key: Hashable) -> Iterator[None]:
        """Within, a pass answers for its shape, unless one has done so before."""
        if key in self._answers:
            yield
            return
        answers: dict[_Place, list[Any]] = {}

        def answer(ask: Callable[[], Any], _: Any) -> Any:
            found = ask()
            answers.setdefault(_asker(), []).append(found)
            return found

        with _asking(answer):
            yield
        self._answers[key] = answers

    @contextmanager
    def granted(self, key: Hashable) -> Iterator[list[Tensor]]:
        """Within, a pass is given the answers of its shape, and adds to the list that it is given () bools: False where
        one is not true. Raises: RuntimeError where none were recorded, or more is asked."""
        if key not in self._answers:
            raise RuntimeError("no pass over rows of this shape was recorded")
        left = {place: list(answers) for place, answers in self._answers[key].items()}
        truths: list[Tensor] = []

        def answer(_: Callable[[], Any], is_true: Callable[[Any], Tensor]) -> Any:
            if not left.get(place := _asker()):
                raise RuntimeError(f"line {place[1]} of {place[0]} reads more of the device than before")
            found = left[place].pop(0)
            truths.append(is_true(found))
            return found

        with _asking(answer):
            yield truths


#: Packages whose code stands between the model's and what is asked.
_NOT_ASKING = frozenset({"torch", "contextlib"})

#: Given a way to ask the device, and a way to see there whether an answer is true: the answer.
_Answer = Callable[[Callable[[], Any], Callable[[Any], Tensor]], Any]


def _asker() -> _Place:
    """The innermost line that is neither torch's nor of this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals["__name__"].partition(".")[0] in _NOT_ASKING or _is_own(frame)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_own(frame: FrameType) -> bool:
    return bool(frame.f_globals["__name__"] == __name__)


@contextmanager
def _asking(answer: _Answer) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_Reads(answer))
        stack.enter_context(_Masks())
        yield


class _Reads(TorchDispatchMode):
    """Answers what operators ask."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if function is torch.ops.aten._local_scalar_dense.default and given is not None:
            number: Tensor = given
            return self._answer(lambda: function(number), lambda found: (number == found).all())
        if function is torch.ops.aten.nonzero.default and given is not None:
            return _nonzero(given, self._answer)
        if function is torch.ops.aten.unique_consecutive.default and len(args) == 1 and not kwargs:
            return self._unique(args[0])
        return function(*args, **kwargs)

    def _unique(self, values: Tensor) -> Any:
        """Values without repeats, of which there must be one: no others have a shape that is known."""
        flat = values.flatten()
        number = self._answer(
            lambda: int(torch.ops.aten.unique_consecutive(values)[0].numel()), lambda _: (flat == flat[:1]).all()
        )
        if number != 1:
            raise RuntimeError(f"the model's code looks for runs of equal numbers, and finds {number}")
        nothing = values.new_empty(0, dtype=torch.int64)
        return flat[:1].clone(), nothing, nothing.clone()


class _Masks(TorchFunctionMode):
    """Indexing by a mask as indexing by places, above autograd: the gradient asks nothing then."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            return function(args[0], self._places(args[1]))
        if function is Tensor.__setitem__:
            whole = isinstance(args[1], Tensor) and args[1].dtype == torch.bool and args[1].shape == args[0].shape
            if whole and not isinstance(args[2], Tensor):
                args[0].masked_fill_(args[1], args[2])
                return None
            return function(args[0], self._places(args[1]), args[2])
        return function(*args, **(kwargs or {}))

    def _places(self, index: Any) -> Any:
        each = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim for part in each):
            return index
        found: list[Any] = []
        for part in each:
            if isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim:
                found.extend(torch.ops.aten.nonzero.default(part).unbind(1))  # which `_Reads` answers
            else:
                found.append(part)
        return tuple(found)


def _nonzero(values: Tensor, answer: _Answer) -> Tensor:
    """(K, D) places of the nonzero elements, in order; K is asked for, and no more are looked for."""
    is_there = (values != 0).flatten()
    count = is_there.sum()
    number = answer(lambda: int(torch.ops.aten._local_scalar_dense(count)), lambda found: count == found)
    places = torch.arange(len(is_there), device=values.device)
    # The last place takes what is not there, and what there is too much of.
    rank = torch.where(is_there, is_there.cumsum(0) - 1, number).clamp(max=number)
    flat = places.new_zeros(number + 1).scatter_(0, rank, places)[:number]
    columns, size = [], values.shape
    for length in reversed(size):
        columns.append(flat % length)
        flat = flat // length
    return torch.stack(columns[::-1], 1) if columns else flat.new_zeros(number, 0)
