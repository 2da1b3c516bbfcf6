"""Ends of windows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from brimful.engine.classification.request import Texts
from brimful.engine.classification.windows import WindowSize


def sizes(windows: WindowSize, *lengths: int) -> list[int]:
    texts = Texts(texts=pa.array(["x" * length for length in lengths], pa.large_string()))
    found = list(windows.cut(texts))
    assert pa.concat_arrays([each.texts for each in found]) == texts.texts
    return [len(each) for each in found]


def test_windows_end_at_rows_and_with_the_text_that_reaches_the_bytes() -> None:
    windows = WindowSize(num_rows=4, num_bytes=10)
    assert sizes(windows, *[1] * 10) == [4, 4, 2]
    assert sizes(windows, 5, 4, 1, 1, 20, 3) == [3, 2, 1]


@pytest.mark.parametrize(("device", "expected"), [("cuda", 8), ("cpu", 1)])
def test_the_first_windows_of_texts_in_memory_are_smaller_on_a_gpu(device: str, expected: int) -> None:
    whole = WindowSize.on(device, sequences_per_row=1)
    found = sizes(whole, *[1] * (3 * whole.num_rows))
    assert found[0] == whole.num_rows // expected
    assert sum(found) == 3 * whole.num_rows
    assert found[-2] == whole.num_rows
    assert sizes(WindowSize(num_rows=1, num_bytes=1, first_part=8), 3, 3) == [1, 1]
