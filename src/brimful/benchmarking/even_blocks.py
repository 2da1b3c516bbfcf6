"""Batches dealt to the timed blocks of a bench, so that their times tell of a row's speed and not of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brimful.core.bench import Steps
from brimful.data.batches.batch import Sampler


@dataclass(frozen=True, kw_only=True)
class EvenBlocks(Sampler):
    """The batches of a `Sampler`, of which the first change places. numbers: of the batch in each of these places."""

    numbers: Sequence[int]

    def samples(self, number: int) -> np.ndarray:
        """Dataset indices of the samples of the batch in place `number`."""
        return super().samples(self.numbers[number] if number < len(self.numbers) else number)


def even_blocks(order: Sampler, lengths: np.ndarray, steps: Steps) -> EvenBlocks:
    """Deal the timed batches of `order` to blocks of nearly as many tokens each; those of the warm-up stay.

    lengths: (N,) tokens of each sample. Longest first, forth and back over the blocks. Batches stay as they are, so
    that rows are padded as in training.
    """
    timed = range(steps.warm_up, steps.total)
    tokens = {number: int(lengths[order.samples(number)].sum()) for number in timed}
    longest_first = sorted(timed, key=lambda number: -tokens[number])
    blocks: list[list[int]] = [[] for _ in range(steps.repeats)]
    for start in range(0, len(longest_first), steps.repeats):
        dealt = longest_first[start : start + steps.repeats]
        for block, number in zip(blocks if start // steps.repeats % 2 == 0 else blocks[::-1], dealt, strict=True):
            block.append(number)
    numbers = [*range(steps.warm_up), *(number for block in blocks for number in sorted(block))]
    return EvenBlocks(
        num_samples=order.num_samples, batch_size=order.batch_size, seed=order.seed, numbers=tuple(numbers)
    )
