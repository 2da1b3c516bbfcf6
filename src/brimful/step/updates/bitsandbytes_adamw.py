"""AdamW as bitsandbytes has it in 8 bits, but decided on the device, and by our kernel of rounded moments.

bitsandbytes' own launches each parameter's kernel from Python, is told its learning rate by the host, so that no graph
can hold it, and takes no word of the device on whether to skip: 40 to 65 ms in each step of BERT-large on the host of
an H200, where all else of it takes 18. States have its names, its blocks and its shares, so that each goes on with what
the other began. The arithmetic is the same up to rounding.

Source: Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from brimful.step.updates.moments import BLOCK, Moments
from brimful.step.updates.rounded_kernels import RoundedKernels

#: Numbers of a parameter whose states are in 8 bits; those of smaller ones are in fp32, as there.
LEAST = 4096


class BitsandbytesAdamW(torch.optim.Optimizer):
    """Steps of parameters on a GPU that `rounded_kernels.can_launch` names. All groups have one learning rate.

    lr: () tensor there. shares: (256,) each, that codes of first and of second moments stand for, in order. As torch's
    fused optimizers it is given `grad_scale` and `found_inf`, () tensors, before a step.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, params: Iterable[Any], lr: Tensor, *, betas: tuple[float, float], eps: float,
        shares: tuple[Tensor, Tensor], weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._shares = tuple(each.to(lr.device) for each in shares)
        self._skipped, self._scale = torch.zeros_like(lr), torch.ones_like(lr)
        given = (lr, self._skipped, torch.zeros_like(lr, dtype=torch.int64))
        self._kernels = RoundedKernels(lr.device, betas, eps, *given, shares=shares)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self._skipped.fill_(0.0) if self.found_inf is None else self._skipped.copy_(self.found_inf)
        self._scale.fill_(1.0) if self.grad_scale is None else self._scale.copy_(self.grad_scale)
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not used:
                continue
            counts = [self._state_of(parameter)["step"] for parameter in used]
            torch._foreach_add_(counts, [1.0 - self._skipped] * len(counts))
            for parameter, count in zip(used, counts, strict=True):
                if not parameter.is_contiguous():  # as bitsandbytes does: numbers are read in the order of memory
                    parameter.data = parameter.data.contiguous()
                given = (parameter, parameter.grad, self._moments_of(parameter), count, self._scale)
                self._kernels.update(0, *given, group["weight_decay"])

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not isinstance(count := state.get("step"), Tensor):  # new, or of a run by bitsandbytes' own
            state["step"] = torch.full((), float(count or 0), dtype=torch.float32, device=parameter.device)
        if "state1" not in state:
            self._begin(state, parameter)
        return state

    def _begin(self, state: dict[str, Any], parameter: Tensor) -> None:
        """Make moments of 0: in 8 bits the largest of each block is."""
        if parameter.numel() < LEAST:
            state["state1"], state["state2"] = (torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2))
            return
        num_blocks = -(-parameter.numel() // BLOCK)
        for number, shares in enumerate(self._shares, start=1):
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"qmap{number}"] = shares
            state[f"absmax{number}"] = torch.zeros(num_blocks, dtype=torch.float32, device=parameter.device)

    def _moments_of(self, parameter: Tensor) -> Moments:
        state = self.state[parameter]
        in_8_bits = "absmax1" in state
        return Moments(
            first=state["state1"],
            second=state["state2"],
            scales=(state["absmax1"], state["absmax2"]) if in_8_bits else None,
        )
