"""Limits: they are measured, and in units that mean something."""

from __future__ import annotations

import pytest
import torch

from brimful.measurement import peaks


def test_limits_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_SECONDS", 0.01)
    monkeypatch.setitem(peaks._SIDE, "cpu", 128)
    monkeypatch.setitem(peaks._COPIED_BYTES, "cpu", 1 << 20)
    shapes = {(64, 32): 4, (32, 64): 2}
    found = peaks.measure_limits(torch.device("cpu"), torch.float32, shapes=shapes, num_tokens=16)
    assert 1e7 < found.matmul_flops_per_s < 1e14
    assert found.model_matmul_flops_per_s is not None
    assert 1e5 < found.model_matmul_flops_per_s < 1e14
    assert 1e6 < found.copy_bytes_per_s < 1e13
    assert found.datasheet_flops_per_s is None


def test_a_model_without_known_shapes_has_no_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_SECONDS", 0.001)
    monkeypatch.setitem(peaks._SIDE, "cpu", 16)
    monkeypatch.setitem(peaks._COPIED_BYTES, "cpu", 1 << 10)
    found = peaks.measure_limits(torch.device("cpu"), torch.float32, shapes={}, num_tokens=16)
    assert found.model_matmul_flops_per_s is None
