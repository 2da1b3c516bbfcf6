"""Optimizers by transformers' `optim` names. AdamW on a GPU is updated by kernels of our own
(`step/updates/fused_adamw.py`), all else by torch's fused ones; the arithmetic is the same.

`adamw_torch` and `adamw_torch_fused` run the same kernels.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

from brimful.core.options import OptimizerChoice, TrainOptions
from brimful.core.records import Arithmetic, Lever
from brimful.levers.lever import Cost, Verdict
from brimful.step.precision import Precision
from brimful.step.updates.fused_adamw import FusedAdamW, can_fuse
from brimful.step.updates.torch_update import TorchUpdate
from brimful.step.updates.update import Update

#: Names of parameters that do not decay: those of transformers' `Trainer.get_decay_parameter_names` (5.17 to 5.23).
_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer and its hyperparameters. The learning rate belongs to the step, which reads it from its schedule.

    fused: whether it is updated by our own kernels.
    """

    value: OptimizerChoice
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    fused: bool = False
    reason: str = "asked for"
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
        return Lever(name="optimizer", value=self.value, arithmetic="exact", reason=self.reason)

    def apply(
        self,
        model: nn.Module,
        schedule: Tensor,
        precision: Precision,
        *,
        max_grad_norm: float,
        half_weights: bool = True,
    ) -> Update:
        """The update of a model's trained parameters.

        schedule: (steps + 1,) learning rate by applied steps. half_weights: whether Linear layers may hold their
        weights in half precision.
        """
        decayed = decayed_names(model)
        if self.fused:
            return FusedAdamW(
                model,
                schedule,
                max_grad_norm=max_grad_norm,
                scaled=precision.scaled,
                betas=(self.beta1, self.beta2),
                epsilon=self.epsilon,
                weight_decay=dict.fromkeys(decayed, self.weight_decay),
                half=precision.half if half_weights else None,
            )
        groups = parameter_groups(model, decayed, self.weight_decay)

        def make(learning_rate: Tensor) -> torch.optim.Optimizer:
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

        return TorchUpdate(model, make, schedule, max_grad_norm=max_grad_norm, scaled=precision.scaled)


def choose_optimizer(options: TrainOptions, model: nn.Module) -> Optimizer:
    """The optimizer that was asked for, by the kernels that are the fastest for this model where it is."""
    asked = asked_optimizer(options)
    if not asked.value.startswith("adamw"):
        return replace(asked, reason="asked for; torch's fused kernels, fp32 weights and states")
    if can_fuse(model) and min(asked.beta1, asked.beta2) > 0:
        return replace(asked, fused=True, reason="asked for; our fused kernels, fp32 weights and states")
    return replace(asked, reason="asked for; torch's fused kernels, fp32 weights and states")


def asked_optimizer(options: TrainOptions) -> Optimizer:
    """The optimizer and its hyperparameters as they were asked for."""
    return Optimizer(
        value=options.optim,
        weight_decay=options.weight_decay,
        beta1=options.adam_beta1,
        beta2=options.adam_beta2,
        epsilon=options.adam_epsilon,
    )


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay is for, by the rule of transformers' Trainer: all but biases and norms,
    found by their names and as parts of `nn.LayerNorm`."""
    return set(get_parameter_names(model, [nn.LayerNorm], list(_NOT_DECAYED)))


def parameter_groups(model: nn.Module, decayed: Collection[str], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of trained parameters for torch's optimizers: those that decay, and all others."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if (name in decayed) == decays], "weight_decay": rate}
        for decays, rate in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]
