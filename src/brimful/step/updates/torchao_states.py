"""torchao's optimizers with their learning rate, states and counts of steps on the device, so that a graph can hold
their steps.

By themselves they keep rates and counts in host memory, which their compiled kernels are called with: one call a
parameter, 0.6 ms each on the host of an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_of_torchao(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of torchao's that keep moments as these do (torchao 0.13 to 0.18)."""
    return type(optimizer).__module__.startswith("torchao.") and hasattr(optimizer, "_new_buffer")


def read_rate_from(optimizer: Any, rate: Tensor) -> None:
    """Have all groups read their learning rate from a () tensor of their parameters' device."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def make_states(optimizer: Any) -> None:
    """Make the states of parameters that have a gradient, and none yet, as the optimizer's first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is None or state:
                continue
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = optimizer._new_buffer(parameter, True)
            state["exp_avg_sq"] = optimizer._new_buffer(parameter, False)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = optimizer._new_buffer(parameter, False)
