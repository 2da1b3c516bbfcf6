"""Layouts: how sequences stand in a batch of fixed shape. What kernels, packing and execution speak to one another.

Legend of shape suffixes: T tokens in a packed row, N segments with the tail's, S sequence slots, R rows, L length,
C outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Group:
    """Segments of similar length, for kernels that work on padded rows.

    index_RL: place in the packed row of each token; where the row is padding, of its own first token: what is masked is
    still multiplied by zero, and a sequence that is not finite must not reach another one that way.
    valid_RL: True at tokens. start: where its first token is, if all rows are full and stand one after another in the
    packed row, so that nothing must be gathered; else None.
    """

    index_RL: Tensor
    valid_RL: Tensor
    start: int | None = None


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where sequences start and end in one packed row of T tokens. Every token, the unused tail's too, is in a segment.

    cu_seqlens_N: (N + 1,) int32, non-decreasing from 0 to T; N is constant, what is not needed repeats T.
    segment_T: (T,) int64, the segment of each token.
    max_length: longest segment allowed, a host number that kernels are compiled for.
    typical_length: mean length of the sequences to come, by which a kernel is chosen; None if it is not known.
    attention: name of the kernel measured to be the fastest for them, None if none was.
    groups: the same segments as padded rows, where the chosen kernel wants them; empty otherwise.
    place_T: (T,) int64, the place of each token among all rows of all groups, flattened; None without groups, and where
    tokens stand there as they do in the packed row.
    """

    cu_seqlens_N: Tensor
    segment_T: Tensor
    max_length: int
    typical_length: int | None = None
    attention: str | None = None
    groups: tuple[Group, ...] = ()
    place_T: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PackedInputs:
    """Sequences end to end in one row of T tokens. Slots beyond the real sequences point at token 0.

    first_S: place of each slot's first token. last_S: place of its last token that is not the padding id, which is the
    one Hugging Face's decoders read. types_T: token types, None if the model has none.
    """

    ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor | None
    segments: Segments
    first_S: Tensor
    last_S: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, the tail counted."""
        return self.ids_T.numel()


@dataclass(frozen=True, kw_only=True)
class PaddedInputs:
    """One sequence a row, padded at the end. Rows beyond the real ones repeat the first: any model takes it."""

    ids_RL: Tensor
    mask_RL: Tensor
    types_RL: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding counted."""
        return self.ids_RL.numel()


Inputs = PackedInputs | PaddedInputs
Layout = TypeVar("Layout")


def map_tensors(layout: Layout, change: Any) -> Layout:
    """A copy of a layout with `change` applied to every tensor in it, at any depth."""
    return replace(layout, **{f.name: _map(getattr(layout, f.name), change) for f in fields(layout)})  # type: ignore[type-var, arg-type]


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    return map_tensors(value, change) if isinstance(value, Segments | Group | PackedInputs | PaddedInputs) else value


@dataclass(frozen=True, kw_only=True)
class PackedShape:
    """Fixed shape of a packed row: T tokens, S slots, the longest sequence it may hold.

    typical_length, attention: see `Segments`.
    """

    num_tokens: int
    num_slots: int
    max_length: int
    typical_length: int | None = None
    attention: str | None = None

    @property
    def num_segments(self) -> int:
        """Segments that any `num_slots` sequences need: one a slot, and the unused tail cut at `max_length`."""
        return self.num_slots + self.num_tokens // self.max_length + 1


def make_segments(lengths: Sequence[int], shape: PackedShape) -> Segments:
    """Segments of the given lengths from the start of a row; the unused tail becomes more of them.

    Raises: ValueError if the sequences do not fit the shape.
    """
    tail = shape.num_tokens - sum(lengths)
    if tail < 0 or len(lengths) > shape.num_slots or max(lengths, default=0) > shape.max_length:
        raise ValueError(f"{len(lengths)} sequences of {sum(lengths)} tokens do not fit {shape}")
    whole, rest = divmod(tail, shape.max_length)
    sizes_N = np.zeros(shape.num_segments, dtype=np.int64)
    sizes_N[: len(lengths)] = lengths
    sizes_N[shape.num_slots : shape.num_slots + whole] = shape.max_length
    sizes_N[shape.num_slots + whole] = rest
    cu_seqlens_N = np.zeros(shape.num_segments + 1, dtype=np.int32)
    np.cumsum(sizes_N, out=cu_seqlens_N[1:])
    segment_T = np.repeat(np.arange(shape.num_segments), sizes_N)
    return Segments(
        cu_seqlens_N=torch.from_numpy(cu_seqlens_N),
        segment_T=torch.from_numpy(segment_T),
        max_length=shape.max_length,
        typical_length=shape.typical_length,
        attention=shape.attention,
    )


