"""Comparison of answers with those of transformers' pipeline."""

from __future__ import annotations

from typing import Any

import pytest

#: Largest difference of a score from the pipeline's, in fp32.
SCORE = 1e-5


def same_objects(found: Any, expected: Any) -> None:
    """The same lists, dictionaries, order of keys and texts; numbers within SCORE, relative where they are above 1."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same_objects(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=SCORE, abs=SCORE)
    else:
        assert found == expected
