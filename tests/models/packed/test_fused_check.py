"""Fused layers beside plain ones, on a copy, by interpreted kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from brimful.kernels.layers import prenorm_ops
from brimful.models.packed.fused_check import fused_error
from models.fusion.test_fusion import our_attention, settings_of
from tiny import FAMILIES

__all__ = ["our_attention"]


def error_of(family: str, **more: Any) -> float | None:
    model = FAMILIES[family].model(**settings_of(family) | more)
    form = FAMILIES[family].form
    return fused_error(
        model, form, max_length=24, device=torch.device("cpu"), precision="fp32", kernel=(None, "triton_attention")
    )


def test_layers_that_agree_are_within_their_tolerance() -> None:
    error = error_of("llama")
    assert error is not None
    assert error < 1.0


def test_layers_that_compute_something_else_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    real = prenorm_ops._product
    monkeypatch.setattr(prenorm_ops, "_product", lambda *given: 1.001 * real(*given))
    error = error_of("llama")
    assert error is not None
    assert error > 1.0


def test_layers_that_our_kernels_do_not_cover_have_none() -> None:
    assert error_of("llama", hidden_act="mish") is None
