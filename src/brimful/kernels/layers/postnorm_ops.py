"""Pieces of a transformer layer with their gradients written out: matrix products and what surrounds them.

Each is one autograd function whose reference is the composition that its docstring names. Products run in the dtype
that autocast asks for, what surrounds them in fp32. Gradients of parameters are computed `beside` those of activations.

Where a plan of `float8` is active, the products that it names are in fp8; all else is as it is.

What an adapter adds to a product is its `extra`, of the product's shape (`low_rank`). Where no parameter of a function
is learned, their gradients are not computed, and the input of its product is not kept for them.

Normalised rows come twice, for residuals and, in the dtype of products, for those: the second travels with the first,
as `halved`, so that nothing is cast twice. Where both dtypes are one, they share their memory, and only their gradients
are two, which meet inside of the norm's backward kernel instead of in one of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brimful.kernels import float8
from brimful.kernels.attention.varlen import attended, attended_backward
from brimful.kernels.forward_context import current
from brimful.kernels.layers import dropout_add_layernorm, embedding, gelu, matmul_gelu
from brimful.kernels.remade import known_ending, note_maker, offer_ending
from brimful.kernels.split_reduction import add_partial_sums, sum_rows

Gradients = tuple[Any, ...]


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A fresh tensor in another shape, unless it is empty. No view of it, for which dynamo would trace a layer anew: so
    autograd does not see a change of one in the other, and layers must leave both as they are."""
    out: Tensor = torch.ops.aten._unsafe_view.default(x, shape) if x.numel() else x
    return out


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products of `x`: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def halved(x: Tensor) -> Tensor:
    """`x` in the dtype of products: the copy that was made along with it, where there is one."""
    return current().cast(x, product_dtype(x))


class _Made(NamedTuple):
    """x w^T + bias, (T, N), and what the backward pass needs besides x.

    saved: w (N, K), for the gradient of x; with a scale for each row if it is w^T in fp8, else with None.
    in_fp8: whether the gradient of w is taken in fp8.
    """

    out_TN: Tensor
    saved: tuple[Tensor, Tensor | None]
    in_fp8: bool


def _multiply(
    ctx: Any, x_TK: Tensor, w_NK: Tensor, weight: Any, bias_N: Tensor | None = None, *, activated: bool = False,
    known_TN: Tensor | None = None,
) -> _Made:  # fmt: skip
    """weight: the parameter, or the first of those, that `w_NK` shows or is a copy of. activated: what comes out.
    known_TN: the product, where it need not be computed."""
    plan = ctx.context.float8
    chosen = _fp8_products(plan, x_TK, w_NK, activated=activated)
    saved: tuple[Tensor, Tensor | None] = (w_NK, None)
    keep = w_NK.data_ptr() == weight.data_ptr()
    if plan is not None and chosen.input_gradient and ctx.needs_input_grad[0]:
        saved = plan.weight(w_NK, transposed=True, keep=keep)
    if known_TN is not None:
        out_TN = known_TN
    elif plan is not None and chosen.output:
        w = plan.weight(w_NK, transposed=False, keep=keep)
        out_TN = float8.product(float8.cast(x_TK), w, x_TK.dtype, bias_N, quick=True)
    else:
        out_TN = x_TK @ w_NK.t() if bias_N is None else torch.addmm(bias_N, x_TK, w_NK.t())
    return _Made(out_TN, saved, chosen.weight_gradient)


def _fp8_products(plan: float8.Plan | None, x_TK: Tensor, w_NK: Tensor, *, activated: bool) -> float8.Products:
    """The products of these that a plan takes in fp8."""
    if plan is None:
        return float8.Products()
    return plan.products(len(x_TK), (w_NK.shape[0], w_NK.shape[1]), activated=activated)


def _input_gradient(g_TN: Tensor, weight: Tensor, scales: Tensor | None) -> Tensor:
    """g w, (T, K), of what `_multiply` saved."""
    if scales is None:
        return g_TN @ weight
    return float8.product(float8.cast(g_TN), float8.Scaled(weight, scales), g_TN.dtype)


