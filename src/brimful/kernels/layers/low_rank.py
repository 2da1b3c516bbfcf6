"""The product that a low-rank adapter (LoRA) adds to a Linear layer, with its gradients written out.

It is given to the function that the layer's product is part of (`postnorm_ops`, `prenorm_ops`), as its `extra`.
Source: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brimful.kernels.forward_context import current
from brimful.kernels.layers.postnorm_ops import Gradients, halved


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        x_TK, down_RK, up_NR = x.flatten(0, -2), down.to(x.dtype), up.to(x.dtype)
        a_TR = (x_TK @ down_RK.t()).mul_(scale)
        ctx.save_for_backward(x_TK, down_RK, up_NR, a_TR)
        ctx.context, ctx.leaf, ctx.scale = current(), down.is_leaf and up.is_leaf, scale
        ctx.dtypes, ctx.shape = (down.dtype, up.dtype), x.shape
        return (a_TR @ up_NR.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, down_RK, up_NR, a_TR = ctx.saved_tensors
        g_TN = gradient.reshape(len(x_TK), -1)
        da_TR = (g_TN @ up_NR).mul_(ctx.scale)

        def parameters() -> Gradients:
            return (da_TR.t() @ x_TK).to(ctx.dtypes[0]), (g_TN.t() @ a_TR).to(ctx.dtypes[1])

        ddown, dup = ctx.context.beside(parameters, da_TR, g_TN, x_TK, a_TR, leaf=ctx.leaf)
        return (da_TR @ down_RK).view(ctx.shape) if ctx.needs_input_grad[0] else None, ddown, dup, None


def low_rank(x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """scale * F.linear(F.linear(x, down), up), (..., N), in the dtype of products. down: (R, K). up: (N, R)."""
    out: Tensor = _LowRank.apply(halved(x), down, up, scale)  # type: ignore[no-untyped-call]
    return out
