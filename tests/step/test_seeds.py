"""Seeds made many at a time are numpy's own."""

from __future__ import annotations

import random

import numpy as np

from brimful.step.seeds import seed_of

_WORDS = (0, 1, 42, 255, 256, 257, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1, 2**32, 2**40 + 3)


def test_seeds_are_those_of_numpy() -> None:
    draw = random.Random(0)
    asked = [(seed, number, *more) for seed in _WORDS for number in _WORDS for more in ((), (0, 0), (3, 1), (0, 2, 5))]
    asked += [
        tuple(draw.getrandbits(draw.choice((4, 20, 32, 33))) for _ in range(draw.randint(2, 5))) for _ in range(500)
    ]
    for words in asked:
        [state] = np.random.SeedSequence(words).generate_state(1, np.uint64)
        assert seed_of(*words) == int(state >> np.uint64(1)), words
