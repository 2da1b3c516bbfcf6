"""Buffers that a model's code replaces in its pass, as I-BERT does the ranges of its activations.

What replaces them is written where they were, which is where a graph reads them.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from brimful.models.packed.host_questions import HostNeededError

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


@torch.no_grad()
def write_back(places: list[Place], *, if_true: Tensor | None = None) -> None:
    """Write what replaced a buffer into it, and have the module hold the buffer again.

    Left as they are: buffers that were replaced by one of another form, or that are another place's, too.
    if_true: () bool on the device; where it is false, buffers stay as they were.
    Raises: HostNeededError with `if_true`, which is for captures, where some would be left.
    """
    changed = replaced(places)
    held = {id(holder.get(name)) for holder, name, _ in places}
    forms: dict[tuple[object, ...], list[tuple[Place, Tensor]]] = defaultdict(list)
    for place, now in changed:
        _, name, before = place
        if id(before) in held or (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
            if if_true is not None:
                raise HostNeededError(f"the model's code replaces its buffer {name} by one of another form, or place")
            continue
        forms[before.shape, before.dtype, before.device].append((place, now))
    values = [torch.stack([now for _, now in alike]) for alike in forms.values()]  # copies, before any is written
    for alike, now_KX in zip(forms.values(), values, strict=True):
        befores = [before for (_, _, before), _ in alike]
        if if_true is not None:
            now_KX = torch.where(if_true, now_KX, torch.stack(befores))
        torch._foreach_copy_(befores, list(now_KX.unbind()))
        for (holder, name, before), _ in alike:
            holder[name] = before
