"""GPU tests are run by hand: python -m pytest tests/gpu -m gpu."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are shown, and are no errors: the torch and Triton beside a GPU are others than the suite is held to."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
