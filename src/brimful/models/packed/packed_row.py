"""A family's modules told of a packed row: classes that come in front of the family's own, and call them otherwise.

Where a family's attention does not go through `AttentionInterface`, or makes something T x T out of a row of T tokens,
its modules are told of the row, and compute on it with their own projections and tables. Without a packed row
everything is as it was.
"""

# What `super` has in the classes below is known when they are put in front of a family's.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import PackedInputs, Segments

#: (queries, keys and values (H, T, D); segments; pattern; whether to use the reference attention) -> (H, T, D).
Attend = Callable[[Tensor, Tensor, Tensor, Segments, Pattern, bool], Tensor]

#: Distances are rounded up to a multiple of this, so that products with positions have sizes that GPUs like.
_TILE = 8


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Rows of a position table that sequences of some length read, and which of them each distance reads.

    first, last: the rows, from first up to last. bucket_W: row less first, by distance key - query, as `RelativeBias`
    has it.
    """

    first: int
    last: int
    bucket_W: Tensor


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Packed row, passed to a family's modules in place of distances, masks or positions.

    positions_1T: of each token in its sequence, from the first position of the model on. buckets: None in a module
    without relative positions. bias_HR: a table for all layers.
    """

    inputs: PackedInputs
    plain: bool
    attend: Attend
    positions_1T: Tensor
    buckets: Buckets | None = None
    bias_HR: Tensor | None = None

    @property
    def segments(self) -> Segments:
        """Bounds of the sequences."""
        return self.inputs.segments

    def context(self, heads: tuple[Tensor, Tensor, Tensor], pattern: Pattern) -> Tensor:
        """Attention of queries, keys and values (1, T, H, D), as (1, T, H * D)."""
        q_HTD, k_HTD, v_HTD = (x.squeeze(0).transpose(0, 1) for x in heads)
        out_HTD = self.attend(q_HTD, k_HTD, v_HTD, self.segments, pattern, self.plain)
        return out_HTD.transpose(0, 1).flatten(1)[None]


class Form:
    """Base of a family's packed form, mixed into the family's class."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def came_in_front(self) -> None:
        """Called once: for what a forward pass shall not do each time."""


class Listener(Form):
    """A module that can be told of a packed row. told: that row, while the model runs on it."""

    told: PackedRow | None = None

    def buckets(self, max_length: int) -> Buckets | None:
        """The rows of the position table that sequences of up to `max_length` tokens read; None without such a table.

        Made on the CPU, where the equivalence check's plain model is run: devices round logarithms differently.
        """
        return None


def reach(max_length: int) -> int:
    """Distances that the tables of sequences of up to `max_length` tokens go to."""
    return -(-max_length // _TILE) * _TILE


def used(row_W: Tensor) -> Buckets:
    """The rows of a table that these distances read."""
    first, last = int(row_W.min()), int(row_W.max()) + 1
    return Buckets(first=first, last=last, bucket_W=row_W - first)


def causal(bucket_W: Tensor, bias_HR: Tensor) -> tuple[Tensor, Tensor]:
    """The same bias, with minus infinity where a key comes after its query."""
    num_rows, ahead_W = bias_HR.shape[1], torch.arange(len(bucket_W), device=bucket_W.device) > len(bucket_W) // 2
    never_H1 = bias_HR.new_full((len(bias_HR), 1), float("-inf"))
    return bucket_W.masked_fill(ahead_W, num_rows), torch.cat([bias_HR, never_H1], dim=1)


def probability(dropout: Any) -> float:
    """Of a module's dropout, as its mode has it."""
    return float(dropout.p) if dropout.training else 0.0


def in_heads(num_heads: int, *projected: Tensor) -> tuple[Any, ...]:
    """(1, T, H * D), each as (1, T, H, D)."""
    return tuple(x.unflatten(-1, (num_heads, -1)) for x in projected)
