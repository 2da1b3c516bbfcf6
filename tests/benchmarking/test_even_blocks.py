"""Batches dealt to the blocks of a bench: all of them once, blocks alike in their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from brimful.benchmarking.even_blocks import even_blocks
from brimful.core.bench import Steps
from brimful.data.batches.batch import Sampler


@pytest.mark.parametrize(("warm_up", "repeats", "block"), [(2, 5, 2), (0, 5, 1), (3, 4, 7), (1, 1, 6)])
def test_timed_batches_change_places_within_them(warm_up: int, repeats: int, block: int) -> None:
    order, steps = Sampler(num_samples=80, batch_size=8, seed=1), Steps(warm_up=warm_up, repeats=repeats, block=block)
    lengths = np.random.default_rng(0).integers(5, 512, size=80)
    even = even_blocks(order, lengths, steps)
    assert sorted(even.numbers) == list(range(steps.total))
    assert list(even.numbers[:warm_up]) == list(range(warm_up))
    assert np.array_equal(even.samples(steps.total), order.samples(steps.total))
    batches = {tuple(order.samples(number)) for number in range(steps.total)}
    assert {tuple(even.samples(number)) for number in range(steps.total)} == batches


def test_blocks_have_as_many_tokens_as_one_another() -> None:
    order, steps = Sampler(num_samples=2048, batch_size=8, seed=42), Steps(warm_up=2, repeats=5, block=2)
    lengths = np.random.default_rng(0).integers(20, 512, size=2048)

    def spread(sampler: Sampler) -> float:
        numbers = np.arange(steps.warm_up, steps.total).reshape(steps.repeats, steps.block)
        tokens = [sum(lengths[sampler.samples(int(number))].sum() for number in block) for block in numbers]
        return float((max(tokens) - min(tokens)) / np.median(tokens))

    assert spread(even_blocks(order, lengths, steps)) < 0.5 * spread(order)
