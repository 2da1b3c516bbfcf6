"""GPU tests are run by hand: python -m pytest tests/gpu -m gpu."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
