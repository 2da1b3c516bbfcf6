"""A GPU that a CPU stands in for: a test fails where something was not waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pretend_gpu import PretendGpu, pretended


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretended() as found:
        yield found
    assert not found.races.found, "\n".join(found.races.found)
    assert found.races.num_crossings
