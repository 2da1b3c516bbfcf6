"""Linear layers on a CPU with weights in the order that oneDNN's products read: put so once, not at every use.

    reorder_linears(model, torch.bfloat16, rows=1024, max_length=512)

What torch's own inductor does to a model that it freezes, by the same operators. For a model that is only read, and is
neither copied nor saved any more. What it gains: benchmarks/classification/README.md.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn

from brimful.core.tolerances import TOLERANCES
from brimful.models.packed.check_inputs import make_check_inputs
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.tried_row import relative_error

#: Rows and columns that a weight must have: a smaller one is not worth the operator's call.
_LEAST = 64
#: Relative error of logits that counts as rounding, by dtype of products. fp32: of all layers, not of one of each kind.
_TOLERANCE = {torch.float32: 10 * TOLERANCES["fp32"].logits, torch.bfloat16: TOLERANCES["bf16"].logits}
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")


class _ReorderedLinear(nn.Linear):
    """The products of a Linear layer in `dtype`. Its weight has the shape alone: whoever reads it, reads NaN."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.training = linear.in_features, linear.out_features, linear.training
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
    """True if this torch has the operators for products of this dtype, and oneDNN is not turned off."""
    there = all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS) and torch.backends.mkldnn.is_available()
    return there and torch._C._get_mkldnn_enabled() and dtype in _TOLERANCE


def reorder_linears(model: nn.Module, dtype: torch.dtype, *, rows: int, max_length: int) -> bool:
    """Replaces a model's Linear layers by ones whose products, in `dtype`, read a reordered copy of the weight.

    rows: of a product, about. max_length: longest sequence of tokens. Whether it was done: not where there is no layer
    to replace, nor where the model computes something else then, as one does that reads a weight and does not call the
    layer. Until that is known, weights are there twice.
    """
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if _is_plain(child) and min(child.weight.shape) >= _LEAST
    ]
    if not plain:
        return False
    try:
        before = _logits(model, dtype, max_length)
        made = {id(child): _ReorderedLinear(child, dtype, rows) for _, _, child in plain}
        for parent, name, child in plain:
            setattr(parent, name, made[id(child)])
        if relative_error(_logits(model, dtype, max_length), before) <= _TOLERANCE[dtype]:
            return True
    except Exception:  # of the model's own code, or of operators that this CPU does not have
        pass
    for parent, name, child in plain:
        setattr(parent, name, child)
    return False


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True for a Linear layer without hooks and without attributes that somebody set."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    own = {"training", "in_features", "out_features"}
    return all(name in own or name.startswith("_") for name in vars(module))


@torch.inference_mode()
def _logits(model: nn.Module, dtype: torch.dtype, max_length: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        return PaddedModel(model)(make_check_inputs(model.config, max_length)).logits.float()
