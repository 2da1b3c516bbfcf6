"""Optimizers whose every decision is on the device: steps are launched without waiting, and can be captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class OnDevice(torch.optim.Optimizer):
    """Common part of its kinds: reading what was decided, weight decay, and skipping.

    lr: () tensor on the device. As torch's fused optimizers it is given `grad_scale` and `found_inf`, () tensors,
    before a step: gradients are divided by the first, and a step is skipped where the second is 1.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], lr: float | Tensor, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not used:
                continue
            skipped = _scalar(self.found_inf, 0.0, used[0]) > 0
            unscaled = 1.0 / _scalar(self.grad_scale, 1.0, used[0])
            rate = torch.where(skipped, 0.0, _scalar(group["lr"], 0.0, used[0]))
            decay = rate * group["weight_decay"] if group["weight_decay"] else None
            for parameter, update in zip(used, self._updates(used, unscaled, skipped), strict=True):
                if decay is not None:
                    parameter.addcmul_(parameter, decay, value=-1.0)  # times 1 - decay would round that first
                parameter.sub_(torch.where(skipped, 0.0, update.mul_(rate)))

    def _updates(self, used: Sequence[Tensor], unscaled: Tensor, skipped: Tensor) -> Iterator[Tensor]:
        """Yield what the learning rate multiplies, of each parameter; its states follow unless the step is skipped.

        unscaled: () factor of gradients. skipped: () whether it is; then an update need not be finite.
        """
        raise NotImplementedError


def gradient_of(parameter: Tensor, unscaled: Tensor) -> Tensor:
    """A copy of a parameter's gradient in its dtype, times a () factor."""
    assert parameter.grad is not None
    return parameter.grad.to(parameter.dtype) * unscaled


def _scalar(value: float | Tensor | None, default: float, like: Tensor) -> Tensor:
    """A () tensor of a parameter's kind."""
    if isinstance(value, Tensor):
        return value.to(dtype=like.dtype)
    return torch.full((), default if value is None else value, dtype=like.dtype, device=like.device)
