"""Linear layers on a CPU with weights in the order that oneDNN's products read: put so once, not at every use.

    reorder_linears(model, torch.bfloat16, rows=1024, unchanged=lambda: torch.equal(model(x), before))

What torch's own inductor does to a model that it freezes, by the same operators. For a model that is only read.
Measured: benchmarks/classification/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

#: Rows and columns that a weight must have: a smaller one is not worth the operator's call.
_LEAST = 64
#: How far logits may be apart, absolute and relative, by the dtype of products: those that there are such products in.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


class _ReorderedLinear(nn.Linear):
    """The products of a Linear layer in `dtype`. Its weight has the shape alone: whoever reads it, reads NaN."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().to(dtype).contiguous()
        self._ordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self.weight = _frozen(torch.full((), math.nan, dtype=dtype).expand(weight.shape))
        self.bias = None if linear.bias is None else _frozen(linear.bias.detach().to(dtype))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) of any dtype -> (..., out_features) in that of the weight, as under autocast."""
        x = input.to(self.weight.dtype)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._ordered, self.bias, "none", [], "")
        return out


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def can_reorder(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators, for products of this dtype."""
    there = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return there and torch.backends.mkldnn.is_available() and dtype in TOLERANCE


def reorder_linears(model: nn.Module, dtype: torch.dtype, rows: int, *, unchanged: Callable[[], bool]) -> bool:
    """Replaces a model's Linear layers by ones whose products, in `dtype`, read a reordered copy of the weight.

    rows: of a product, about. unchanged: whether the model computes what it did, asked with the new layers in place. If
    not, or if oneDNN has no such product on this CPU, the plain layers are put back, and this is False.
    """
    plain: list[tuple[nn.Module, str, nn.Linear]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and min(child.weight.shape) >= _LEAST and not _is_hooked(child)
    ]
    try:
        made = {id(child): _ReorderedLinear(child, dtype, rows) for _, _, child in plain}
        for parent, name, child in plain:
            setattr(parent, name, made[id(child)])
        if unchanged():
            return True
    except RuntimeError:
        pass
    for parent, name, child in plain:
        setattr(parent, name, child)
    return False


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
