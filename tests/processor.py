"""Marks of tests for what not every processor has."""

from __future__ import annotations

import pytest
import torch

#: Of tests in bf16: without units for it, torch computes it many times as slowly, and oneDNN not at all.
in_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no products in bf16"
)
