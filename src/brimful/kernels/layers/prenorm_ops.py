"""Pieces of pre-norm layers with their gradients written out, beside those of `postnorm_ops`: the same rules hold.

In these layers one stream of residuals is added to and never normalised itself. It is fp32; what the norms make of it
is read by products only, and exists in their dtype only. Where the stream forks, the fork is part of a function, so
that both gradients meet in its kernel. A gradient of the stream carries its half-precision copy to the product before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brimful.kernels.attention import qkv_rope
from brimful.kernels.attention.pattern import Heads
from brimful.kernels.attention.qkv_rope import HeadNorm
from brimful.kernels.attention.varlen import attended, attended_backward
from brimful.kernels.forward_context import current
from brimful.kernels.layers import dropout_add_prenorm, glu
from brimful.kernels.layers.postnorm_ops import (
    Gradients,
    _are_learned,
    _weight_gradients,
    extra_gradients,
    gradient_dtype,
    halved,
    kept_for,
    product_dtype,
    side_by_side,
    with_extras,
)
from brimful.kernels.remade import known_ending, note_maker, offer_ending

Parameters = Sequence[Tensor | None]


def _product(x_TK: Tensor, w_NK: Tensor, bias: Tensor | None) -> Tensor:
    return x_TK @ w_NK.t() if bias is None else torch.addmm(bias.to(x_TK.dtype), x_TK, w_NK.t())


class _Projections:
    """Linear layers of one input as one product, and the gradients of their parameters, and of others with them."""

    def __init__(self, weights: Parameters, biases: Parameters, others: Parameters = ()) -> None:
        given = [each for each in (*weights, *biases, *others) if each is not None]
        self.leaf = all(each.is_leaf for each in given)
        self.others_learned = _are_learned(*others)
        self.context = current()
        self.rows = [len(weight) for weight in weights if weight is not None]
        self.dtypes = (gradient_dtype(weights) or given[0].dtype, gradient_dtype(biases))

    @staticmethod
    def product(
        x_TK: Tensor, weights: Parameters, biases: Parameters, extras: Parameters = ()
    ) -> tuple[Tensor, Tensor]:
        """The product (T, N) with what is added to it, and the weights (N, K) that it was made with."""
        w_NK = side_by_side(weights, x_TK.dtype)
        made_TN = _product(x_TK, w_NK, None if biases[0] is None else side_by_side(biases, x_TK.dtype))
        return with_extras(made_TN, weights, extras), w_NK

    def gradients(
        self, g_TN: Tensor, x_TK: Tensor | None, *others: Tensor, more: Callable[[], Gradients] = tuple
    ) -> Gradients:
        """Of all weights, of all biases, and what `more` makes of `others`, computed beside: None of what is frozen.

        x_TK: as of `kept_for`.
        """
        nothing = (None,) * len(self.rows)

        def parameters() -> Gradients:
            if x_TK is None:
                return *nothing, *nothing, *more()
            dweight, dbias = _weight_gradients(g_TN, x_TK, *self.dtypes, in_fp8=False)
            dbiases = nothing if dbias is None else dbias.split(self.rows)
            return *dweight.split(self.rows), *dbiases, *more()

        read = others if x_TK is None else (x_TK, *others)
        return self.context.beside(parameters, g_TN, *read, leaf=self.leaf)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        rows = x.contiguous()
        z, y, statistics = dropout_add_prenorm.fused_add_norm(
            None, rows, gain, product_dtype(x), rows, 0, eps, 0.0, centred=centred
        )
        ctx.save_for_backward(z, gain, statistics)
        ctx.context, ctx.dtype, ctx.centred, ctx.leaf = current(), y.dtype, centred, gain.is_leaf
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> Gradients:
        z, gain, statistics = ctx.saved_tensors
        dx, half, partials = dropout_add_prenorm.fused_add_norm_backward(
            dy.contiguous(), dz.contiguous(), z, gain, statistics, ctx.dtype, z, 0, 0.0, centred=ctx.centred
        )
        dgain = None
        if ctx.needs_input_grad[1]:
            dgain = ctx.context.beside(
                lambda: dropout_add_prenorm.gain_gradient(partials, gain.dtype), partials, leaf=ctx.leaf
            )
        return dx if half is dx else ctx.context.with_cast(dx, half), dgain, None, None


def norm(x: Tensor, gain: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The norm of x in the dtype of products, and x for its other readers.

    centred: F.layer_norm(x, ..., gain, None, eps), else F.rms_norm(x, ..., gain, eps).
    """
    out: tuple[Tensor, Tensor] = _Norm.apply(x, gain, eps, centred)  # type: ignore[no-untyped-call]
    return out


