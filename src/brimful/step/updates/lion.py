"""Lion whose every decision is on the device: a step is launched without waiting for it, and can be captured.

bitsandbytes' own is told its learning rate by the host, so that no graph can hold it, and takes no word of the device
on whether to skip. The arithmetic is the same, up to rounding.

Source: Chen et al. 2023, arXiv 2302.06675; bitsandbytes.optim.Lion in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from brimful.step.updates.adafactor import scalar_of


class Lion(torch.optim.Optimizer):
    """Steps of one size, by the sign of a moving average of gradients.

    lr: () tensor on the device. As torch's fused optimizers it is given `grad_scale` and `found_inf`, () tensors,
    before a step: gradients are divided by the first, and a step is skipped where the second is 1.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor, *, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._betas = betas

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        first, second = self._betas
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not used:
                continue
            skipped = scalar_of(self.found_inf, 0.0, used[0]) > 0
            unscaled = 1.0 / scalar_of(self.grad_scale, 1.0, used[0])
            rate = torch.where(skipped, 0.0, scalar_of(group["lr"], 0.0, used[0]))
            decay = rate * group["weight_decay"] if group["weight_decay"] else None
            for parameter in used:
                assert parameter.grad is not None
                gradient, moment = parameter.grad.to(parameter.dtype) * unscaled, self._moment_of(parameter)
                update = (moment * first).add_(gradient * (1.0 - first)).sign_().mul_(rate)
                if decay is not None:
                    parameter.addcmul_(parameter, decay, value=-1.0)  # times 1 - decay would round that first
                parameter.sub_(torch.where(skipped, 0.0, update))
                now = (moment * second).add_(gradient.mul_(1.0 - second))
                moment.copy_(torch.where(skipped, moment, now))

    def _moment_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "state1" not in state:  # bitsandbytes' name: what it began is gone on with
            state["state1"] = torch.zeros_like(parameter)
        found: Tensor = state["state1"]
        return found
