"""GPU tests are run by hand: python -m pytest tests/gpu -m gpu."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of the torch and Triton that stand beside a GPU are theirs: they are shown, and no errors."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
