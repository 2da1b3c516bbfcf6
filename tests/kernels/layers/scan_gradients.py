"""Gradients of a scan against those of another way to compute it: the recurrence in fp64, or transformers' loop."""

from __future__ import annotations

import torch
from torch import Tensor

from tolerances import ATTENTION

CLOSE = ATTENTION[torch.float32]


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative, norm over norm."""
    own, other = (x.detach().double().cpu() for x in (found, expected))
    return float((own - other).norm() / other.norm())


def check_gradients(
    found: Tensor, expected: Tensor, mine: dict[str, Tensor], exact: dict[str, Tensor], *, zero: str | None = None,
    close: float = CLOSE,
) -> None:  # fmt: skip
    """Of the same random sum of both results, to within `close`. zero: what has no gradient, in a row without a state
    before it."""
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, x in exact.items():
        own, other = mine[name].grad, x.grad
        assert own is not None
        assert other is not None
        assert own.dtype == mine[name].dtype
        if name == zero:
            assert own.abs().max() < 1e-6
        else:
            assert difference(own, other) < close, name
