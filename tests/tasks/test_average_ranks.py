"""Ranks against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import rankdata

from brimful.tasks.average_ranks import average_ranks


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_ranks_are_those_of_scipy(kind: type) -> None:
    draw = np.random.default_rng(0)
    for size, most in ((1, 3), (2, 1), (50, 7), (1000, 40), (1000, 10**6)):
        numbers = draw.integers(0, most, size).astype(kind) / (1 if kind is np.int64 else kind(3))
        assert np.array_equal(average_ranks(numbers), rankdata(numbers))
    assert not len(average_ranks(np.zeros(0, kind)))


def test_a_number_that_is_none_leaves_no_rank() -> None:
    assert np.isnan(average_ranks(np.array([1.0, np.nan, 2.0]))).all()
