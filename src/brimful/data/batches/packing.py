"""Packing: sequences to micro-batches of a few fixed shapes.

A token budget is the fixed number of tokens of a packed micro-batch. Budgets are chosen once, from the lengths that
the run will really see: few, because every one is compiled and captured; close, because what they do not hold is
computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from brimful.kernels.layout import PackedShape

#: Budgets are multiples of this many tokens, as matrix units want rows aligned, in fp8 too. Not of the larger tiles of
#: their kernels: that would save no work, and compute 5 to 15 % more tokens where texts are short.
TILE = 16
MAX_BUDGETS = 12

Numbers = TypeVar("Numbers", int, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Token budgets in ascending order, and the share of their tokens that the run's own batches fill.

    most_rows: sequences of a micro-batch; None for as many as fit.
    """

    tokens: tuple[int, ...]
    fill: float
    most_rows: int | None = None

    def smallest_for(self, num_tokens: int) -> int:
        """The smallest budget that holds `num_tokens`. Raises: ValueError if none does."""
        for budget in self.tokens:
            if budget >= num_tokens:
                return budget
        raise ValueError(f"{num_tokens} tokens are more than the largest budget, {self.tokens[-1]}")

    def up_to(self, num_tokens: int, longest: int) -> Budgets:
        """Those of fewer than `num_tokens`, and one of so many, in whole tiles; or one that holds `longest`, if that is
        more."""
        largest = max(num_tokens // TILE * TILE, round_up(longest, TILE))
        return replace(self, tokens=(*(budget for budget in self.tokens if budget < largest), largest))


def pack(lengths: Sequence[int] | np.ndarray, budgets: Budgets) -> list[tuple[int, list[int]]]:
    """Sequences into as few micro-batches as fit: (budget, indices into `lengths`) of each.

    All in one where they fit the largest budget; otherwise first-fit-decreasing into largest budgets, the last one
    shrunk to the smallest that holds it.
    """
    if not len(lengths):
        return []
    largest, most = budgets.tokens[-1], budgets.most_rows or len(lengths)
    total = int(sum(lengths))
    if total <= largest and len(lengths) <= most:
        return [(budgets.smallest_for(total), list(range(len(lengths))))]
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (b for b, left in enumerate(room) if left >= lengths[index] and len(bins[b]) < most)
        place = next(fits, None)
        if place is None:
            bins.append([])
            room.append(largest)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= int(lengths[index])
    return [(budgets.smallest_for(largest - left), sorted(b)) for b, left in zip(bins, room, strict=True)]


def choose_budgets(
    batches: Sequence[np.ndarray], largest: int, longest: int, *, most_rows: int | None = None, tile: int = TILE,
    max_budgets: int = MAX_BUDGETS, budget_tokens: float = 0.0,
) -> Budgets:  # fmt: skip
    """Budgets that waste the fewest tokens on these batches (the lengths of each batch's sequences).

    budget_tokens: tokens that could be computed in the time that one more budget costs, where a run is as long as these
    batches: what a budget does not save, it is not worth.

    largest: most tokens a micro-batch may have, cut to whole tiles; raised to the tiles of `longest`, the longest
    sequence there can be. A batch that is larger is split by `pack`, and what is budgeted are its micro-batches; so is,
    when it comes, a batch larger than all that were looked at.
    """
    least = round_up(longest, tile)
    ceiling = Budgets(tokens=(max(largest // tile * tile, least),), fill=1.0, most_rows=most_rows)
    used = [sum(int(lengths[i]) for i in members) for lengths in batches for _, members in pack(lengths, ceiling)]
    sizes, counts = np.unique([round_up(tokens, tile) for tokens in used], return_counts=True)
    if sizes[-1] < least:  # no batch seen has the longest sequence there can be, but one may
        chosen = [*partition(sizes, counts, max_budgets - 1, part_cost=budget_tokens), least]
    else:
        chosen = partition(sizes, counts, max_budgets, part_cost=budget_tokens)
    budgets = Budgets(tokens=tuple(chosen), fill=1.0, most_rows=most_rows)
    return replace(budgets, fill=sum(used) / sum(budgets.smallest_for(n) for n in used))


def partition(sizes: np.ndarray, counts: np.ndarray, parts: int, *, part_cost: float = 0.0) -> list[int]:
    """At most `parts` of the ascending `sizes`, the last one among them, so that rounding each size up to the next
    chosen one, and `part_cost` for each, add as little as possible. Dynamic programming over (sizes, parts)."""
    number = len(sizes)
    if number <= parts and not part_cost:
        return [int(s) for s in sizes]
    parts = min(number, parts)
    seen = np.concatenate([[0], np.cumsum(counts)])
    # cost[k, j]: tokens when the first j sizes are covered by k budgets, the last of them sizes[j - 1].
    cost = np.full((parts + 1, number + 1), np.inf)
    came = np.zeros((parts + 1, number + 1), dtype=np.int64)
    cost[0, 0] = 0.0
    for k in range(1, parts + 1):
        for j in range(1, number + 1):
            options = cost[k - 1, :j] + sizes[j - 1] * (seen[j] - seen[:j])
            came[k, j] = int(options.argmin())
            cost[k, j] = options[came[k, j]]
    totals = cost[:, number] + part_cost * np.arange(parts + 1)
    k, j, chosen = int(totals.argmin()), number, []
    while j > 0:
        chosen.append(int(sizes[j - 1]))
        j, k = int(came[k, j]), k - 1
    return chosen[::-1]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A micro-batch of a window of texts that are only read: rows of the window, longest first, and a fixed shape."""

    rows: np.ndarray
    shape: PackedShape


#: Shortest of the powers of two that `cut_window` classes lengths by, and its smallest budget.
_SHORTEST_CLASS, _LEAST_BUDGET = 16, 512


def cut_window(lengths_N: np.ndarray, largest: int, longest: int, **kernels: Any) -> list[Piece]:
    """A window of texts, in order of length, cut into pieces of few shapes. Texts without tokens are in none.

    largest: most tokens of a piece, raised to `longest`, the longest sequence there can be. A shape is a class of
    lengths and a budget: `largest`, or for what is left over a half of it, a quarter, ...; its slots are as many
    sequences as fill it if they are longer than the class below. kernels: the other fields of `PackedShape`.
    """
    order = np.argsort(-lengths_N, kind="stable")[: np.count_nonzero(lengths_N)]
    ends = np.cumsum(lengths_N[order])
    pieces, start = [], 0
    while start < len(order):
        done = int(ends[start - 1]) if start else 0
        longest_here = max(int(lengths_N[order[start]]), 1)
        kind = min(max(_SHORTEST_CLASS, 1 << (longest_here - 1).bit_length()), max(longest, longest_here))
        budget = round_up(max(largest, kind), TILE)
        left = int(ends[-1]) - done
        while budget // 2 >= max(left, kind, _LEAST_BUDGET) and budget // 2 % TILE == 0:
            budget //= 2
        slots = max(2 * budget // kind, 1)
        stop = int(np.searchsorted(ends, done + budget, side="right"))
        stop = min(stop, start + slots)
        shape = PackedShape(num_tokens=budget, num_slots=slots, max_length=kind, **kernels)
        pieces.append(Piece(rows=order[start:stop], shape=shape))
        start = stop
    return pieces


def round_up(number: Numbers, multiple: int) -> Numbers:
    """The next multiple, of one number or of each of an array."""
    return -(-number // multiple) * multiple
