"""Lion as bitsandbytes has it in 32 bits, but decided on the device.

bitsandbytes' own is told its learning rate by the host, so that no graph can hold it, and takes no word of the device
on whether to skip. The arithmetic is the same, up to rounding.

Source: Chen et al. 2023, arXiv 2302.06675; bitsandbytes.optim.Lion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from brimful.step.updates.on_device import OnDevice, gradient_of


class Lion(OnDevice):
    """Steps of one size, by the sign of a moving average of gradients."""

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor, *, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr, weight_decay)
        self._betas = betas

    def _updates(self, used: Sequence[Tensor], unscaled: Tensor, skipped: Tensor) -> Iterator[Tensor]:
        first, second = self._betas
        for parameter in used:
            gradient, moment = gradient_of(parameter, unscaled), self._moment_of(parameter)
            update = (moment * first).add_(gradient * (1.0 - first)).sign_()
            now = (moment * second).add_(gradient.mul_(1.0 - second))
            moment.copy_(torch.where(skipped, moment, now))
            yield update

    def _moment_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "state1" not in state:  # bitsandbytes' name: what it began is gone on with
            state["state1"] = torch.zeros_like(parameter)
        found: Tensor = state["state1"]
        return found
