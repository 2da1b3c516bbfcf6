"""Buffers that a model's code replaces in its pass, as I-BERT does the ranges of its activations.

What replaces them is written where they were, which is where a graph reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brimful.models.packed.host_decisions import HostNeededError

#: A module's buffers, the name of one of them, and what it was before the pass.
Place = tuple[dict[str, Tensor | None], str, Tensor]


def places_of(model: nn.Module) -> list[Place]:
    """Return the places of a model's buffers, as they are now."""
    every = [(module._buffers, name) for module in model.modules() for name in module._buffers]
    return [(holder, name, found) for holder, name in every if (found := holder[name]) is not None]


def replaced(places: list[Place]) -> list[tuple[Place, Tensor]]:
    """Return those that hold another tensor since, with it."""
    found = [(place, place[0].get(place[1])) for place in places]
    return [(place, now) for place, now in found if now is not None and now is not place[2]]


def write_back(places: list[Place], *, if_true: Tensor | None = None) -> None:
    """Write what replaced a buffer into it, and have the module hold the buffer again.

    if_true: () bool on the device; where it is false the buffer stays as it was.
    Raises: HostNeededError in a capture, where a buffer is replaced by one of another form.
    """
    for (holder, name, before), now in replaced(places):
        if (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
            if if_true is None:
                continue
            raise HostNeededError(f"the model's code replaces its buffer {name} by one of another form")
        with torch.no_grad():
            before.copy_(now if if_true is None else torch.where(if_true, now, before))
        holder[name] = before