def _are_leaves(*parameters: Tensor | None) -> bool:
    """True if nothing reads the gradients of these before the end of the backward pass."""
    return all(each is None or each.is_leaf for each in parameters)


def _are_learned(*parameters: Tensor | None) -> bool:
    """True if the gradient of any of these is asked for."""
    return any(each is not None and each.requires_grad for each in parameters)


def kept_for(x: Tensor, *parameters: Tensor | None) -> Tensor | None:
    """The input of a product where a gradient of its parameters is asked for: nothing else in a backward pass reads
    it."""
    return x if _are_learned(*parameters) else None


def gradient_dtype(parameters: Sequence[Tensor | None]) -> torch.dtype | None:
    """The dtype of the first of these that is learned, else of the first; None of none. Gradients in another one would
    be cast by autograd, at once."""
    found = [each for each in parameters if each is not None]
    first = next((each for each in found if each.requires_grad), found[0] if found else None)
    return None if first is None else first.dtype


def with_extras(out_TN: Tensor, parts: Sequence[Tensor | None], extras: Sequence[Tensor | None]) -> Tensor:
    """A product of weights one below the other, with what is added to that of each, in its place."""
    start = 0
    for part, extra in zip(parts, extras, strict=False):
        rows = 0 if part is None else len(part)
        if extra is not None:
            out_TN[:, start : start + rows].add_(extra.reshape(len(out_TN), -1))
        start += rows
    return out_TN


