"""Attention, as a model defines it: mask, scale, cap, dropout, and a bias by distance."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """Bias of a score by the distance of query i and key j: q_i . keys[b] + k_j . queries[b] + bias[b].

    bucket_W: b, the row of the tables below, of each distance j - i from -reach to reach - 1, (2 * reach,) int64 with
    reach at least the longest segment. keys_HRD, queries_HRD: of R positions, None where a model has none.
    bias_HR: a number for each head and position.
    """

    bucket_W: Tensor
    keys_HRD: Tensor | None = None
    queries_HRD: Tensor | None = None
    bias_HR: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Mask, scale and cap of attention, as the model defines them.

    relative: what is added to scaled scores, before a soft cap.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    relative: RelativeBias | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of queries, and of keys as of values, each of `size` numbers."""

    queries: int
    keys: int
    size: int

    @property
    def group(self) -> int:
        """Queries that share a key."""
        return self.queries // self.keys
