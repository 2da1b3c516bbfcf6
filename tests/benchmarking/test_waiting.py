"""Time in which threads waited for a core: from files as Linux has them, written by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from brimful.benchmarking.waiting import thread_times, waiting_share
from brimful.core.bench import is_disturbed


def test_times_of_threads_are_read_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    for name, text in {"7": "100 50 3\n", "8": "20 0 1\n", "9": "no numbers\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()
    assert thread_times(tmp_path) == {"7": (100, 50), "8": (20, 0)}
    assert thread_times(tmp_path / "none") == {}
    assert str(threading.get_native_id()) in thread_times() or thread_times() == {}


def test_the_share_is_of_threads_that_are_still_there() -> None:
    before = {"1": (100, 50), "2": (900, 900)}
    after = {"1": (160, 60), "3": (20, 10)}
    assert waiting_share(before, after) == pytest.approx(20 / 100)
    assert waiting_share({}, {}) is None
    assert waiting_share({}, {"1": (0, 0)}) is None  # counted nowhere


def test_waiting_counts_before_the_time_that_a_process_had() -> None:
    assert is_disturbed(1.9, 2, 0.11)
    assert not is_disturbed(0.5, 2, 0.1)
    assert is_disturbed(1.1, 2, None)
    assert not is_disturbed(1.3, 2, None)
    assert not is_disturbed(None, 2, None)
