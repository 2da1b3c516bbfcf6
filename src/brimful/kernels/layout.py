"""Layouts: how sequences stand in a batch of fixed shape. What kernels, packing and execution speak to one another.

Legend of shape suffixes: T tokens in a packed row, N segments with the tail's, S sequence slots, R rows, L length,
C outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
    """Starts and ends of sequences in one packed row of T tokens. Every token, the unused tail's too, is in a segment.

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
    one Hugging Face's decoders read. types_T: token types, None if the model has none. places_T: (T,) int64, the
    place of each token in the effective batch, by which dropout masks are drawn; None where the row is of none.
    """

    ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor | None
    segments: Segments
    first_S: Tensor
    last_S: Tensor
    places_T: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, the tail counted."""
        return self.ids_T.numel()

    @property
    def num_slots(self) -> int:
        """Rows of logits that there will be."""
        return len(self.first_S)

    @property
    def num_real(self) -> Tensor:
        """() int32 on the device: tokens of sequences, which come first. A view: nothing is computed or read."""
        return self.segments.cu_seqlens_N[self.num_slots]


@dataclass(frozen=True, kw_only=True)
class PaddedInputs:
    """One sequence a row, padded at the end. Rows beyond the real ones repeat the first: any model takes it.

    places_RL: as `places_T` of a packed row.
    """

    ids_RL: Tensor
    mask_RL: Tensor
    types_RL: Tensor | None
    places_RL: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding counted."""
        return self.ids_RL.numel()

    @property
    def num_slots(self) -> int:
        """Rows of logits that there will be."""
        return len(self.ids_RL)


_EMPTY = "of {} sequences one is empty"
Inputs = PackedInputs | PaddedInputs
Layout = TypeVar("Layout")
#: Layouts that may stand in one.
_LAYOUTS = (Segments, Group, PackedInputs, PaddedInputs)


def map_tensors(layout: Layout, change: Any) -> Layout:
    """A copy of a layout with `change` applied to every tensor in it, at any depth."""
    return type(layout)(**{name: _map(value, change) for name, value in vars(layout).items()})


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    return map_tensors(value, change) if isinstance(value, _LAYOUTS) else value


def tensors_of(layout: Any) -> Iterator[Tensor]:
    """Yield every tensor of a layout, in the order of `map_tensors`."""
    for value in vars(layout).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            for group in value:
                yield from tensors_of(group)
        elif isinstance(value, _LAYOUTS):
            yield from tensors_of(value)


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

    def sizes(self, with_types: bool) -> list[int]:
        """Numbers of each part of a packed row, in the order of `pack_numbers`."""
        types = self.num_tokens if with_types else 0
        return [self.num_tokens, self.num_segments + 1, self.num_slots, self.num_slots, types]

    def segments(self, cu_seqlens_N: Tensor, segment_T: Tensor) -> Segments:
        """Segments of a row of this shape."""
        return Segments(
            cu_seqlens_N=cu_seqlens_N,
            segment_T=segment_T,
            max_length=self.max_length,
            typical_length=self.typical_length,
            attention=self.attention,
        )


def _cu_seqlens(lengths: np.ndarray, shape: PackedShape) -> np.ndarray:
    """(N + 1,) int32: where segments of these lengths begin; the unused tail is cut at `max_length`.

    Raises: ValueError if the sequences do not fit the shape.
    """
    ends, count, slots, length = lengths.cumsum(), len(lengths), shape.num_slots, shape.max_length
    used = int(ends[-1]) if count else 0
    if used > shape.num_tokens or count > slots or (count and int(lengths.max()) > length):
        raise ValueError(f"{count} sequences of {used} tokens do not fit {shape}")
    num_segments = shape.num_segments
    cu_seqlens_N = np.empty(num_segments + 1, dtype=np.int32)
    cu_seqlens_N[0], cu_seqlens_N[1 : count + 1], cu_seqlens_N[count + 1 : slots + 1] = 0, ends, used
    tail = np.arange(used + length, used + length * (num_segments - slots) + 1, length)
    cu_seqlens_N[slots + 1 :] = np.minimum(tail, shape.num_tokens)
    return cu_seqlens_N


def make_segments(lengths: Sequence[int] | np.ndarray, shape: PackedShape) -> Segments:
    """Segments of the given lengths from the start of a row; the unused tail becomes more of them.

    Raises: ValueError if the sequences do not fit the shape.
    """
    cu_seqlens_N = _cu_seqlens(np.asarray(lengths, dtype=np.int64), shape)
    segment_T = np.repeat(np.arange(shape.num_segments), np.diff(cu_seqlens_N))
    return shape.segments(torch.from_numpy(cu_seqlens_N), torch.from_numpy(segment_T))


def pack_numbers(
    ids: np.ndarray,
    lengths: np.ndarray,
    shape: PackedShape,
    *,
    padding_id: int,
    types: np.ndarray | None = None,
    pinned: bool = False,
) -> Tensor:
    """A packed row as one int32 tensor on the host: ids (T), cu_seqlens (N + 1), first and last (S), types (T) if any.

    ids, types: of all sequences, end to end. padding_id: the model's own, by which its head knows padding.
    numpy writes it: for so many numbers torch would wake a thread a core, and these spin where workers tokenise.
    Raises: ValueError if the sequences do not fit the shape, or if one is empty.
    """
    if not lengths.all():
        raise ValueError(_EMPTY.format(len(lengths)))
    cu_seqlens_N, used, count = _cu_seqlens(lengths, shape), len(ids), len(lengths)
    memory = torch.empty(sum(shape.sizes(types is not None)), dtype=torch.int32, pin_memory=pinned)
    ids_T, written_N, first_S, last_S, types_T = _parts(memory.numpy(), shape.sizes(types is not None))
    ids_T[:used], ids_T[used:], written_N[:] = ids, padding_id, cu_seqlens_N
    starts, last = _first_and_last(ids_T, cu_seqlens_N, count, padding_id)
    for part, values in ((first_S, starts), (last_S, last), *([] if types is None else [(types_T, types)])):
        part[: len(values)], part[len(values) :] = values, 0
    return memory


def _first_and_last(
    ids_T: np.ndarray, cu_seqlens_N: np.ndarray, count: int, padding_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places of the first token of each of `count` sequences, and of its last one that is no padding."""
    starts, last = cu_seqlens_N[:count], cu_seqlens_N[1 : count + 1] - 1
    for row in (ids_T[last] == padding_id).nonzero()[0]:  # a text may end in it, where it is also the end token
        sequence = ids_T[starts[row] : last[row] + 1]
        last[row] = starts[row] + np.flatnonzero(sequence != padding_id).max(initial=0)
    return starts, last


