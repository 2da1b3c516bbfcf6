"""Layouts: segments cover a row once, sequences come back from it, and what does not fit is said."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brimful.kernels.layout import (
    PackedShape,
    make_segments,
    map_tensors,
    pack_numbers,
    packed_inputs,
    padded_inputs,
    tensors_of,
    unpack_numbers,
    with_groups,
)
from tiny import pair_types, sequences

PADDING = 0

lengths_and_shapes = st.lists(st.integers(1, 30), min_size=1, max_size=10).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths),
        st.builds(
            PackedShape,
            num_tokens=st.integers(sum(lengths), sum(lengths) + 100),
            num_slots=st.integers(len(lengths), len(lengths) + 4),
            max_length=st.integers(max(lengths), 40),
        ),
    )
)


@given(lengths_and_shapes)
def test_segments_cover_a_row_once(case: tuple[list[int], PackedShape]) -> None:
    lengths, shape = case
    segments = make_segments(lengths, shape)
    offsets = segments.cu_seqlens_N.tolist()
    assert segments.cu_seqlens_N.dtype == torch.int32
    assert len(offsets) == shape.num_segments + 1  # whatever the sequences are: kernels are captured with it
    assert (offsets[0], offsets[-1]) == (0, shape.num_tokens)
    sizes = np.diff(offsets)
    assert sizes[: len(lengths)].tolist() == lengths
    assert not sizes[len(lengths) : shape.num_slots].any()
    assert sizes.min() >= 0
    assert sizes.max() <= segments.max_length == shape.max_length
    assert segments.segment_T.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()


@given(lengths_and_shapes)
def test_sequences_come_back_from_a_packed_row(case: tuple[list[int], PackedShape]) -> None:
    lengths, shape = case
    ids = sequences(lengths)
    types = pair_types(ids)
    row = packed_inputs(ids, shape, padding_id=PADDING, types=types, groups=True)
    assert row.num_tokens == row.ids_T.numel() == shape.num_tokens
    assert row.types_T is not None
    for slot, sequence in enumerate(ids):
        place = slice(int(row.first_S[slot]), int(row.last_S[slot]) + 1)
        assert row.ids_T[place].tolist() == sequence.tolist()
        assert row.types_T[place].tolist() == types[slot].tolist()
        assert row.positions_T[place].tolist() == list(range(len(sequence)))
    assert not row.first_S[len(ids) :].any()
    assert not row.last_S[len(ids) :].any()
    assert (row.ids_T[sum(lengths) :] == PADDING).all()
    assert int(row.positions_T.max()) < shape.max_length


@given(lengths_and_shapes, st.booleans())
def test_numbers_unpack_to_the_packed_inputs(case: tuple[list[int], PackedShape], with_types: bool) -> None:
    """Segments are found by search on the device that they arrive at."""
    lengths, shape = case
    ids = sequences(lengths)
    ids[0][-1] = PADDING
    types = pair_types(ids) if with_types else None
    numbers = pack_numbers(
        np.concatenate(ids),
        np.array(lengths),
        shape,
        padding_id=PADDING,
        types=None if types is None else np.concatenate(types),
    )
    found: list[torch.Tensor] = []
    for inputs in (unpack_numbers(numbers, shape), packed_inputs(ids, shape, padding_id=PADDING, types=types)):
        map_tensors(inputs, found.append)
        assert inputs.segments.max_length == shape.max_length
        positions = [place for length in lengths for place in range(length)]
        assert inputs.positions_T[: sum(lengths)].tolist() == positions
        assert (inputs.types_T is None) == (types is None)
        if types is not None and inputs.types_T is not None:
            assert inputs.types_T[: sum(lengths)].tolist() == np.concatenate(types).tolist()
    middle = len(found) // 2
    for one, other in zip(found[:middle], found[middle:], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_full_rows_that_stand_in_a_row_are_not_gathered() -> None:
    shape = PackedShape(num_tokens=32, num_slots=3, max_length=8)
    even = with_groups(make_segments([8, 8, 8], shape))  # and a tail of 8
    assert [(tuple(group.index_RL.shape), group.start) for group in even.groups] == [((4, 8), 0)]
    assert even.place_T is None
    uneven = with_groups(make_segments([8, 5, 8], PackedShape(num_tokens=32, num_slots=3, max_length=16)))
    assert [group.start for group in uneven.groups] == [None]  # the tail is one of 11
    assert uneven.place_T is not None
    ends = with_groups(make_segments([64, 64, 2, 2], PackedShape(num_tokens=132, num_slots=4, max_length=64)))
    assert [group.start for group in ends.groups] == [0, 128]
    assert ends.place_T is None


@given(lengths_and_shapes)
def test_groups_hold_each_token_once(case: tuple[list[int], PackedShape]) -> None:
    lengths, shape = case
    segments = with_groups(make_segments(lengths, shape))
    flat = torch.cat([group.index_RL.flatten() for group in segments.groups])
    valid = torch.cat([group.valid_RL.flatten() for group in segments.groups])
    assert flat[valid].sort().values.tolist() == list(range(shape.num_tokens))
    place_T = torch.arange(len(flat)) if segments.place_T is None else segments.place_T
    assert flat[place_T].tolist() == list(range(shape.num_tokens))
    assert valid[place_T].all()
    for group in segments.groups:
        row_lengths = group.valid_RL.sum(1)
        assert float(row_lengths.max()) <= 1.25 * float(row_lengths.min()) + 8
        assert len(set(segments.segment_T[group.index_RL].unique(dim=1).shape)) <= 2
        owners = segments.segment_T[group.index_RL]
        assert (owners == owners[:, :1]).all()  # padding is the row's own: nothing of another sequence is touched


def test_the_slot_of_a_text_that_ends_in_padding() -> None:
    """Decoders read the last token that is not padding, found by its id; a text may end in that id, or be all of it."""
    ids = [np.array([7, 8, 0, 0]), np.array([0, 0]), np.array([0, 5, 0])]
    row = packed_inputs(ids, PackedShape(num_tokens=12, num_slots=3, max_length=8), padding_id=0)
    assert row.first_S.tolist() == [0, 4, 6]
    assert row.last_S.tolist() == [1, 4, 7]


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([5, 6], PackedShape(num_tokens=10, num_slots=2, max_length=8)),
        ([1, 1, 1], PackedShape(num_tokens=10, num_slots=2, max_length=8)),
        ([9], PackedShape(num_tokens=10, num_slots=2, max_length=8)),
    ],
)
def test_what_does_not_fit_a_packed_row(lengths: list[int], shape: PackedShape) -> None:
    with pytest.raises(ValueError, match=rf"{len(lengths)} sequences of {sum(lengths)} tokens do not fit"):
        packed_inputs(sequences(lengths), shape, padding_id=PADDING)


def test_a_sequence_of_no_tokens_does_not_fit() -> None:
    ids, shape = sequences([3, 2]), PackedShape(num_tokens=10, num_slots=3, max_length=8)
    ids.insert(1, np.array([]))
    with pytest.raises(ValueError, match="of 3 sequences one is empty"):
        packed_inputs(ids, shape, padding_id=PADDING)
    with pytest.raises(ValueError, match="of 3 sequences one is empty"):
        pack_numbers(np.concatenate(ids), np.array([3, 0, 2]), shape, padding_id=PADDING)


@pytest.mark.parametrize(("lengths", "num_rows", "length"), [([3, 3], 1, 4), ([5], 2, 4), ([], 2, 4)])
def test_what_does_not_fit_padded_rows(lengths: list[int], num_rows: int, length: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        padded_inputs(sequences(lengths), num_rows, length, padding_id=PADDING)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 4))
def test_sequences_come_back_from_padded_rows(lengths: list[int], spare_rows: int, spare: int) -> None:
    ids = sequences(lengths)
    types = pair_types(ids)
    rows = padded_inputs(ids, len(ids) + spare_rows, max(lengths) + spare, padding_id=PADDING, types=types)
    assert rows.types_RL is not None
    assert rows.num_tokens == (len(ids) + spare_rows) * (max(lengths) + spare)
    for row, (sequence, kinds) in enumerate(zip(ids, types, strict=True)):
        used = len(sequence)
        assert rows.ids_RL[row, :used].tolist() == sequence.tolist()
        assert rows.types_RL[row, :used].tolist() == kinds.tolist()
        assert rows.mask_RL[row].tolist() == [1] * used + [0] * (rows.mask_RL.shape[1] - used)
        assert (rows.ids_RL[row, used:] == PADDING).all()
    for row in range(len(ids), len(ids) + spare_rows):
        assert torch.equal(rows.ids_RL[row], rows.ids_RL[0])
        assert torch.equal(rows.mask_RL[row], rows.mask_RL[0])


def test_map_reaches_every_tensor() -> None:
    seen: list[torch.Tensor] = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.clone()

    ids = sequences([3, 9, 30])
    shape = PackedShape(num_tokens=50, num_slots=4, max_length=32)
    row = packed_inputs(ids, shape, padding_id=PADDING, types=pair_types(ids), groups=True)
    copy = map_tensors(row, change)
    assert len(seen) == 5 + 3 + 2 * len(row.segments.groups)
    assert all(one is other for one, other in zip(tensors_of(row), seen, strict=True))
    assert copy.segments.groups[0].index_RL is not row.segments.groups[0].index_RL
    assert (copy.num_tokens, copy.segments.max_length) == (50, 32)
    bare: Any = map_tensors(packed_inputs(ids, shape, padding_id=PADDING), change)
    assert bare.types_T is None
    assert bare.segments.place_T is None


@pytest.mark.thorough
def test_a_row_on_the_host_wakes_no_threads() -> None:
    """torch would start one a core, which spin from one batch of a loop to the next."""
    code = """
import os
import numpy as np
import torch
from brimful.kernels.layout import PackedShape, packed_inputs
ids = [np.full(500, 7)] * 80
before = len(os.listdir("/proc/self/task"))
packed_inputs(ids, PackedShape(num_tokens=41000, num_slots=80, max_length=512), padding_id=0, types=ids)
print(len(os.listdir("/proc/self/task")) - before)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
