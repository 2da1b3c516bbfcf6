"""A bias by distance with nothing behind a query, as T5's decoder has it: by our kernels and their reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brimful.kernels.attention.dispatch import grouped_attention, reference_attention
from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.kernels.layout import PackedShape, make_segments, with_groups
from brimful.models.packed.packed_row import causal
from tolerances import ATTENTION, difference

LENGTHS = np.array([5, 1, 16, 9])


@pytest.mark.parametrize("kernel", ["relative", "grouped"])
def test_causal_bias(kernel: str) -> None:
    """Output, and gradients of queries, keys, values and of the table; no gradient is infinite."""
    segments = with_groups(make_segments(LENGTHS, PackedShape(num_tokens=40, num_slots=4, max_length=16)))
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, 16, generator=random).requires_grad_() for _ in range(3))
    table_HR = torch.randn(2, 7, generator=random).requires_grad_()
    bucket_W = torch.arange(32).clamp(max=16) // 3
    direction = torch.randn(2, 40, 16, generator=random)

    def run(attend: object) -> list[torch.Tensor]:
        bucket, bias_HR = causal(bucket_W, table_HR)
        pattern = Pattern(scale=0.25, relative=RelativeBias(bucket_W=bucket, bias_HR=bias_HR))
        out = attend(q, k, v, segments, pattern)  # type: ignore[operator]
        return [out, *torch.autograd.grad((out * direction).sum(), [q, k, v, table_HR])]

    if kernel == "relative":
        relative_attention = pytest.importorskip("brimful.kernels.attention.distance_bias").relative_attention_HTD
        found = run(relative_attention)
    else:
        found = run(grouped_attention)
    plain = Pattern(scale=0.25, causal=True, relative=RelativeBias(bucket_W=bucket_W, bias_HR=table_HR))
    out = reference_attention(q, k, v, segments, plain)
    expected = [out, *torch.autograd.grad((out * direction).sum(), [q, k, v, table_HR])]
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) < ATTENTION[torch.float32]
