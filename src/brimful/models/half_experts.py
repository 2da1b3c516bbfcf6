"""Experts in bf16: what autocast does to the products of each expert, done to those of all experts at once.

transformers multiplies the tokens of all experts in one call of `torch.nn.functional.grouped_mm`, which autocast leaves
alone. With fp32 weights that is an expert after another, by a loop for which the host waits in each layer: no CUDA
graph can hold it. With weights in bf16 it is one kernel. Experts one by one (`eager`) are in autocast's dtype in
transformers, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

HALF_EXPERTS = "brimful_half"
#: The implementation of transformers that this one is in the place of: its default.
_GROUPED = "grouped_mm"
#: Bytes that each row of a matrix starts at a multiple of, as the kernel of all experts asks.
_ALIGNMENT = 16


def halve_experts(model: Any) -> None:
    """Have a model's experts multiply in bf16 wherever autocast is in bf16. Models without experts, with matrices
    whose rows are no multiple of 16 bytes, and those that were told another implementation are left alone."""
    if model.config._experts_implementation != _GROUPED:
        return
    weights = [weight for module in model.modules() if _is_experts(module) for weight in _matrices(module).values()]
    if weights and all(size * torch.bfloat16.itemsize % _ALIGNMENT == 0 for w in weights for size in w.shape[-2:]):
        model.set_experts_implementation(HALF_EXPERTS)


def experts_as_before(model: Any) -> None:
    """Undo `halve_experts`."""
    if model.config._experts_implementation == HALF_EXPERTS:
        model.set_experts_implementation(_GROUPED)


def _is_experts(module: nn.Module) -> bool:
    """Return whether transformers runs a module's forward by the implementation that its configuration names."""
    return hasattr(module, "num_experts") and hasattr(module, "is_transposed")


def _matrices(experts: nn.Module) -> dict[str, Tensor]:
    """Weights of all experts, (E, ., .) each."""
    return {name: weight for name, weight in experts._parameters.items() if weight is not None and weight.dim() == 3}


class _Halved:
    """Experts with matrices in half precision, for the one call that they are given to."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        for name, weight in _matrices(experts).items():
            setattr(self, name, weight.to(dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _in_half(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, scores_TK: Tensor) -> Tensor:
    """States of tokens by the K experts that each of them has chosen, added up by their scores."""
    kind = hidden_TD.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
        experts = _Halved(experts, torch.bfloat16)
    found: Tensor = grouped_mm_experts_forward(experts, hidden_TD, chosen_TK, scores_TK)
    return found


ExpertsInterface.register(HALF_EXPERTS, _in_half)
