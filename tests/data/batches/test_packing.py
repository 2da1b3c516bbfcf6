"""Packing: every sequence once, no budget exceeded, and budgets that are few and close."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.data.batches.packing import MAX_BUDGETS, TILE, Budgets, choose_budgets, pack

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
some_budgets = st.sets(st.integers(60, 400), min_size=1, max_size=5).map(
    lambda tokens: Budgets(tokens=tuple(sorted(tokens)), fill=1.0)
)


@given(some_lengths, some_budgets)
def test_each_sequence_is_packed_once_and_no_budget_is_exceeded(lengths: list[int], budgets: Budgets) -> None:
    found = pack(lengths, budgets)
    assert sorted(i for _, members in found for i in members) == list(range(len(lengths)))
    for budget, members in found:
        assert members
        assert budget == budgets.smallest_for(sum(lengths[i] for i in members))
    assert found == pack(np.array(lengths), budgets)


@given(some_lengths, some_budgets)
def test_as_few_micro_batches_as_fit(lengths: list[int], budgets: Budgets) -> None:
    """First-fit-decreasing needs at most 11/9 of the fewest bins that there could be, and 6/9 (Dosa 2007)."""
    total, largest = sum(lengths), budgets.tokens[-1]
    number = len(pack(lengths, budgets))
    if total <= largest:
        assert number == 1
    else:
        fewest = sum(lengths) / largest  # a lower bound of what is possible; two bins of FFD hold more than one budget
        assert number <= 2 * fewest + 1


def test_short_sequences_fill_what_long_ones_leave() -> None:
    assert [members for _, members in pack([4, 4, 4, 6, 6, 6], Budgets(tokens=(10,), fill=1.0))] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


def test_a_sequence_longer_than_every_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="90 tokens are more than the largest budget, 64"):
        pack([10, 90], Budgets(tokens=(32, 64), fill=1.0))


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(40, 200),
    st.sampled_from([0.0, 20.0, 100.0]),
)
def test_budgets_are_the_best_there_are(batches: list[list[int]], most: int, largest: int, cost: float) -> None:
    """Of all choices: the fewest tokens, and `cost` for each budget."""
    tile, longest = 8, 40
    found = choose_budgets(
        [np.array(b) for b in batches], largest, longest, tile=tile, max_budgets=most, budget_tokens=cost
    )
    ceiling = Budgets(tokens=(largest // tile * tile,), fill=1.0)
    used = [sum(batch[i] for i in members) for batch in batches for _, members in pack(batch, ceiling)]
    sizes = sorted({-(-n // tile) * tile for n in used})
    needed = [] if sizes[-1] >= longest else [longest]  # room for the longest sequence, though none was seen
    room = max(1, most - len(needed))
    costs = []
    for number in range(1, room + 1):
        for chosen in itertools.combinations(sizes, min(number, len(sizes))):
            if chosen[-1] == sizes[-1]:
                costs.append(sum(next(c for c in chosen if c >= n) for n in used) + cost * len(chosen))
    computed = sum(found.smallest_for(n) for n in used)
    assert computed + cost * (len(found.tokens) - len(needed)) == min(costs)
    assert found.fill == pytest.approx(sum(used) / computed)
    assert len(found.tokens) <= room + len(needed)
    assert found.tokens[-1] >= longest
    assert found.tokens[-1] <= largest
    assert all(tokens % tile == 0 for tokens in found.tokens)
    assert list(found.tokens) == sorted(set(found.tokens))


@pytest.mark.parametrize(("largest", "longest", "most"), [(1000, 128, 992), (1000, 999, 1008), (10, 300, 304)])
def test_no_micro_batch_has_more_than_was_allowed(largest: int, longest: int, most: int) -> None:
    """But for one sequence that alone is longer."""
    batches = [np.full(64, length) for length in (20, 100)]
    budgets = choose_budgets(batches, largest, longest)
    assert budgets.tokens[-1] <= most
    assert budgets.tokens[-1] >= longest


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "tweets": lambda random, n: np.clip(random.normal(28, 10, n), 4, 128),
    "sentences": lambda random, n: np.clip(random.geometric(1 / 20, n) + 2, 3, 64),
    "questions": lambda random, n: np.clip(random.lognormal(3.2, 0.5, n), 4, 256),
    "reviews": lambda random, n: np.clip(random.lognormal(4.6, 0.7, n), 8, 512),
    "articles": lambda random, n: np.clip(random.lognormal(5.5, 1.0, n), 8, 512),
    "uniform": lambda random, n: random.integers(10, 512, n),
    "short or cut": lambda random, n: np.where(random.random(n) < 0.3, 512, random.integers(5, 60, n)),
}


@pytest.mark.parametrize("largest", [4096, 32768])
@pytest.mark.parametrize(("batch_size", "least"), [(32, 0.97), (16, 0.94)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_little_is_computed_for_nothing(name: str, batch_size: int, least: float, largest: int) -> None:
    """In the epoch that the budgets were chosen from, and within a hundredth in another one."""
    random = np.random.default_rng(7)
    lengths = DISTRIBUTIONS[name](random, 4000).astype(np.int64)
    budgets = choose_budgets(_batches(lengths, batch_size), largest, 512)
    assert len(budgets.tokens) <= MAX_BUDGETS
    assert all(tokens % TILE == 0 for tokens in budgets.tokens)
    assert budgets.fill >= least
    used = computed = 0
    for batch in _batches(random.permutation(lengths), batch_size):
        for budget, members in pack(batch, budgets):
            computed += budget
            used += int(batch[members].sum())
    assert used == lengths.sum()
    assert used / computed >= least - 0.01


def _batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