class _LinearAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float, p: float,
        centred: bool, extra: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x_TK, ctx.shape = x.flatten(0, -2), x.shape
        h_TH, w_HK = _Projections.product(x_TK, [weight], [bias], [extra])
        seed, ctx.site = current().dropout_site(x_TK, len(x_TK), p)
        z, y, statistics = dropout_add_prenorm.fused_add_norm(
            h_TH, _fitting(residual, h_TH), gain, h_TH.dtype, seed, ctx.site, eps, p, centred=centred
        )
        ctx.save_for_backward(kept_for(x_TK, weight, bias), w_HK, z, gain, statistics, seed)
        ctx.projections = _Projections([weight], [bias], [gain])
        ctx.p, ctx.centred, ctx.dtype, ctx.half = p, centred, residual.dtype, x.dtype
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> Gradients:
        x_TK, w_HK, z, gain, statistics, seed = ctx.saved_tensors
        dresidual, dh, partials = dropout_add_prenorm.fused_add_norm_backward(
            dy.contiguous(), dz.contiguous(), z, gain, statistics, ctx.half, seed, ctx.site, ctx.p,
            centred=ctx.centred,
        )  # fmt: skip
        dh_TH = dh.flatten(0, -2)

        def of_gain() -> Gradients:
            learned = ctx.projections.others_learned
            return (dropout_add_prenorm.gain_gradient(partials, gain.dtype) if learned else None,)

        dweight, dbias, dgain = ctx.projections.gradients(dh_TH, x_TK, partials, more=of_gain)
        dx = (dh_TH @ w_HK).view(ctx.shape)
        dextra = dh_TH.view(dresidual.shape) if ctx.needs_input_grad[8] else None
        return dx, dweight, dbias, dresidual.to(ctx.dtype), dgain, None, None, None, dextra