def packed_inputs(
    ids: Sequence[np.ndarray],
    shape: PackedShape,
    *,
    padding_id: int,
    types: Sequence[np.ndarray] | None = None,
    groups: bool = False,
) -> PackedInputs:
    """Sequences of token ids end to end in one row of the given shape.

    padding_id: the model's own, by which its head knows padding. types: token types of each sequence. groups: also as
    padded rows, for `grouped_attention`.
    Raises: ValueError if the sequences do not fit the shape, or if one is empty.
    """
    lengths = [len(sequence) for sequence in ids]
    if not all(lengths):
        raise ValueError(f"of {len(ids)} sequences one is empty")
    segments = make_segments(lengths, shape)
    cu_seqlens_N = segments.cu_seqlens_N.numpy().astype(np.int64)
    segment_T = segments.segment_T.numpy()
    used = sum(lengths)
    ids_T = np.full(shape.num_tokens, padding_id, dtype=np.int64)
    ids_T[:used] = np.concatenate(ids)
    types_T = None
    if types is not None:
        types_T = np.zeros(shape.num_tokens, dtype=np.int64)
        types_T[:used] = np.concatenate(types)
    first_S, last_S = np.zeros((2, shape.num_slots), dtype=np.int64)
    first_S[: len(ids)] = cu_seqlens_N[: len(ids)]
    last_S[: len(ids)] = cu_seqlens_N[1 : len(ids) + 1] - 1
    for slot in np.flatnonzero(ids_T[last_S[: len(ids)]] == padding_id).tolist():
        last_S[slot] = cu_seqlens_N[slot] + _last_read(ids[slot], padding_id)
    return PackedInputs(
        ids_T=torch.from_numpy(ids_T),
        positions_T=torch.from_numpy(np.arange(shape.num_tokens) - cu_seqlens_N[segment_T]),
        types_T=None if types_T is None else torch.from_numpy(types_T),
        segments=with_groups(segments) if groups else segments,
        first_S=torch.from_numpy(first_S),
        last_S=torch.from_numpy(last_S),
    )


def _last_read(sequence: np.ndarray, padding_id: int) -> int:
    """Place of the last token that is not padding, 0 if all are: texts may end in it where it is also the end token."""
    return int(np.flatnonzero(sequence != padding_id).max(initial=0))


def padded_inputs(
    ids: Sequence[np.ndarray],
    num_rows: int,
    length: int,
    *,
    padding_id: int,
    types: Sequence[np.ndarray] | None = None,
) -> PaddedInputs:
    """Sequences of token ids, one a row of `length`; rows beyond them repeat the first.

    Raises: ValueError if there is no sequence, or if they do not fit.
    """
    if not 0 < len(ids) <= num_rows or max(len(sequence) for sequence in ids) > length:
        raise ValueError(f"{len(ids)} sequences do not fit {num_rows} rows of {length} tokens")
    ids_RL = np.full((num_rows, length), padding_id, dtype=np.int64)
    mask_RL = np.zeros((num_rows, length), dtype=np.int64)
    types_RL = None if types is None else np.zeros((num_rows, length), dtype=np.int64)
    for row in range(num_rows):
        which = row if row < len(ids) else 0
        used = len(ids[which])
        ids_RL[row, :used] = ids[which]
        mask_RL[row, :used] = 1
        if types is not None and types_RL is not None:
            types_RL[row, :used] = types[which]
    return PaddedInputs(
        ids_RL=torch.from_numpy(ids_RL),
        mask_RL=torch.from_numpy(mask_RL),
        types_RL=None if types_RL is None else torch.from_numpy(types_RL),
    )


def with_groups(segments: Segments, ratio: float = 1.25, slack: int = 8) -> Segments:
    """The same segments, also as padded rows in groups whose lengths differ by at most `ratio` and `slack` tokens."""
    lengths_N = segments.cu_seqlens_N.diff().long()
    order = torch.argsort(lengths_N, stable=True)
    order = order[lengths_N[order] > 0]
    groups, sizes = [], lengths_N[order].tolist()
    start = 0
    while start < len(sizes):
        end = start
        while end < len(sizes) and sizes[end] <= ratio * sizes[start] + slack:
            end += 1
        groups.append(_group(segments.cu_seqlens_N[order[start:end]].long(), lengths_N[order[start:end]]))
        start = end
    groups.sort(key=lambda group: int(group.index_RL[0, 0]))
    flat = torch.cat([group.index_RL.where(group.valid_RL, -1).flatten() for group in groups])
    place_T = torch.zeros_like(segments.segment_T)
    place_T[flat[flat >= 0]] = torch.nonzero(flat >= 0)[:, 0]
    as_they_are = torch.equal(place_T, torch.arange(len(place_T)))
    return replace(segments, groups=tuple(groups), place_T=None if as_they_are else place_T)


def _group(starts_R: Tensor, lengths_R: Tensor) -> Group:
    column_L = torch.arange(int(lengths_R.max()))
    valid_RL = column_L < lengths_R[:, None]
    index_RL = starts_R[:, None] + torch.where(valid_RL, column_L, 0)
    first = int(index_RL[0, 0])
    in_a_row = torch.equal(index_RL.flatten(), torch.arange(first, first + index_RL.numel()))
    return Group(index_RL=index_RL, valid_RL=valid_RL, start=first if in_a_row else None)