def _parts(numbers: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Views of so many numbers each, one after the other: `np.split` takes longer than all that is written in them."""
    ends = list(accumulate(sizes))
    return [numbers[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def unpack_numbers(numbers: Tensor, shape: PackedShape) -> PackedInputs:
    """The packed row that `pack_numbers` wrote, made on the device that the numbers are on."""
    with_types = len(numbers) > sum(shape.sizes(False))
    ids_T, cu_seqlens_N, first_S, last_S, types_T = numbers.split(shape.sizes(with_types))
    places_T = torch.arange(shape.num_tokens, dtype=torch.int32, device=numbers.device)
    segment_T = torch.searchsorted(cu_seqlens_N[1:].contiguous(), places_T, right=True)
    return PackedInputs(
        ids_T=ids_T.long(),
        positions_T=(places_T - cu_seqlens_N[segment_T]).long(),
        types_T=types_T.long() if with_types else None,
        segments=shape.segments(cu_seqlens_N, segment_T),
        first_S=first_S.long(),
        last_S=last_S.long(),
    )


def packed_inputs(
    ids: Sequence[np.ndarray],
    shape: PackedShape,
    *,
    padding_id: int,
    types: Sequence[np.ndarray] | None = None,
    groups: bool = False,
) -> PackedInputs:
    """Sequences of token ids end to end in one row of the given shape, on the host: `unpack_numbers` of `pack_numbers`.

    types: token types of each sequence. groups: also as padded rows, for `grouped_attention`. numpy writes it, each
    tensor once: torch would wake a thread a core, and of a graph's step this is most of what the host does.
    Raises: ValueError as `pack_numbers` does.
    """
    count, num_tokens, from_numpy = len(ids), shape.num_tokens, torch.from_numpy
    lengths = list(map(len, ids))
    if not all(lengths):
        raise ValueError(_EMPTY.format(count))
    cu_seqlens_N = _cu_seqlens(np.array(lengths, dtype=np.int64), shape)
    used = int(cu_seqlens_N[count])
    ids_T, types_T = np.empty(num_tokens, dtype=np.int64), None
    np.concatenate(ids, out=ids_T[:used])
    ids_T[used:] = padding_id
    if types is not None:
        types_T = np.zeros(num_tokens, dtype=np.int64)
        np.concatenate(types, out=types_T[:used])
    first_S, last_S = np.zeros((2, shape.num_slots), dtype=np.int64)
    first_S[:count], last_S[:count] = _first_and_last(ids_T, cu_seqlens_N, count, padding_id)
    segment_T = np.arange(shape.num_segments).repeat(cu_seqlens_N[1:] - cu_seqlens_N[:-1])
    segments = shape.segments(from_numpy(cu_seqlens_N), from_numpy(segment_T))
    return PackedInputs(
        ids_T=from_numpy(ids_T),
        positions_T=from_numpy(np.arange(num_tokens) - cu_seqlens_N[segment_T]),
        types_T=None if types_T is None else from_numpy(types_T),
        segments=with_groups(segments) if groups else segments,
        first_S=from_numpy(first_S),
        last_S=from_numpy(last_S),
    )


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


def pad_numbers(
    ids: np.ndarray,
    lengths: np.ndarray,
    num_rows: int,
    length: int,
    *,
    padding_id: int,
    types: np.ndarray | None = None,
    pinned: bool = False,
) -> Tensor:
    """Padded rows as one int32 tensor on the host: lengths (R), ids (R x L), types (R x L) if any.

    ids, types: of all sequences, end to end. Rows beyond them repeat the first.
    Raises: ValueError if there is no sequence, if one is empty, or if they do not fit.
    """
    count = len(lengths)
    if not 0 < count <= num_rows or lengths.max() > length or not lengths.all():
        raise ValueError(f"{count} sequences do not fit {num_rows} rows of {length} tokens, or one is empty")
    sizes = [num_rows, num_rows * length, 0 if types is None else num_rows * length]
    memory = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
    lengths_R, ids_RL, types_RL = _parts(memory.numpy(), sizes)
    lengths_R[:count], lengths_R[count:] = lengths, lengths[0]
    real = np.arange(length) < lengths[:, None]
    for part, values, empty in ((ids_RL, ids, padding_id), (types_RL, types, 0)):
        if values is None:
            continue
        part_RL = part.reshape(num_rows, length)
        part_RL[:count] = empty
        part_RL[:count][real] = values
        part_RL[count:] = part_RL[0]
    return memory


def unpad_numbers(numbers: Tensor, num_rows: int, length: int) -> PaddedInputs:
    """The rows that `pad_numbers` wrote, made on the device that the numbers are on."""
    lengths_R, *rows = numbers.split([num_rows, *[num_rows * length] * (len(numbers) // (num_rows * length))])
    ids_RL, *types = (part.view(num_rows, length).long() for part in rows)
    places_L = torch.arange(length, dtype=torch.int32, device=numbers.device)
    return PaddedInputs(
        ids_RL=ids_RL,
        mask_RL=(places_L < lengths_R[:, None]).long(),
        types_RL=types[0] if types else None,
    )


def placed(inputs: Inputs, starts_M: np.ndarray) -> Inputs:
    """The same inputs, on the host, with the place of each token in the effective batch.

    starts_M: place of the first token of each sequence. What is in none of them has any place.
    """
    if isinstance(inputs, PaddedInputs):
        rows, length = inputs.ids_RL.shape
        places_RL = np.zeros((rows, length), dtype=np.int64)
        places_RL[: len(starts_M)] = starts_M[:, None] + np.arange(length)
        return replace(inputs, places_RL=torch.from_numpy(places_RL))
    starts_N = np.zeros(inputs.segments.cu_seqlens_N.numel() - 1, dtype=np.int64)
    starts_N[: len(starts_M)] = starts_M
    places_T = starts_N[inputs.segments.segment_T.numpy()] + inputs.positions_T.numpy()
    return replace(inputs, places_T=torch.from_numpy(places_T))


def with_groups(segments: Segments, ratio: float = 1.25, slack: int = 8) -> Segments:
    """The same segments, also as padded rows in groups whose lengths differ by at most `ratio` and `slack` tokens."""
    cu_seqlens_N = segments.cu_seqlens_N.numpy().astype(np.int64)
    lengths_N = np.diff(cu_seqlens_N)
    order = np.argsort(lengths_N, kind="stable")
    order = order[lengths_N[order] > 0]
    cut, sizes = [], lengths_N[order]
    while len(sizes):
        number = int(np.searchsorted(sizes, ratio * sizes[0] + slack, side="right"))
        cut.append((cu_seqlens_N[order[:number]], sizes[:number]))
        order, sizes = order[number:], sizes[number:]
    groups, place_T, computed = [], np.zeros(len(segments.segment_T), dtype=np.int64), 0
    for starts_R, lengths_R in sorted(cut, key=lambda group: group[0][0]):
        column_L = np.arange(lengths_R[-1])
        valid_RL = column_L < lengths_R[:, None]
        index_RL = starts_R[:, None] + np.where(valid_RL, column_L, 0)
        place_T[index_RL[valid_RL]] = computed + np.flatnonzero(valid_RL)
        computed += valid_RL.size
        in_a_row = bool((np.diff(index_RL.ravel()) == 1).all())
        start = int(index_RL[0, 0]) if in_a_row else None
        groups.append(Group(index_RL=torch.from_numpy(index_RL), valid_RL=torch.from_numpy(valid_RL), start=start))
    as_they_are = np.array_equal(place_T, np.arange(len(place_T)))
    return replace(segments, groups=tuple(groups), place_T=None if as_they_are else torch.from_numpy(place_T))
