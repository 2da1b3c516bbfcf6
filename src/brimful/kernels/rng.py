"""Seeds of dropout masks: one a forward pass, and a number for each use of dropout in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def draw_seed(device: torch.device, dropout: float) -> Tensor:
    """() int64 for the kernels, from torch's generator; a constant where there is no dropout."""
    if dropout:
        return torch.randint(0, 2**62, (), device=device)
    return torch.zeros((), dtype=torch.int64, device=device)


_forward: list[Tensor] = []
_sites = itertools.count()


@contextmanager
def one_seed() -> Iterator[None]:
    """Within, `next_site` draws one seed and numbers the sites, so that a forward pass draws but once."""
    global _sites
    _sites = itertools.count()
    _forward.clear()  # of a forward pass outside
    try:
        yield
    finally:
        _forward.clear()


def next_site(like: Tensor, dropout: float) -> tuple[Tensor, int]:
    """Seed, on the device of `like`, and number of a site of its own.

    Without dropout `like` itself: no kernel reads it, and filling a constant would be a launch at every site.
    """
    if not dropout:
        return like, 0
    if not _forward:
        _forward.append(draw_seed(like.device, dropout))
    return _forward[0], next(_sites)
