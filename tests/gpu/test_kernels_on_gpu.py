"""The variable-length kernels of the GPU against the plain T x T attention, forward and backward."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from brimful.kernels.attention.dispatch import (
    Attention,
    efficient_attention,
    flash_attention,
    grouped_attention,
    reference_attention,
    triton_attention,
)
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import PackedShape, make_segments, map_tensors, with_groups
from brimful.levers.facts import MARGIN, measure_attention
from brimful.step.precision import Precision

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
LENGTHS = [5, 130, 1, 64, 17]


def outputs_and_gradients(
    attend: Attention, dtype: torch.dtype, pattern: Pattern, heads: tuple[int, int], typical_length: int = 30
) -> torch.Tensor:
    shape = PackedShape(num_tokens=512, num_slots=8, max_length=160, typical_length=typical_length)
    segments = with_groups(make_segments(LENGTHS, shape))
    segments = map_tensors(segments, lambda t: t.cuda())
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(heads[0], 512, 64), (heads[1], 512, 64), (heads[1], 512, 64), (heads[0], 512, 64)]
    q, k, v, g = (torch.randn(s, device="cuda", generator=generator).to(torch.bfloat16).to(dtype) for s in shapes)
    inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
    out = attend(*inputs, segments, pattern)
    gradients = torch.autograd.grad(out, inputs, g)
    return torch.cat([x.double().flatten() for x in (out, *gradients)])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(
    ("attend", "dtype"),
    [
        (flash_attention, torch.bfloat16),
        (flash_attention, torch.float16),
        (triton_attention, torch.bfloat16),
        (triton_attention, torch.float16),
        (triton_attention, torch.float32),
        (efficient_attention, torch.float32),
        (grouped_attention, torch.float32),
    ],
)
def test_equal_to_reference(
    attend: Attention, dtype: torch.dtype, window: int | None, causal: bool, heads: tuple[int, int]
) -> None:
    if attend is efficient_attention and window is not None:
        return  # never chosen: it has no window
    pattern = Pattern(scale=0.125, causal=causal, window=window)
    torch.set_float32_matmul_precision("highest")
    expected = outputs_and_gradients(reference_attention, torch.float64, pattern, heads)
    found = outputs_and_gradients(attend, dtype, pattern, heads)
    assert float((found - expected).detach().norm() / expected.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_segments(dtype: torch.dtype) -> None:
    """With the tiles of long segments too, and the same bits again."""
    pattern = Pattern(scale=0.125)
    expected = outputs_and_gradients(reference_attention, torch.float64, pattern, (4, 4))
    found = outputs_and_gradients(triton_attention, dtype, pattern, (4, 4), 200)
    again = outputs_and_gradients(triton_attention, dtype, pattern, (4, 4), 200)
    assert float((found - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    assert torch.equal(found, again)


@pytest.mark.parametrize("typical_length", [33, 400, 3000])
@pytest.mark.parametrize("sizes", [(384, 12), (768, 12), (1024, 8)], ids=["minilm", "base", "heads of 128"])
def test_kernels_are_timed(sizes: tuple[int, int], typical_length: int, tmp_path_factory: pytest.TempPathFactory,
                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Both kernels are, what was found is kept, and the other one is taken where it is faster by the margin."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    config = BertConfig(hidden_size=sizes[0], num_attention_heads=sizes[1], num_hidden_layers=1, vocab_size=50)
    found = [
        measure_attention(
            BertForSequenceClassification(config),
            Precision(value="bf16", device=torch.device("cuda"), reason="a test"),
            typical_length,
        )
        for _ in range(2)
    ]
    assert found[0] is not None
    assert found[0] == found[1]  # kept
    ours, flash = (float(re.search(rf"([\d.e+-]+) ms by {name}", found[0].said)[1])  # type: ignore[index]
                   for name in ("ours", "FlashAttention-2"))  # fmt: skip
    share = ours / (MARGIN * flash)
    if not 0.99 < share < 1.01:  # said to three digits
        assert found[0].fastest == ("triton_attention" if share < 1 else "flash_attention")


def test_flash_dropout_differs_and_repeats() -> None:
    pattern = Pattern(scale=0.125, dropout=0.1)
    torch.manual_seed(1)
    first = outputs_and_gradients(flash_attention, torch.bfloat16, pattern, (4, 4))
    second = outputs_and_gradients(flash_attention, torch.bfloat16, pattern, (4, 4))
    torch.manual_seed(1)
    again = outputs_and_gradients(flash_attention, torch.bfloat16, pattern, (4, 4))
    assert not torch.equal(first, second)
    size = 4 * 512 * 64  # outputs only: flash's own backward adds in any order
    assert torch.equal(first[:size], again[:size])
