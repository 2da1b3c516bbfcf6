"""The saved state of a step: everything that an exact continuation needs, as a tree that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part `index` of `count`, of tensors that are cut between processes; the whole unless said otherwise."""

    index: int = 0
    count: int = 1


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
            places[key].copy_(value)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class StepState:
    """Weights (fp32 masters) and buffers by their names in the model, optimizer states by parameter, counters.

    groups: what the optimizer keeps of its groups of parameters, as JSON has it. *_shard: the part of each of its
    tensors that is held here.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: Mapping[str, ParameterState]
    counters: Counters
    groups: tuple[Mapping[str, Any], ...] = ()
    weights_shard: Shard = Shard()
    optimizer_shard: Shard = Shard()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; tied weights count once per name, as a checkpoint stores them."""
        groups = [self.weights, self.buffers, *(kept.tensors for kept in self.optimizer.values())]
        return sum(tensor.nbytes for group in groups for tensor in group.values())
