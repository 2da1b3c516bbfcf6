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
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

HALF_EXPERTS = "brimful_half"
#: The implementation of transformers that this one is in the place of: its default.
_GROUPED = "grouped_mm"
#: Bytes that each row of a matrix starts at a multiple of, as the kernel of all experts asks.
_ALIGNMENT = 16
#: Biases as transformers' experts name them.
_BIASES = frozenset({"gate_up_proj_bias", "up_proj_bias", "down_proj_bias"})


def halve_experts(model: Any) -> None:
    """Have a model's experts multiply in bf16 wherever autocast is in bf16. Models without experts, with matrices
    whose rows are no multiple of 16 bytes, and those that were told another implementation are left alone."""
    if model.config._experts_implementation == _GROUPED and _are_halved(model):
        model.set_experts_implementation(HALF_EXPERTS)


def hold_experts_in_half(model: Any) -> None:
    """Cast the matrices of a model whose experts multiply in bf16 to it, for a pass without autocast."""
    if model.config._experts_implementation in (_GROUPED, HALF_EXPERTS) and _are_halved(model):
        for weight in _matrices_of_all(model):
            weight.data = weight.data.to(torch.bfloat16)


def host_multiplies_experts(model: Any) -> bool:
    """Return whether a pass without autocast has the host read how many tokens each expert has."""
    together = model.config._experts_implementation in (_GROUPED, HALF_EXPERTS)
    return together and any(weight.dtype is not torch.bfloat16 for weight in _matrices_of_all(model))


def experts_as_before(model: Any) -> None:
    """Undo `halve_experts`."""
    if model.config._experts_implementation == HALF_EXPERTS:
        model.set_experts_implementation(_GROUPED)


def _are_halved(model: nn.Module) -> bool:
    """Return whether there are experts, and the kernel takes the matrices of all."""
    rows = {size * torch.bfloat16.itemsize for weight in _matrices_of_all(model) for size in weight.shape[-2:]}
    return bool(rows) and all(size % _ALIGNMENT == 0 for size in rows)


def _is_experts(module: nn.Module) -> bool:
    """Return whether transformers runs a module's forward by the implementation that its configuration names."""
    return hasattr(module, "num_experts") and hasattr(module, "is_transposed")


def _matrices_of_all(model: nn.Module) -> list[Tensor]:
    return [weight for module in model.modules() if _is_experts(module) for weight in _matrices(module).values()]


def _matrices(experts: nn.Module) -> dict[str, Tensor]:
    """Weights of all experts, (E, ., .) each."""
    return {name: weight for name, weight in experts._parameters.items() if weight is not None and weight.dim() == 3}


class ExpertByExpert(TorchDispatchMode):
    """Within, a CPU multiplies the tokens of one expert after another, in fp32, where torch has one call for all.

    That call takes a hundred times as long in bf16 on a CPU without matrix units.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.ops.aten._grouped_mm.default or not _is_of_tokens(*args, **kwargs):
            return function(*args, **kwargs)
        tokens_SK, weights_EKN, ends_E = args
        found_SN = tokens_SK.new_zeros(tokens_SK.shape[0], weights_EKN.shape[2])
        start = 0
        for weight_KN, end in zip(weights_EKN, ends_E.tolist(), strict=True):
            found_SN[start:end] = tokens_SK[start:end].float() @ weight_KN.float()
            start = end
        return found_SN


def _is_of_tokens(tokens: Tensor, weights: Tensor, *others: Any, **named: Any) -> bool:
    """Return whether tokens of a CPU are multiplied by the matrix of their expert, and nothing else is asked for."""
    return len(others) == 1 and not named and tokens.device.type == "cpu" and (tokens.dim(), weights.dim()) == (2, 3)


class _Halved:
    """Experts with matrices in half precision, for the one call that they are given to."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        for name, weight in _matrices(experts).items():
            setattr(self, name, weight.to(dtype))
        if not torch.compiler.is_compiling():  # a compiler has a sum of its own
            for name in _BIASES & experts._parameters.keys():
                setattr(self, name, _Biases(experts._parameters[name]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class _Biases:
    """(E, D) biases of all experts, which are indexed by the expert of each token."""

    def __init__(self, biases_ED: Tensor | None) -> None:
        self._biases_ED = biases_ED

    def __getitem__(self, experts_S: Tensor) -> Tensor:
        found: Tensor = _Chosen.apply(self._biases_ED, experts_S)  # type: ignore[no-untyped-call]
        return found


class _Chosen(torch.autograd.Function):
    """(S, D) biases by the expert of each token.

    Their gradient is a sum over all tokens of an expert, a product with ones and zeros here. Torch's own, of an index,
    is for rows that are chosen a few times: it adds what has the same index one after the other. Where a gradient of
    one token is not finite, those of all experts' biases are not here.
    """

    @staticmethod
    def forward(ctx: Any, biases_ED: Tensor, experts_S: Tensor) -> Tensor:
        ctx.save_for_backward(experts_S)
        ctx.num_experts = biases_ED.shape[0]
        return biases_ED[experts_S]

    @staticmethod
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (experts_S,) = ctx.saved_tensors
        numbers_E = torch.arange(ctx.num_experts, device=experts_S.device)
        is_chosen_ES = (numbers_E[:, None] == experts_S).to(gradient_SD.dtype)
        with torch.autocast(gradient_SD.device.type, enabled=False):  # whoever calls backward() within one
            return is_chosen_ES @ gradient_SD, None


def _autocast_is_in_bf16(kind: str) -> bool:
    """Return whether autocast is on for devices of a kind, and in bf16. Tensors without numbers have none."""
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return is_on and torch.get_autocast_dtype(kind) is torch.bfloat16


def _in_half(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, scores_TK: Tensor) -> Tensor:
    """States of tokens by the K experts that each of them has chosen, added up by their scores."""
    if _autocast_is_in_bf16(hidden_TD.device.type):
        experts = _Halved(experts, torch.bfloat16)
    found: Tensor = grouped_mm_experts_forward(experts, hidden_TD, chosen_TK, scores_TK)
    return found


ExpertsInterface.register(HALF_EXPERTS, _in_half)