def extra_gradients(g_TN: Tensor, rows: Sequence[int], shape: Sequence[int], ctx: Any, first: int) -> Gradients:
    """Of what `with_extras` adds, each (..., rows) where it is asked for. first: place of the first in an autograd
    function's arguments. shape: of the input."""
    asked = ctx.needs_input_grad[first : first + len(rows)]
    each = zip(g_TN.split(list(rows), 1), rows, asked, strict=True)
    return tuple(g.view(*shape[:-1], n) if needed else None for g, n, needed in each)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None) -> Tensor:
        ctx.context = current()
        x_TK, w_NK = x.flatten(0, -2), weight.to(x.dtype)
        made = _multiply(ctx, x_TK, w_NK, weight, None if bias is None else bias.to(x.dtype))
        with_extras(made.out_TN, [weight], [extra])
        ctx.save_for_backward(kept_for(x_TK, weight, bias), *made.saved)
        ctx.dtypes, ctx.shape = (weight.dtype, None if bias is None else bias.dtype), x.shape
        ctx.leaf, ctx.in_fp8, ctx.learned = _are_leaves(weight, bias), made.in_fp8, _are_learned(weight, bias)
        return _shaped(made.out_TN, (*x.shape[:-1], len(w_NK)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, *weight = ctx.saved_tensors
        g_TN = gradient.flatten(0, -2).contiguous()
        dweight = dbias = None
        if ctx.learned:
            dweight, dbias = ctx.context.beside(
                lambda: _weight_gradients(g_TN, x_TK, *ctx.dtypes, in_fp8=ctx.in_fp8), g_TN, x_TK, leaf=ctx.leaf
            )
        dextra = g_TN.view(gradient.shape) if ctx.needs_input_grad[3] else None
        return _input_gradient(g_TN, *weight).view(ctx.shape), dweight, dbias, dextra


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) + extra, (..., N), in the dtype of products."""
    out: Tensor = _Linear.apply(halved(x), weight, bias, extra)  # type: ignore[no-untyped-call]
    return out


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, extra: Tensor | None) -> Tensor:
        ctx.context = current()
        x_TK, w_FK = x.flatten(0, -2), weight.to(x.dtype)
        h_TF, saved, ctx.in_fp8 = _multiply(ctx, x_TK, w_FK, weight, activated=True)
        with_extras(h_TF, [weight], [extra])
        ctx.save_for_backward(kept_for(x_TK, weight, bias), bias, h_TF, *saved)
        ctx.dtypes, ctx.shape, ctx.leaf = (weight.dtype, None), x.shape, _are_leaves(weight, bias)
        ctx.learned = _are_learned(weight, bias)
        y_TF = gelu.fused_forward(h_TF, bias)
        note_maker(y_TF, gelu.fused_forward, h_TF, bias)
        return _shaped(y_TF, (*x.shape[:-1], len(w_FK)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, bias, h_TF, *weight = ctx.saved_tensors
        dh_TF, partials = gelu.fused_backward(gradient.reshape(h_TF.shape).contiguous(), h_TF, bias)

        def parameters() -> tuple[Tensor, Tensor]:
            dweight, _ = _weight_gradients(dh_TF, x_TK, *ctx.dtypes, in_fp8=ctx.in_fp8)
            return dweight, add_partial_sums(partials, partials.shape[1], bias.dtype)[1]

        dweight = dbias = None
        if ctx.learned:
            dweight, dbias = ctx.context.beside(parameters, dh_TF, x_TK, partials, leaf=ctx.leaf)
        dextra = dh_TF.view(gradient.shape) if ctx.needs_input_grad[3] else None
        return _input_gradient(dh_TF, *weight).view(ctx.shape), dweight, dbias, dextra


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, extra: Tensor | None = None) -> Tensor:
    """F.gelu(F.linear(x, weight, bias) + extra), by the error function. In one kernel where no gradient is asked for
    and nothing is added."""
    half = halved(x)
    if extra is None and not torch.is_grad_enabled():
        x_TK, w_FK = half.flatten(0, -2), weight.to(half.dtype)
        if matmul_gelu.suits(x_TK, w_FK) and not _fp8_products(current().float8, x_TK, w_FK, activated=True).output:
            return matmul_gelu.fused(x_TK, w_FK, bias).view(*x.shape[:-1], -1)
    out: Tensor = _LinearGelu.apply(half, weight, bias, extra)  # type: ignore[no-untyped-call]
    return out


class _LinearDropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, eps: float,
        p: float, extra: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        context = ctx.context = current()
        x_TK, w_HK = x.flatten(0, -2), weight.to(x.dtype)
        residual_TH = residual.reshape(-1, residual.shape[-1]).contiguous()
        if len(residual_TH) != len(x_TK):
            raise ValueError(f"a residual of shape {tuple(residual.shape)} does not fit rows of {tuple(x.shape)}")
        known = known_ending()
        h_TH, saved, ctx.in_fp8 = _multiply(ctx, x_TK, w_HK, weight, known_TN=None if known is None else known[0])
        if known is None:
            with_extras(h_TH, [weight], [extra])
        seed, ctx.site = context.dropout_site(h_TH, len(h_TH), p)
        dtype = h_TH.dtype if context.half_residuals else gain.dtype
        if known is None:
            y_TH, half_TH, statistics = dropout_add_layernorm.fused_forward(
                h_TH, bias, residual_TH, gain, shift, seed, ctx.site, eps, p, h_TH.dtype != dtype, dtype
            )
            offer_ending(y_TH, h_TH, statistics)
        else:  # nobody reads these rows
            statistics, y_TH = known[1], torch.empty_like(h_TH, dtype=dtype)
            half_TH = None if h_TH.dtype == dtype else torch.empty_like(h_TH)
        kept = kept_for(x_TK, weight, bias, gain, shift)
        ctx.save_for_backward(kept, bias, residual_TH, gain, h_TH, statistics, seed, *saved)
        ctx.set_materialize_grads(False)
        ctx.p, ctx.dtypes, ctx.shapes = p, (weight.dtype, None), (x.shape, residual.shape)
        ctx.leaf, ctx.learned = _are_leaves(weight, bias, gain, shift), _are_learned(weight, bias, gain, shift)
        return _shaped(y_TH, residual.shape), _shaped(y_TH if half_TH is None else half_TH, residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_half: Tensor | None) -> Gradients:
        x_TK, bias, residual_TH, gain, h_TH, statistics, seed, *weight = ctx.saved_tensors
        dy, dhalf = (None if g is None else g.reshape(h_TH.shape).contiguous() for g in (gradient, of_half))
        dh_TH, dresidual_TH, partials = dropout_add_layernorm.fused_backward(
            dy, dhalf, h_TH, bias, residual_TH, gain, statistics, seed, ctx.site, ctx.p
        )

        def parameters() -> tuple[Tensor, ...]:
            dweight, _ = _weight_gradients(dh_TH, x_TK, *ctx.dtypes, in_fp8=ctx.in_fp8)
            return dweight, *dropout_add_layernorm.parameter_gradients(partials, bias.dtype)

        dweight = dgain = dshift = dbias = None
        if ctx.learned:
            dweight, dgain, dshift, dbias = ctx.context.beside(parameters, dh_TH, x_TK, partials, leaf=ctx.leaf)
        dx, dresidual = _input_gradient(dh_TH, *weight).view(ctx.shapes[0]), dresidual_TH.view(ctx.shapes[1])
        dextra = dh_TH.view(ctx.shapes[1]) if ctx.needs_input_grad[8] else None
        return dx, dweight, dbias, dresidual, dgain, dshift, None, None, dextra


def linear_dropout_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, eps: float, p: float,
    extra: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """F.layer_norm(F.dropout(F.linear(x, weight, bias) + extra, p) + residual, ...), in that of residuals
    (`residuals`)."""
    y, half = _LinearDropoutAddNorm.apply(  # type: ignore[no-untyped-call]
        halved(x), weight, bias, residual, gain, shift, eps, current().probability(p), extra
    )
    return current().with_cast(y, half)


class _ProjectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offsets: Tensor, num_heads: int, settings: Any, *parameters: Tensor | None
    ) -> Tensor:
        ctx.context = current()
        x_TK = x.flatten(0, -2)
        weights, biases, extras = parameters[:3], parameters[3:6], parameters[6:]
        w_NK = side_by_side(weights, x.dtype)
        b_N = side_by_side(biases, x.dtype) if biases[0] is not None else None
        qkv_TN, saved, ctx.in_fp8 = _multiply(ctx, x_TK, w_NK, weights[0], b_N)
        with_extras(qkv_TN, weights, extras)
        q, k, v = qkv_TN.view(len(x_TK), 3, num_heads, -1).transpose(0, 2).unbind(1)
        seed, site = ctx.context.dropout_site(offsets, len(x_TK), settings[-1])
        out_HTD: Tensor
        out_HTD, lse, mask_rows = attended(q, k, v, offsets, seed, *settings, site)  # type: ignore[call-arg]
        kept = kept_for(x_TK, *weights, *biases)
        ctx.save_for_backward(kept, qkv_TN, out_HTD, lse, mask_rows, offsets, *saved)
        ctx.num_heads, ctx.settings, ctx.shape = num_heads, settings, x.shape
        ctx.dtypes = [gradient_dtype(weights), gradient_dtype(biases)]
        ctx.leaf, ctx.learned = _are_leaves(*weights, *biases), _are_learned(*weights, *biases)
        ctx.rows = [0 if weight is None else len(weight) for weight in weights[: len(extras)]]
        return out_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x_TK, qkv_TN, out_HTD, lse, mask_rows, offsets, *weight = ctx.saved_tensors
        q, k, v = qkv_TN.view(len(qkv_TN), 3, ctx.num_heads, -1).transpose(0, 2).unbind(1)
        g_TN = attended_backward(gradient, q, k, v, out_HTD, lse, mask_rows, offsets, *ctx.settings).flatten(1)
        dweights = dbiases = (None,) * 3
        if ctx.learned:
            dweight, dbias = ctx.context.beside(
                lambda: _weight_gradients(g_TN, x_TK, *ctx.dtypes, in_fp8=ctx.in_fp8), g_TN, x_TK, leaf=ctx.leaf
            )
            dweights, dbiases = dweight.chunk(3), dbiases if dbias is None else dbias.chunk(3)
        dextras = extra_gradients(g_TN, ctx.rows, ctx.shape, ctx, 10) if ctx.rows else ()
        return _input_gradient(g_TN, *weight).view(ctx.shape), None, None, None, *dweights, *dbiases, *dextras


def projected_attention(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], offsets: Tensor, num_heads: int,
    settings: Sequence[Any], extras: Sequence[Tensor | None] = (),
) -> Tensor:  # fmt: skip
    """Variable-length attention (H, T, D) of three projections of x, all with H heads, computed as one product.

    settings: of `varlen.attended`, from the longest segment to the dropout. extras: what is added to each projection.
    """
    out: Tensor = _ProjectedAttention.apply(  # type: ignore[no-untyped-call]
        halved(x),
        offsets,
        num_heads,
        (*settings[:-1], current().probability(settings[-1])),
        *weights,
        *biases,
        *extras,
    )
    return out


class _EmbeddingsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Sequence[Tensor], paddings: Sequence[int | None], gain: Tensor, shift: Tensor, eps: float,
        p: float, *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        flat = [each.reshape(-1) for each in ids]
        context = current()
        seed, ctx.site = context.dropout_site(gain, len(flat[0]), p)
        products = product_dtype(gain)
        dtype = products if context.half_residuals else gain.dtype
        half = None if products == dtype else products
        y_TH, half_TH, statistics = embedding.fused_forward(
            flat, tables, gain, shift, seed, ctx.site, eps, p, half, dtype
        )
        ctx.save_for_backward(gain, statistics, seed, *flat, *tables)
        ctx.set_materialize_grads(False)
        ctx.paddings, ctx.p = paddings, p
        shape = (*ids[0].shape, gain.shape[0])
        return _shaped(y_TH, shape), _shaped(y_TH if half_TH is None else half_TH, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_half: Tensor | None) -> Gradients:
        gain, statistics, seed, *rest = ctx.saved_tensors
        ids, tables = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        dy, dhalf = (None if g is None else g.reshape(-1, gain.shape[0]).contiguous() for g in (gradient, of_half))
        dtables, dgain, dshift = embedding.fused_backward(
            dy, dhalf, ids, tables, ctx.paddings, gain, statistics, seed, ctx.site, ctx.p
        )
        return None, None, dgain, dshift, None, None, *dtables


def embeddings_norm(
    ids: Sequence[Tensor], tables: Sequence[Tensor], paddings: Sequence[int | None], gain: Tensor, shift: Tensor | None,
    eps: float, p: float,
) -> Tensor:  # fmt: skip
    """F.dropout(F.layer_norm(sum of F.embedding(ids, table), ...), p), (..., H). paddings: rows not learned."""
    shift = torch.zeros_like(gain) if shift is None else shift
    shape = torch.broadcast_shapes(*(each.shape for each in ids))
    y, half = _EmbeddingsNorm.apply(  # type: ignore[no-untyped-call]
        [each.expand(shape) for each in ids], tuple(paddings), gain, shift, eps, current().probability(p), *tables
    )
    return current().with_cast(y, half)


def _weight_gradients(
    g_TN: Tensor, x_TK: Tensor, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None, *, in_fp8: bool
) -> tuple[Tensor, Tensor | None]:
    if in_fp8:
        g_NT, x_KT = (float8.cast(each, transposed=True) for each in (g_TN, x_TK))
        dweight = float8.product(g_NT, x_KT, g_TN.dtype).to(weight_dtype)
    else:
        dweight = (g_TN.t() @ x_TK).to(weight_dtype)
    return dweight, None if bias_dtype is None else sum_rows(g_TN, bias_dtype)


def side_by_side(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Parameters one below the other: a view of them where they lie so, else a copy."""
    found = [part for part in parts if part is not None]
    if len(found) == 1:
        return found[0].to(dtype)
    first, rows = found[0], [0, *itertools.accumulate(len(part) for part in found)]
    adjacent = all(
        part.data_ptr() == first.data_ptr() + before * first.stride(0) * first.element_size()
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and (part.dtype, part.stride(), part.shape[1:]) == (dtype, first.stride(), first.shape[1:])
        for part, before in zip(found, rows, strict=False)
    )
    if not adjacent and all(part.dtype == dtype for part in found):
        return torch.cat(found)
    if not adjacent:  # each is cast where it goes
        return torch.cat(found, out=first.new_empty(rows[-1], *first.shape[1:], dtype=dtype))
    packed: Tensor = first.detach().as_strided((rows[-1], *first.shape[1:]), first.stride())
    return packed
