"""Linear layers that hold half-precision copies of their weights: what autocast would cast at every use, cast once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brimful.hardware.file_memory import weights_file
from brimful.models.model_stats import linear_parameters

#: Elements that a parameter in an arena starts at a multiple of.
ALIGNMENT = 16


def halve_linears(model: nn.Module, dtype: torch.dtype, folder: Path | None = None) -> None:
    """Replaces the Linear weights that are only read by copies in `dtype`, sibling layers' side by side.

    folder: of a file without a name that holds the copies of weights in host memory.
    """
    copied = linear_parameters(model) - {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    named = dict(model.named_parameters())
    parameters = list(named.values())
    order = [i for i in sorted(range(len(parameters)), key=arena_order(named, copied)) if id(parameters[i]) in copied]
    for device in {parameters[i].device for i in order}:  # those that are streamed are not where the others are
        here = [i for i in order if parameters[i].device == device]
        sizes = [-(-parameters[i].numel() // ALIGNMENT) * ALIGNMENT for i in here]
        if folder is not None and device.type == "cpu":
            arena = weights_file(folder, sum(sizes) * dtype.itemsize).view(dtype)
        else:
            arena = torch.empty(sum(sizes), dtype=dtype, device=device)
        for i, part in zip(here, arena.split(sizes), strict=True):
            half = part[: parameters[i].numel()].view(parameters[i].shape)
            parameters[i].data = half.copy_(parameters[i].detach())


def arena_order(named: Mapping[str, nn.Parameter], copied: Collection[int]) -> Callable[[int], tuple[Any, ...]]:
    """A sort key for indices of parameters: those with ids in `copied` first; weights of sibling layers side by side,
    then their biases: they may be read as one matrix."""
    names = list(named)
    parents = {name.rpartition(".")[0].rpartition(".")[0]: None for name in names}
    rank = {parent: index for index, parent in enumerate(parents)}

    def key(index: int) -> tuple[Any, ...]:
        name = names[index]
        module, _, kind = name.rpartition(".")
        is_copied = id(named[name]) in copied
        return (not is_copied, rank[module.rpartition(".")[0]], kind, index) if is_copied else (True, index, "", 0)

    return key
