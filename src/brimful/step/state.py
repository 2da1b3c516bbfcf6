"""The saved state of a step: everything that an exact continuation needs, as a tree that a checkpoint can hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """The place of one process's part in a tensor of `shape`.

    starts: where it begins, along each dimension; one number for several dimensions: in the flat tensor.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]

    def holds(self, part: Tensor) -> bool:
        """True if the part lies within the whole tensor."""
        flat = len(self.starts) != len(self.shape)
        shape = (math.prod(self.shape),) if flat else self.shape
        ends = [start + size for start, size in zip(self.starts, part.shape, strict=False)]
        return part.ndim == len(shape) == len(self.starts) and all(e <= s for e, s in zip(ends, shape, strict=True))

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Put the part into the whole tensor, which is contiguous."""
        into = whole.view(-1) if len(self.starts) != len(self.shape) else whole
        into[tuple(slice(start, start + size) for start, size in zip(self.starts, part.shape, strict=True))] = part


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterState:
    """An optimizer's state of one parameter.

    tensors: of any device. values: all else, as JSON has it. on_host: names of the tensors that are kept in host memory
    while the parameter is on a device.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    on_host: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any], parameter: Tensor) -> ParameterState:
        """State of a parameter in torch's optimizers, as one dictionary."""
        tensors = dict(_plain(state))
        on_host = (key for key, value in tensors.items() if value.device.type == "cpu" != parameter.device.type)
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        return cls(tensors=tensors, values=values, on_host=tuple(on_host))

    def restored(self, parameter: Tensor) -> dict[str, Any]:
        """The dictionary again, of copies where an optimizer of `parameter` keeps them."""
        tensors = {
            key: value.to("cpu" if key in self.on_host else parameter.device, copy=True)
            for key, value in self.tensors.items()
        }
        return tensors | dict(self.values)

    def fill(self, state: dict[str, Any]) -> None:
        """Put it in the place of what an optimizer's own step has made."""
        places = dict(_plain(state))
        for key, value in self.tensors.items():
            if key in places:
                places[key].copy_(value)
            else:  # a count that the optimizer has on the host, and another form of it on the device
                state[key] = type(state[key])(value.item())
        state.update(self.values)


def _plain(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a dictionary by name, and by `name/part` those that a tensor of a class of its own is made of."""
    for name, value in tensors.items():
        if is_traceable_wrapper_subclass(value):
            parts, _ = value.__tensor_flatten__()
            for part, tensor in _plain({part: getattr(value, part) for part in parts}):
                yield f"{name}/{part}", tensor
        elif isinstance(value, Tensor):
            yield name, value


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Applied steps, the loss scale and its good steps in a row, and names of the parameters that were ever used.

    batches: run so far, in a loop that leaves it to the step to number them.
    """

    applied: int
    scale: float
    growth: int
    used: tuple[str, ...]
    batches: int = 0


class _Wholes(Mapping[str, Tensor]):
    """Whole tensors by name, each put together when it is asked for: memory need not hold all of them.

    pieces: of each. A tensor without a place is whole.
    """

    def __init__(self, pieces: Mapping[str, Sequence[tuple[Part | None, Tensor]]]) -> None:
        self._pieces = pieces

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        place, first = pieces[0]
        if place is None:
            return first
        whole = torch.empty(place.shape, dtype=first.dtype)
        for part, tensor in pieces:
            assert part is not None
            part.put(tensor.to("cpu"), whole)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._pieces  # without putting it together

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all, which are put together for none."""
        return {
            name: tuple(first.shape if place is None else place.shape)
            for name, ((place, first), *_) in self._pieces.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepState:
    """Weights (fp32 masters) and buffers by their names in the model, optimizer states by parameter, counters.

    groups: what the optimizer keeps of its groups of parameters, as JSON has it. parts: places of those tensors that
    are one process's parts, by names as of `tensors`; all others are whole.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: Mapping[str, ParameterState]
    counters: Counters
    groups: tuple[Mapping[str, Any], ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and optimizer states, as `weights/NAME` and `optimizer/NAME/KEY`."""
        for name, tensor in self.weights.items():
            yield f"weights/{name}", tensor
        for name, kept in self.optimizer.items():
            for key, tensor in kept.tensors.items():
                yield f"optimizer/{name}/{key}", tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of weights and buffers, by name."""
        weights = self.weights
        found = weights.shapes() if isinstance(weights, _Wholes) else {n: tuple(t.shape) for n, t in weights.items()}
        return found | {name: tuple(tensor.shape) for name, tensor in self.buffers.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; tied weights count once per name, as a checkpoint stores them."""
        groups = [self.weights, self.buffers, *(kept.tensors for kept in self.optimizer.values())]
        return sum(tensor.nbytes for group in groups for tensor in group.values())


def whole_of(states: Sequence[StepState]) -> StepState:
    """Put together the states that all processes have of one step, each tensor when it is asked for: what is no part is
    the first's.

    Raises: ValueError where numbers are missing, or are of another tensor.
    """
    first = states[0]
    if not any(state.parts for state in states):
        return first
    if any(state.counters != first.counters for state in states):
        raise ValueError("parts are of several steps")
    pieces = defaultdict[str, list[tuple[Part | None, Tensor]]](list)
    for state in states:
        for name, tensor in state.tensors():
            part = state.parts.get(name)
            if part is not None or name not in pieces:
                pieces[name].append((part, tensor))
    for name, found in pieces.items():
        _check(name, found)
    optimizer = {}
    for name in dict.fromkeys(name for state in states for name in state.optimizer):
        kept = [state.optimizer[name] for state in states if name in state.optimizer]
        keys = dict.fromkeys(key for each in kept for key in each.tensors)
        optimizer[name] = replace(kept[0], tensors=_Wholes({key: pieces[f"optimizer/{name}/{key}"] for key in keys}))
    names = dict.fromkeys(name for state in states for name in state.weights)
    weights = _Wholes({name: pieces[f"weights/{name}"] for name in names})
    return replace(first, weights=weights, optimizer=optimizer, parts={})


def _check(name: str, pieces: Sequence[tuple[Part | None, Tensor]]) -> None:
    """Raises: ValueError where the pieces do not make one tensor."""
    place, first = pieces[0]
    if place is None:
        return
    for part, tensor in pieces:
        if part is None or part.shape != place.shape or tensor.dtype != first.dtype or not part.holds(tensor):
            raise ValueError(f"parts of {name} are of several tensors")
    if sum(tensor.numel() for _, tensor in pieces) != math.prod(place.shape):
        raise ValueError(f"parts of {name} are missing")
