"""Numbers that a model's code reads of the device on the host, or makes there and copies to the device: recorded in one
pass, taken for granted in a capture, which allows neither.

A head that looks for end tokens asks how many there are; a model with global attention asks which tokens have it. In a
batch of the same shape the answer is nearly always the same. A capture is given the answers of the first pass, and
computes on the device whether they are still true. Where one is not, all logits are NaN: the update is skipped on the
device, and the step runs again, eagerly (`step.graphs.captured_step`); so do rows that are only read
(`step.graphs.captured_forward`).

An answer belongs to the line of the model's code that asks (`host_questions`).

transformers asks of each mask whether it can be left out, but in a capture, where it is always made: here it is told
no, so that the pass that is recorded has the form of the capture.

A layer that is computed again in the backward pass asks once more, of the same numbers: it is given what its first call
was given. Where it decides otherwise in the pass that is recorded, no answer of that pass is taken to be true.

Constants, such as a mask's zero or a table of positions, stay on the device from the first pass on. A capture makes
them on the host once more, and is refused where they are other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brimful.models.packed.host_questions import HostNeededError, Modes, Place, Source, asker, said

#: Values of a constant, and the same on the device.
_Constant = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Recorded:
    """Answers and constants of one shape, or of one layer's call, by place, in their order.

    masks: places that ask if one can be left out. changed: those that a layer's second call has other answers at.
    """

    answers: dict[Place, list[Any]] = field(default_factory=dict)
    constants: dict[Place, list[_Constant]] = field(default_factory=dict)
    masks: list[Place] = field(default_factory=list)
    changed: list[Place] = field(default_factory=list)

    def note(self, place: Place, answer: Any) -> None:
        """One more answer."""
        self.answers.setdefault(place, []).append(answer)

    def note_constant(self, place: Place, constant: _Constant) -> None:
        """One more constant."""
        self.constants.setdefault(place, []).append(constant)


class HostDecisions:
    """Answers and constants by shape and place.

    device: that of the model. On the CPU nothing is copied, and all tensors are its own.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008  (it is a constant)
        self.device = device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._modes: Modes | None = None

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
        recorded = self._recorded[key]
        granting = _Granting(recorded)
        if recorded.changed:
            granting.truths.append(torch.zeros((), dtype=torch.bool, device=self.device))
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

    def of_both_calls(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what both calls of a layer run within that is computed again once the forward pass is over."""
        return partial(self._one_of_both, _BothCalls())

    @contextmanager
    def _one_of_both(self, calls: _BothCalls) -> Iterator[None]:
        """Within, the first call is made while its pass is answered, the second one afterwards."""
        source = None if self._modes is None else self._modes.source
        if isinstance(source, _Answers):
            calls.recorded = source.found if isinstance(source, _Recording) else None
            calls.first = _Recorded()
            source.layers.append(calls.first)
            try:
                yield
            finally:
                source.layers.pop()
        elif calls.first is not None:
            first, recorded = calls.first, calls.recorded
            with self._active(_Granting(first) if recorded is None else _Comparing(first, recorded)):
                yield
        else:
            yield

    @contextmanager
    def _active(self, source: Source) -> Iterator[None]:
        self._modes = modes = Modes(source, self.device)
        modes.enter()
        try:
            yield
        finally:
            modes.leave()
            self._modes = None


@dataclass
class _BothCalls:
    """Answers that a layer was given at its first call. recorded: those of its pass, for the second to be compared."""

    first: _Recorded | None = None
    recorded: _Recorded | None = None


class _Answers:
    """Answers of one pass. layers: what those that are running were given, and will be again."""

    def __init__(self) -> None:
        self.layers: list[_Recorded] = []

    def keep_mask(self) -> None:
        """Unless overridden, a mask needs no note."""


class _Recording(_Answers):
    def __init__(self, found: _Recorded) -> None:
        super().__init__()
        self.found = found

    def answer(self, ask: Callable[[], Any], _: Callable[[Any], Tensor]) -> Any:
        found, place = ask(), asker()
        for each in (self.found, *self.layers):
            each.note(place, found)
        return found

    def constant(self, values: Tensor, device: torch.device) -> Tensor:
        on_device, place = values.to(device), asker()
        for each in (self.found, *self.layers):
            each.note_constant(place, (values.clone(), on_device))
        return on_device.clone()  # which may be written to

    def keep_mask(self) -> None:
        self.found.masks.append(asker())


class _Granting(_Answers):
    def __init__(self, recorded: _Recorded) -> None:
        super().__init__()
        self._answers = {place: list(answers) for place, answers in recorded.answers.items()}
        self._constants = {place: list(constants) for place, constants in recorded.constants.items()}
        self.truths: list[Tensor] = []

    def answer(self, _: Callable[[], Any], is_true: Callable[[Any], Tensor]) -> Any:
        if not self._answers.get(place := asker()):
            raise HostNeededError(f"{said(place)} reads more of the device than before")
        found = self._answers[place].pop(0)
        self.truths.append(is_true(found))
        for each in self.layers:
            each.note(place, found)
        return found

    def constant(self, values: Tensor, _: torch.device) -> Tensor:
        if not self._constants.get(place := asker()):
            raise HostNeededError(f"{said(place)} copies more to the device than before")
        before, on_device = self._constants[place].pop(0)
        if before.dtype != values.dtype or not torch.equal(before, values):
            raise HostNeededError(f"{said(place)} copies other numbers to the device than before")
        for each in self.layers:
            each.note_constant(place, (before, on_device))
        return on_device.clone()


class _Comparing(_Answers):
    """Asks the device, and notes in `found` where a layer's second call is answered otherwise than its first."""

    def __init__(self, first: _Recorded, found: _Recorded) -> None:
        super().__init__()
        self._answers = {place: list(answers) for place, answers in first.answers.items()}
        self._found = found

    def answer(self, ask: Callable[[], Any], _: Callable[[Any], Tensor]) -> Any:
        found, place = ask(), asker()
        before = self._answers.get(place)
        if not before or not _same(before.pop(0), found):
            self._found.changed.append(place)
        return found

    def constant(self, values: Tensor, device: torch.device) -> Tensor:
        return values.to(device)


def _same(one: Any, other: Any) -> bool:
    """Return whether two answers are equal; what is no number is equal to itself."""
    return bool(one == other) or (one != one and other != other)


class _Tracing(_Granting):
    def constant(self, values: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(values, device=device)


class _Refusing(_Answers):
    def answer(self, _: Callable[[], Any], __: Callable[[Any], Tensor]) -> Any:
        raise HostNeededError(f"the host must look at numbers of the device in each pass ({said(asker())})")

    def constant(self, _: Tensor, __: torch.device) -> Tensor:
        raise HostNeededError(f"numbers of the host are copied to the device in each pass ({said(asker())})")
