"""GPU tests are run by hand: python -m pytest tests/gpu -m gpu. By several processes, those marked alone are skipped:
-m "gpu and alone" runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are shown, and are no errors: the torch and Triton beside a GPU are others than the suite is held to."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is shown at once: time on a GPU may end before the last test does."""
    if report.failed and "gpu" in report.keywords:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


@pytest.fixture(autouse=True)
def _full_products() -> Iterator[None]:
    """TF32, which a Trainer that compiles allows in the whole process, ends with its test: references are in fp32."""
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends, torch.backends.cuda.matmul):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _needs_gpu(request: pytest.FixtureRequest) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) - 1
    if others and request.node.get_closest_marker("alone"):
        pytest.skip(f"measures a GPU that {others} other processes may work on")
