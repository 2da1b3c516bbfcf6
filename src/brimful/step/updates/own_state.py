"""The state of an update whose processes have a part each of its weights and moments, as one of them saves it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from brimful.step.reduce.scattered import Segment
from brimful.step.state import Counters, ParameterState, Part, StepState


class Own(NamedTuple):
    """One parameter, or a process's part of it. place: None of what is whole. moments: none if it is not used yet."""

    name: str
    weight: Tensor
    place: Part | None
    moments: Mapping[str, Tensor]


def owned(
    segments: Iterable[Segment], named: Mapping[str, Tensor], weight_of: Callable[[Segment], Tensor],
    moments: Mapping[str, Tensor], used: Collection[str],
) -> Iterator[Own]:  # fmt: skip
    """Return what a process has of each parameter that a segment of is its own. moments: of all segments, by key.
    used: names of parameters that have moments."""
    names = list(named)
    for each in segments:
        name = names[each.index]
        place = Part(shape=tuple(named[name].shape), starts=(each.at.start,))
        kept = {key: moment[each.own] for key, moment in moments.items()} if name in used else {}
        yield Own(name, weight_of(each), place, kept)


def own_state(
    own: Iterable[Own], steps: Mapping[str, Tensor], model: nn.Module, counters: Counters, *, leads: bool
) -> StepState:
    """Return the state of one process. steps: of each used parameter. The first gives what all processes have alike."""
    weights: dict[str, Tensor] = {}
    tensors: dict[str, dict[str, Tensor]] = {name: {"step": step} for name, step in steps.items()} if leads else {}
    parts: dict[str, Part] = {}
    for each in own:
        if each.place is None and not leads:
            continue
        weights[each.name] = each.weight.detach()
        if each.moments:
            tensors.setdefault(each.name, {}).update(each.moments)
        if each.place is not None:
            parts[f"weights/{each.name}"] = each.place
            parts |= {f"optimizer/{each.name}/{key}": each.place for key in each.moments}
    return StepState(
        weights=weights,
        buffers=dict(model.named_buffers()) if leads else {},
        optimizer={name: ParameterState(tensors=kept) for name, kept in tensors.items()},
        counters=counters,
        parts=parts,
    )
