"""Padding: sequences to rows of a few fixed shapes.

A batch is one micro-batch, padded to its longest sequence, unless a cut by length saves more padding than one more
micro-batch costs. That cost is told in tokens: as many as could be computed in the time that launching a pass takes.

Row lengths are chosen once, from the lengths that the run will really see: few, because every shape is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from brimful.data.batches.packing import partition, round_up

#: Row lengths are multiples of this many tokens, as Trainer's `pad_to_multiple_of` usually is.
ROW_TILE = 8
#: Most row lengths of one run, and fractions of a batch that the rows of a micro-batch are rounded up to.
MAX_LENGTHS, ROW_FRACTIONS = 8, 4
#: Most places between lengths that are looked at for cuts of one batch.
_MOST_CUTS = 48


@dataclass(frozen=True, kw_only=True)
class PaddedShapes:
    """Shapes that rows of a batch may have.

    lengths: of rows, ascending; None for rows as long as the longest sequence in them, as many as there are sequences.
    num_tokens: most of a micro-batch, padding counted. num_rows: sequences of a batch at most.
    call_tokens: tokens that could be computed in the time that one more micro-batch costs.
    """

    lengths: tuple[int, ...] | None
    num_tokens: int
    num_rows: int
    call_tokens: int = 0

    def length_for(self, length: int) -> int:
        """The shortest row that holds a sequence of this length. Raises: ValueError if none does."""
        if self.lengths is None:
            return length
        place = int(np.searchsorted(self.lengths, length))
        if place == len(self.lengths):
            raise ValueError(f"{length} tokens are more than the longest row, {self.lengths[-1]}")
        return self.lengths[place]

    def most_rows(self, length: int) -> int:
        """Rows of this length that a micro-batch may have."""
        return max(1, min(self.num_rows, self.num_tokens // length))

    def rows_for(self, count: int, length: int) -> int:
        """Rows of the micro-batch that holds `count` sequences: a few different numbers where shapes are fixed."""
        if self.lengths is None:
            return count
        return min(round_up(count, -(-self.num_rows // ROW_FRACTIONS)), self.most_rows(length))


#: Rows and length of a micro-batch, and which sequences are in it.
Cut = tuple[int, int, list[int]]


def cut(lengths: Sequence[int] | np.ndarray, shapes: PaddedShapes) -> list[Cut]:
    """Sequences of these lengths into the micro-batches that cost the fewest tokens, the shortest sequences first."""
    lengths_N = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(lengths_N, kind="stable")
    sizes_K, starts_K = np.unique(_row_lengths(lengths_N[order], shapes), return_index=True)
    starts_K = np.append(starts_K, len(order))
    found: list[Cut] = []
    for first, last in _groups(sizes_K, starts_K, shapes):
        begin, end = int(starts_K[first]), int(starts_K[last])
        most = shapes.most_rows(int(sizes_K[last - 1]))
        for start in range(begin, end, most):
            members = order[start : min(start + most, end)]
            length = shapes.length_for(int(lengths_N[members[-1]]))  # of a group's first parts less than of its last
            found.append((shapes.rows_for(len(members), length), length, members.tolist()))
    return found


def _row_lengths(sorted_N: np.ndarray, shapes: PaddedShapes) -> np.ndarray:
    """The row length that each sequence needs at least; where any will do, few enough different ones to look at."""
    if shapes.lengths is not None:
        places = np.searchsorted(shapes.lengths, sorted_N)
        if places[-1] == len(shapes.lengths):
            shapes.length_for(int(sorted_N[-1]))
        return np.asarray(shapes.lengths, dtype=np.int64)[places]
    longest = int(sorted_N[-1])
    rows_N: np.ndarray = np.minimum(round_up(sorted_N, max(1, longest // _MOST_CUTS)), longest)
    return rows_N


def _groups(sizes_K: np.ndarray, starts_K: np.ndarray, shapes: PaddedShapes) -> list[tuple[int, int]]:
    """Runs of neighbouring row lengths that are padded to the longest of them. Dynamic programming over their ends.

    starts_K: (K + 1,) sequences before those of each row length, and of all.
    """
    best, came = np.zeros(len(sizes_K) + 1), np.zeros(len(sizes_K) + 1, dtype=np.int64)
    for end in range(1, len(sizes_K) + 1):
        options = best[:end] + _cost(starts_K[end] - starts_K[:end], int(sizes_K[end - 1]), shapes)
        came[end] = int(options.argmin())
        best[end] = options[came[end]]
    end, found = len(sizes_K), []
    while end > 0:
        found.append((int(came[end]), end))
        end = int(came[end])
    return found[::-1]


def _cost(counts_K: np.ndarray, length: int, shapes: PaddedShapes) -> np.ndarray:
    """Tokens that so many sequences cost in rows of this length, calls counted."""
    most = shapes.most_rows(length)
    full_K, rest_K = np.divmod(counts_K, most)
    if shapes.lengths is not None:
        rest_K = np.minimum(round_up(rest_K, -(-shapes.num_rows // ROW_FRACTIONS)), most)
    cost_K: np.ndarray = (full_K * most + rest_K) * length + (full_K + (rest_K > 0)) * shapes.call_tokens
    return cost_K


def choose_lengths(
    batches: Sequence[np.ndarray], longest: int, shapes: PaddedShapes, *, max_lengths: int = MAX_LENGTHS
) -> tuple[tuple[int, ...], float]:
    """Row lengths that waste the fewest tokens on these batches, and the share of their tokens that batches fill.

    batches: the lengths of each batch's sequences. longest: the longest sequence there can be; it has a row.
    """
    fine = replace(shapes, lengths=(*range(ROW_TILE, longest, ROW_TILE), longest))
    pieces = [piece for lengths_N in batches for piece in cut(lengths_N, fine)]
    rows, found = np.array([piece[0] for piece in pieces]), np.array([piece[1] for piece in pieces])
    sizes = np.unique(found)
    counts = np.array([rows[found == size].sum() for size in sizes])
    if sizes[-1] < longest:
        chosen = (*partition(sizes, counts, max_lengths - 1), longest)
    else:
        chosen = tuple(partition(sizes, counts, max_lengths))
    fixed = replace(shapes, lengths=chosen)
    computed = sum(rows * length for lengths_N in batches for rows, length, _ in cut(lengths_N, fixed))
    return chosen, sum(int(lengths_N.sum()) for lengths_N in batches) / computed


#: Different row lengths between a power of two and the next, for texts that are only read.
_LENGTHS_AN_OCTAVE = 8
#: Fewest rows of a piece of what is left over of a window.
_FEWEST_ROWS = 8


def cut_padded_window(lengths_N: np.ndarray, num_tokens: int, longest: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """A window of texts in pieces of few shapes: rows, length, and the texts of each, the longest first. Texts without
    tokens are in none.

    num_tokens: most of a piece, padding counted. longest: longest sequence there can be. Rows are as many as fit, or of
    what is left over a half as many, a quarter, ...
    """
    order = np.argsort(-lengths_N, kind="stable")[: np.count_nonzero(lengths_N)]
    start = 0
    while start < len(order):
        here = int(lengths_N[order[start]])
        step = max(ROW_TILE, (1 << (here - 1).bit_length()) // (2 * _LENGTHS_AN_OCTAVE))
        length = max(here, min(round_up(here, step), longest))
        num_rows = max(1, num_tokens // length)
        while num_rows // 2 >= max(len(order) - start, _FEWEST_ROWS):
            num_rows //= 2
        yield num_rows, length, order[start : start + num_rows]
        start += num_rows
