"""Seeds of dropout masks, and the numbers of the sites that draw them.

Kernels read a seed and the place of each row of a mask from one tensor, (1 + rows,) int64. A token's place is that of
its sequence in the effective batch, all sequences end to end, plus its position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_seeds(seed: Tensor, num_rows: int, dropout: float = 1.0) -> Tensor:
    """(1 + rows,) int64: a seed () with the numbers of rows as their places; a tensor of this shape as it is.

    Without dropout any tensor as it is: no kernel reads it.
    Raises: ValueError for seeds of another number of rows.
    """
    if not dropout:
        return seed
    if not seed.ndim:
        return torch.cat([seed.view(1), torch.arange(num_rows, device=seed.device)])
    if len(seed) != 1 + num_rows:
        raise ValueError(f"a mask of {num_rows} rows has seeds of {len(seed) - 1}")
    return seed


class RowsOfLayer:
    """Rows that one call of a layer works on: all tokens, until it goes on with some of them.

    has_drawn: whether the call has drawn a seed.
    """

    def __init__(self) -> None:
        self.has_drawn = False
        self._chosen: Tensor | None = None
        self._seeds: Tensor | None = None

    def choose(self, chosen_S: Tensor) -> None:
        """Go on with the tokens of these numbers."""
        self._chosen, self._seeds = chosen_S, None

    def seeds(self, of_tokens: Tensor) -> Tensor:
        """Of these rows, (1 + S,), from those of all tokens."""
        if self._chosen is None:
            return of_tokens
        if self._seeds is None:
            self._seeds = torch.cat([of_tokens[:1], of_tokens[1:].index_select(0, self._chosen)])
        return self._seeds


class DropoutSites:
    """Seeds that all uses of dropout in one forward pass share, and the number of each of them, its site.

    A site is known by its layer and its place within the layer, and numbered when it is first asked for: a layer that
    is run again draws the same masks.
    """

    def __init__(self) -> None:
        self._drawn: Tensor | None = None
        self._drawn_in: int | None = None
        self._of_tokens: Tensor | None = None
        self._of_rows: dict[int, Tensor] = {}
        self._numbers: dict[tuple[int | None, int], int] = {}

    def of_tokens(self, seed: Tensor, places_X: Tensor) -> Tensor:
        """(1 + X,) int64: a step's seed, and the places of its tokens. Made once a pass."""
        if self._of_tokens is None:
            self._of_tokens = torch.cat([seed.view(1), places_X])
        return self._of_tokens

    def of_rows(self, num_rows: int, device: torch.device, layer: int | None, call: RowsOfLayer) -> Tensor:
        """(1 + rows,) int64 for rows without places: a seed of torch's generator, one for a pass, and numbers.

        layer, call: that ask for it.
        """
        seed = self._draw(device, layer, call)
        if num_rows not in self._of_rows:
            self._of_rows[num_rows] = row_seeds(seed, num_rows)
        return self._of_rows[num_rows]

    def _draw(self, device: torch.device, layer: int | None, call: RowsOfLayer) -> Tensor:
        """() int64. A call that is made again draws again, for nothing: torch's stream then goes on as it did."""
        first = self._drawn is None
        if first or (layer == self._drawn_in and not call.has_drawn):
            drawn = torch.randint(0, 2**62, (), device=device)
            call.has_drawn = True
            if first:
                self._drawn, self._drawn_in = drawn, layer
        assert self._drawn is not None
        return self._drawn

    def number(self, layer: int | None, place: int) -> int:
        """The site at a place of a layer; None for what is outside of layers."""
        return self._numbers.setdefault((layer, place), len(self._numbers))
