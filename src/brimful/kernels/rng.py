"""Seeds of dropout masks, and the numbers of the sites that draw them."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device, dropout: float) -> Tensor:
    """() int64 for the kernels, from torch's generator; a constant where there is no dropout."""
    if dropout:
        return torch.randint(0, 2**62, (), device=device)
    return torch.zeros((), dtype=torch.int64, device=device)


class DropoutSites:
    """The seed that all uses of dropout in one forward pass share, and the number of each of them, its site.

    A site is known by its layer and its place within the layer, and numbered when it is first asked for: a layer that
    is run again draws the same masks.
    """

    def __init__(self) -> None:
        self._seed: Tensor | None = None
        self._numbers: dict[tuple[int | None, int], int] = {}

    def seed(self, device: torch.device, dropout: float) -> Tensor:
        """() int64, drawn once a pass."""
        if self._seed is None:
            self._seed = draw_seed(device, dropout)
        return self._seed

    def number(self, layer: int | None, place: int) -> int:
        """The site at a place of a layer; None for what is outside of layers."""
        return self._numbers.setdefault((layer, place), len(self._numbers))
