"""Cuts of batches into padded rows: every sequence once, few shapes, no more work than Trainer's one padded batch."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.data.batches.padding import MAX_LENGTHS, ROW_TILE, PaddedShapes, choose_lengths, cut

SHAPES = PaddedShapes(lengths=None, num_tokens=1 << 14, num_rows=32, call_tokens=100)
batches = st.lists(st.integers(1, 300), min_size=1, max_size=32)
shapes = st.builds(
    PaddedShapes,
    lengths=st.none() | st.just((16, 40, 120, 300)),
    num_tokens=st.sampled_from([300, 1000, 1 << 14]),
    num_rows=st.just(32),
    call_tokens=st.sampled_from([0, 100, 100_000]),
)


@given(batches, shapes)
def test_each_sequence_is_in_a_row_that_holds_it(lengths: list[int], shapes: PaddedShapes) -> None:
    found = cut(lengths, shapes)
    assert sorted(i for _, _, members in found for i in members) == list(range(len(lengths)))
    for rows, length, members in found:
        assert len(members) <= rows <= 32
        assert rows * length <= shapes.num_tokens
        assert max(lengths[i] for i in members) <= length
        assert shapes.lengths is not None or rows == len(members)


@given(batches)
def test_a_batch_costs_no_more_than_one_padded_to_its_longest(lengths: list[int]) -> None:
    found = cut(lengths, SHAPES)
    cost = sum(rows * length + SHAPES.call_tokens for rows, length, _ in found)
    assert cost <= len(lengths) * max(lengths) + SHAPES.call_tokens


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7))
def test_no_other_cut_costs_less(lengths: list[int]) -> None:
    """Of cuts into neighbours in order of length, by trying them all."""
    ordered, shapes = sorted(lengths), dataclasses.replace(SHAPES, call_tokens=17)
    found = sum(rows * length + 17 for rows, length, _ in cut(lengths, shapes))
    ways = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(ordered)), number) for number in range(len(ordered))
    )
    edges = ([0, *way, len(ordered)] for way in ways)
    costs = (sum((b - a) * ordered[b - 1] + 17 for a, b in itertools.pairwise(each)) for each in edges)
    assert found == min(costs)


def test_short_texts_are_one_micro_batch_where_a_call_costs_more_than_padding() -> None:
    lengths = np.random.default_rng(0).integers(4, 33, 32)
    assert len(cut(lengths, dataclasses.replace(SHAPES, call_tokens=2600))) == 1
    assert len(cut(lengths, dataclasses.replace(SHAPES, call_tokens=10))) > 1


def test_a_sequence_longer_than_every_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="301 tokens are more than the longest row, 300"):
        cut([5, 301], dataclasses.replace(SHAPES, lengths=(16, 300)))


@given(st.integers(1, 700), st.integers(0, 2**16), st.booleans())
def test_row_lengths_are_few_and_hold_the_longest(longest: int, seed: int, seen: bool) -> None:
    random = np.random.default_rng(seed)
    seen_N = random.integers(1, longest + 1, (6, 32)) if seen else np.ones((2, 32), dtype=np.int64)
    lengths, fill = choose_lengths(list(seen_N), longest, SHAPES)
    assert list(lengths) == sorted(set(lengths))
    assert len(lengths) <= MAX_LENGTHS
    assert lengths[-1] == longest
    assert all(length % ROW_TILE == 0 for length in lengths[:-1])
    assert 0 < fill <= 1


def test_row_lengths_are_those_that_batches_are_padded_to() -> None:
    """Batches whose longest sequences are alike fill rows as they do when each is padded to its own longest."""
    random = np.random.default_rng(1)
    seen = [random.integers(8, 30, 32) for _ in range(50)]
    lengths, fill = choose_lengths(seen, 512, dataclasses.replace(SHAPES, call_tokens=5000))
    own = sum(map(sum, seen)) / sum(32 * max(each) for each in seen)
    assert lengths[-1] == 512
    assert fill > 0.9 * own
