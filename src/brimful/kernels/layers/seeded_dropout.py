"""Dropout whose mask is drawn from a site's seed, forward and again backward: no mask is kept.

`SeededDropout` puts it where a model's own code calls torch's dropout, so that a layer that is recomputed draws the
same masks in a CUDA graph too, where torch's generator cannot be set back.

`seeded_dropout_reference` is the reference.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

from brimful.kernels.dropout import kept_factor, kept_in, kept_mask_PRC, threshold
from brimful.kernels.forward_context import current
from brimful.kernels.tiles import num_tiles

#: Columns and rows of one program's tile.
_COLUMNS, _STEP = 256, 8


def seeded_dropout_reference(x_TH: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """The reference: dropout(x), (T, H), with the mask that the kernel draws."""
    mask_TH = kept_mask_PRC(seed, 1, x_TH.shape[0], x_TH.shape[1], p, site)[0]
    return torch.where(mask_TH, x_TH * kept_factor(p), 0.0)


@triton.jit(do_not_specialize=["site"])
def apply_dropout(X, Y, SEED, site, num_rows, width, drop_below, more, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(0) * STEP + tl.arange(0, STEP)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    x = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    stays = kept_in(SEED, site, 0, rows[:, None], (rows < num_rows)[:, None], columns[None, :], drop_below)
    tl.store(Y + places, tl.where(stays, x * more, 0.0).to(Y.dtype.element_ty), mask=inside)


def _dropped(x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    x = x.contiguous()
    y, rows, width = torch.empty_like(x), _num_rows(x), x.shape[-1] if x.ndim else 1
    if rows:
        grid = (num_tiles(rows, _STEP), num_tiles(width, _COLUMNS))
        apply_dropout[grid](x, y, seed, site, rows, width, threshold(p), kept_factor(p), COLUMNS=_COLUMNS, STEP=_STEP)
    return y


def _num_rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1) if x.ndim else 1


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
        ctx.settings = p, seed, site
        return _dropped(x, p, seed, site)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _dropped(gradients[0], *ctx.settings), None, None, None


def seeded_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout of `x`, (..., H), by the next site of the active forward context."""
    return _Dropout.apply(x, p, *current().dropout_site(x, _num_rows(x), p))  # type: ignore[no-any-return]


class SeededDropout(TorchFunctionMode):
    """Within, torch's dropout is `seeded_dropout`: modules' and functional, but for the in-place one."""

    _signature = inspect.signature(F.dropout)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        asked = self._signature.bind(*args, **(kwargs or {}))
        asked.apply_defaults()
        x, p, training, inplace = (asked.arguments[name] for name in ("input", "p", "training", "inplace"))
        if not training or not p or inplace:
            return func(*args, **(kwargs or {}))
        return seeded_dropout(x, p)