def linear_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float, p: float, centred: bool,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm, as of `norm`, of z = residual + F.dropout(F.linear(x, weight, bias) + extra, p); and z."""
    out: tuple[Tensor, Tensor] = _LinearAddNorm.apply(  # type: ignore[no-untyped-call]
        halved(x), weight, bias, residual, gain, eps, current().probability(p), centred, extra
    )
    return out


class _LinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, p: float, extra: Tensor | None
    ) -> Tensor:  # fmt: skip
        x_TK, ctx.shape = x.flatten(0, -2), x.shape
        seed, ctx.site = current().dropout_site(x_TK, len(x_TK), p)
        ctx.p, ctx.projections, ctx.dtype, ctx.half = p, _Projections([weight], [bias]), residual.dtype, x.dtype
        kept = kept_for(x_TK, weight, bias)
        if known_ending() is not None:  # nobody reads these sums
            ctx.save_for_backward(kept, side_by_side([weight], x_TK.dtype), seed)
            return torch.empty_like(residual, dtype=torch.promote_types(residual.dtype, x_TK.dtype))
        h_TH, w_HK = _Projections.product(x_TK, [weight], [bias], [extra])
        ctx.save_for_backward(kept, w_HK, seed)
        z = dropout_add_prenorm.fused_add(h_TH, _fitting(residual, h_TH), seed, ctx.site, p)
        offer_ending(z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Gradients:
        x_TK, w_HK, seed = ctx.saved_tensors
        if ctx.p:
            dh = dropout_add_prenorm.fused_dropped(dz.contiguous(), ctx.half, seed, ctx.site, ctx.p)
        else:
            dh = ctx.projections.context.cast(dz, ctx.half)
        dh_TH = dh.flatten(0, -2).contiguous()
        dweight, dbias = ctx.projections.gradients(dh_TH, x_TK)
        dextra = dh_TH.view(dz.shape) if ctx.needs_input_grad[5] else None
        return (dh_TH @ w_HK).view(ctx.shape), dweight, dbias, dz.to(ctx.dtype), None, dextra


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, p: float, extra: Tensor | None = None
) -> Tensor:
    """residual + F.dropout(F.linear(x, weight, bias) + extra, p), in the dtype that such a sum has."""
    out: Tensor = _LinearAdd.apply(  # type: ignore[no-untyped-call]
        halved(x), weight, bias, residual, current().probability(p), extra
    )
    return out


def _fitting(residual: Tensor, h_TH: Tensor) -> Tensor:
    """A residual of as many rows as a product, contiguous."""
    if residual.numel() != h_TH.numel():
        raise ValueError(f"a residual of shape {tuple(residual.shape)} does not fit rows of {tuple(h_TH.shape)}")
    return residual.contiguous()


class _LinearGated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: glu.Activation, p: float, count: int, *parameters: Tensor | None
    ) -> Tensor:
        x_TK, ctx.shape, ctx.count = x.flatten(0, -2), x.shape, count
        weights, biases, extras = parameters[:count], parameters[count : 2 * count], parameters[2 * count :]
        h_TG, w_GK = _Projections.product(x_TK, weights, biases, extras)
        seed, ctx.site = current().dropout_site(x_TK, len(x_TK), p)
        ctx.save_for_backward(kept_for(x_TK, *weights, *biases), w_GK, h_TG, seed)
        ctx.p, ctx.activation, ctx.projections = p, activation, _Projections(weights, biases)
        y_TF = glu.fused_forward(h_TG, activation, seed, ctx.site, p)
        note_maker(y_TF, glu.fused_forward, h_TG, activation, seed, ctx.site, p)
        return y_TF.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, w_GK, h_TG, seed = ctx.saved_tensors
        g_TF = gradient.flatten(0, -2).contiguous()
        dh_TG = glu.fused_backward(g_TF, h_TG, ctx.activation, seed, ctx.site, ctx.p)
        found = ctx.projections.gradients(dh_TG, x_TK)
        rows = ctx.projections.rows[: len(ctx.needs_input_grad) - 4 - 2 * ctx.count]
        dextras = extra_gradients(dh_TG, rows, ctx.shape, ctx, 4 + 2 * ctx.count) if rows else ()
        return (dh_TG @ w_GK).view(ctx.shape), None, None, None, *found, *dextras


def linear_gated(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: glu.Activation, p: float,
    extras: Sequence[Tensor | None] = (),
) -> Tensor:  # fmt: skip
    """F.dropout(activation(a) * b, p), (..., F), of a and b = F.linear(x, ...) + extra, computed as one product.

    weights: of a and of b, or one (2 F, K) of both side by side; and so the biases, and what is added, () for nothing.
    """
    out: Tensor = _LinearGated.apply(  # type: ignore[no-untyped-call]
        halved(x), activation, current().probability(p), len(weights), *weights, *biases, *extras
    )
    return out


class _RotaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, angles: tuple[Tensor, Tensor], offsets: Tensor, each: Heads, settings: Any,
        eps: tuple[float, float], query_gain: Tensor | None, key_gain: Tensor | None, count: int,
        *parameters: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x_TK, ctx.shape, ctx.count = x.flatten(0, -2), x.shape, count
        weights, biases, extras = parameters[:count], parameters[count : 2 * count], parameters[2 * count :]
        x_TN, w_NK = _Projections.product(x_TK, weights, biases, extras)
        ctx.projections = _Projections(weights, biases, [query_gain, key_gain])
        ctx.each, ctx.settings, ctx.eps = each, settings, eps
        found = _head_norm(query_gain, key_gain, eps)
        qkv_T3HD = qkv_rope.fused_forward(x_TN, *angles, each, found)
        q, k, v = qkv_T3HD.transpose(0, 2).unbind(1)
        seed, site = current().dropout_site(offsets, len(x_TK), settings[-1])
        out_HTD: Tensor
        out_HTD, lse, mask_rows = attended(q, k, v, offsets, seed, *settings, site)  # type: ignore[call-arg]
        ctx.save_for_backward(
            kept_for(x_TK, *weights, *biases), w_NK, None if found is None else x_TN, qkv_T3HD, out_HTD, lse, mask_rows,
            offsets, *angles, query_gain, key_gain,
        )  # fmt: skip
        return out_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, w_NK, x_TN, qkv_T3HD, out_HTD, lse, mask_rows, offsets, cos, sin, *gains = ctx.saved_tensors
        found = _head_norm(gains[0], gains[1], ctx.eps)
        q, k, v = qkv_T3HD.transpose(0, 2).unbind(1)
        g_T3HD = attended_backward(gradient, q, k, v, out_HTD, lse, mask_rows, offsets, *ctx.settings)
        g_TN, partials = qkv_rope.fused_backward(g_T3HD, x_TN, cos, sin, ctx.each, found)

        def of_gains() -> Gradients:
            if found is None or partials is None or not ctx.projections.others_learned:
                return None, None
            return qkv_rope.gain_gradients(partials, found)

        others = () if partials is None else (partials,)
        *parameters, dquery, dkey = ctx.projections.gradients(g_TN, x_TK, *others, more=of_gains)
        rows = ctx.projections.rows[: len(ctx.needs_input_grad) - 9 - 2 * ctx.count]
        dextras = extra_gradients(g_TN, rows, ctx.shape, ctx, 9 + 2 * ctx.count) if rows else ()
        return (g_TN @ w_NK).view(ctx.shape), *(None,) * 5, dquery, dkey, None, *parameters, *dextras


def _head_norm(query_gain: Tensor | None, key_gain: Tensor | None, eps: tuple[float, float]) -> HeadNorm | None:
    if query_gain is None or key_gain is None:
        return None
    return HeadNorm(query_gain=query_gain, key_gain=key_gain, query_eps=eps[0], key_eps=eps[1])


def rotary_attention(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gains: Sequence[Tensor | None],
    eps: Sequence[float], cos: Tensor, sin: Tensor, offsets: Tensor, num_queries: int, num_keys: int, head_dim: int,
    settings: Sequence[Any], extras: Sequence[Tensor | None] = (),
) -> Tensor:  # fmt: skip
    """Variable-length attention (H, T, D) with rotary embeddings, of projections of x computed as one product.

    weights: of queries, keys and values, or one of all side by side; and so the biases. Keys and values may have fewer
    heads than queries, which share them in turn. gains, eps: of the RMSNorm of each query and key, None without one.
    cos, sin: (..., T, D), without gradients. settings: of `varlen.attended`, from the longest segment to the dropout.
    extras: what is added to the product of each of the weights, () for nothing.
    """
    angles = tuple(each.reshape(-1, head_dim).contiguous() for each in (cos, sin))
    each = Heads(queries=num_queries, keys=num_keys, size=head_dim)
    out: Tensor = _RotaryAttention.apply(  # type: ignore[no-untyped-call]
        halved(x),
        angles,
        offsets,
        each,
        (*settings[:-1], current().probability(settings[-1])),
        tuple(eps),
        *gains,
        len(weights),
        *weights,
        *biases,
        *extras,
    )
    return out
