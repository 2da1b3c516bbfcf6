"""Seeds of dropout by batch, made many at a time: numpy takes 15 us for each, of steps that take 800."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

#: Consecutive batches whose seeds are made together.
_BLOCK = 256
_WORD = 1 << 32
#: Constants and layout of numpy's SeedSequence (O'Neill 2015, "Developing a seed_seq alternative").
_POOL = 4
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT, _SHIFT = 0xCA01F9DD, 0x4973F715, 16
_Words = npt.NDArray[np.uint32]


def seed_of(seed: int, number: int, *more: int) -> int:
    """One 63-bit seed of these numbers, as numpy's `SeedSequence` has it; zeros at their end count for nothing.

    number: of a batch; those of neighbours are made with it.
    """
    words = (seed, number, *more)
    if len(words) > _POOL or max(words) >= _WORD - _BLOCK:
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return _seeds_of(seed, number // _BLOCK, more)[number % _BLOCK]


@lru_cache(maxsize=64)
def _seeds_of(seed: int, block: int, more: tuple[int, ...]) -> list[int]:
    """Return the seeds of `_BLOCK` batches, each word on its way through the sequence for all of them at once."""
    numbers = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint32)
    words = [np.full_like(numbers, seed), numbers, *(np.full_like(numbers, word) for word in more)]
    words += [np.zeros_like(numbers)] * (_POOL - len(words))
    hashed = _Hash(_INIT_A, _MULT_A)
    pool = [hashed(word) for word in words]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed = pool[target] * np.uint32(_MIX_LEFT) - hashed(pool[source]) * np.uint32(_MIX_RIGHT)
                pool[target] = mixed ^ (mixed >> np.uint32(_SHIFT))
    state = _Hash(_INIT_B, _MULT_B)
    low, high = state(pool[0]).astype(np.uint64), state(pool[1]).astype(np.uint64)
    return [int(each) for each in (low | high << np.uint64(32)) >> np.uint64(1)]


class _Hash:
    """The sequence's hash of words, whose constant goes on with each."""

    def __init__(self, start: int, factor: int) -> None:
        self._constant, self._factor = start, factor

    def __call__(self, words: _Words) -> _Words:
        found = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor % _WORD
        found = found * np.uint32(self._constant)
        return found ^ (found >> np.uint32(_SHIFT))
