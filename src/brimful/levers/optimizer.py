"""Optimizers by transformers' `optim` names, through torch's fused kernels: one pass over the parameters that also
applies clipping and the loss scale, and does nothing at all where a step was found not to be finite. AdamW on a GPU has
kernels of our own instead, with the same arithmetic (`step/updates/fused_adamw.py`).

`adamw_torch` and `adamw_torch_fused` are the same arithmetic and run the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brimful.core.options import OptimizerChoice
from brimful.core.records import Arithmetic, Lever
from brimful.levers.lever import Cost, Verdict


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer and its hyperparameters. The learning rate belongs to the step, which reads it from its schedule."""

    value: OptimizerChoice
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    source: str = "Loshchilov and Hutter 2019, arXiv 1711.05101; torch.optim"

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`: it is what was asked for."""
        return "exact"

    def supports(self) -> Verdict:
        """torch has fused kernels for the CPU and for CUDA."""
        return Verdict(ok=True, because="torch has a fused kernel for CPU and CUDA")

    def cost(self, num_parameters: int) -> Cost:
        """Two fp32 states a parameter for AdamW, none for plain SGD."""
        return Cost(resident_bytes=0 if self.value == "sgd" else 8 * num_parameters)

    def moved_bytes(self, num_parameters: int, num_idle: int = 0) -> int:
        """Bytes that one update must read and write at least, all fp32: AdamW reads weight, gradient and two states and
        writes all but the gradient, plain SGD has no states; the gradient is read once more for its norm.

        num_idle: of the parameters, how many never had a gradient, and are left alone once that was read.
        """
        each = 3 + 1 if self.value == "sgd" else 7 + 1
        return 4 * (each * (num_parameters - num_idle) + 2 * num_idle)

    def lever(self) -> Lever:
        """Its line in the recipe."""
        return Lever(
            name="optimizer",
            value=self.value,
            arithmetic="exact",
            reason="asked for; one fused pass, fp32 weights and states",
        )

    def apply(self, model: nn.Module, learning_rate: Tensor) -> torch.optim.Optimizer:
        """The torch optimizer over the model's parameters, reading `learning_rate` from a () tensor at each step."""
        groups = parameter_groups(model.named_parameters(), self.weight_decay)
        if self.value == "sgd":
            return torch.optim.SGD(groups, lr=learning_rate, fused=True)
        return torch.optim.AdamW(
            groups,
            lr=learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=True,
            capturable=learning_rate.is_cuda,
        )


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay; biases and norms, all with fewer than two dimensions, do not."""
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    decayed = [p for p in trained if decays(p)]
    others = [p for p in trained if not decays(p)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def decays(parameter: Tensor) -> bool:
    """Whether weight decay is for this parameter: matrices and embeddings, not biases and norms."""
    return parameter.ndim >= 2
