"""Sizes in options."""

from __future__ import annotations

import pytest

from brimful.core.errors import OptionError
from brimful.core.options import ClassifyOptions, TrainOptions
from brimful.core.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB", 8 * 10**9), ("8 gb", 8 * 10**9), ("8G", 8 * 10**9), ("7.5GiB", 15 << 29), ("500MB", 500 * 10**6),
        ("1KiB", 1024), ("1000000", 10**6), ("64b", 64), ("2TiB", 2 << 40),
    ],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "8XB", "-1GB", "8iB", "1e9", "8GB8", "nan"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize("given", ["much", "0GB"])
def test_options_say_what_a_size_is(given: str) -> None:
    with pytest.raises(OptionError, match=r"--memory-limit is .*: it must be a size, as 8GB"):
        TrainOptions(data="d", model="m", output="o", memory_limit=given)
    with pytest.raises(OptionError, match=r"--memory-limit is .*: it must be a size, as 8GB"):
        ClassifyOptions(data="d", model="m", memory_limit=given)
