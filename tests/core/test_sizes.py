"""Sizes in options, and numbers in the words of people."""

from __future__ import annotations

import pytest

from brimful.core.errors import OptionError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.train import TrainOptions
from brimful.core.units import amount_text, number_text, parse_bytes, part_text, share_text


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


def test_a_share_is_never_rounded_to_none_or_all() -> None:
    assert [share_text(share) for share in (0, 0.0004, 0.0005, 0.9994, 0.99951, 1)] == [
        "0.0 %", "< 0.1 %", "0.1 %", "99.9 %", "> 99.9 %", "100.0 %",
    ]  # fmt: skip
    assert share_text(20.256) == "2025.6 %"
    assert part_text(3, 1_000_000) == "3 (< 0.1 %)"
    assert part_text(0, 0) == "0"


def test_a_metric_of_zero_has_no_sign() -> None:
    assert number_text(-1e-17) == "0.0000"
    assert number_text(-0.25) == "-0.2500"


def test_an_amount_has_digits_that_say_something() -> None:
    shown = [amount_text(number) for number in (0.0, 7.0498, 0.0123456, 1.2341e-5, 999.94, 62_500_000.2, None)]
    assert shown == ["0.0000", "7.0498", "0.01235", "1.234e-05", "999.9400", "62,500,000", "unknown"]
