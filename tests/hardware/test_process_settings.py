"""Torch's precision of products is borrowed and given back, whichever of its two settings a process has used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from brimful.hardware.process_settings import deterministic, matmul_precision, products_are_full

BACKENDS: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def settings() -> tuple[str, ...]:
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "mixed"
    return old, *(backend.fp32_precision for backend in BACKENDS)


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in BACKENDS:
        backend.fp32_precision = "none"


@pytest.mark.parametrize("asked", ["highest", "high"])
@pytest.mark.parametrize("user", ["nothing", "new", "old", "both"])
def test_it_is_given_back(user: str, asked: Any) -> None:
    """As by `TrainingArguments(tf32=True)`, after which the old setting cannot be read."""
    if user in ("old", "both"):
        torch.set_float32_matmul_precision("high" if user == "old" else "highest")
    if user in ("new", "both"):
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    before = settings()
    with matmul_precision(asked):
        assert torch.get_float32_matmul_precision() == asked
        assert products_are_full() is (asked == "highest")
    assert settings() == before
    if user == "new":  # what followed the setting for all backends follows it again
        torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
        assert products_are_full()


@pytest.mark.parametrize("user", ["nothing", "ieee", "tf32"])
def test_what_a_block_sets_ends_with_it(user: str) -> None:
    """As a Trainer that compiles, for all backends."""
    if user != "nothing":
        torch.backends.fp32_precision = user  # type: ignore[attr-defined]
    before = settings()
    with matmul_precision("highest"):
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    assert settings() == before
    assert products_are_full() is (user != "tf32")


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_deterministic_kernels_are_asked_for_within(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    before = torch.get_deterministic_debug_mode()
    with deterministic(True):
        assert os.environ[name] == (own or ":4096:8")
        assert torch.are_deterministic_algorithms_enabled()
    assert os.environ.get(name) == own
    assert torch.get_deterministic_debug_mode() == before
