"""Adafactor as transformers' Trainer makes it, but decided on the device.

transformers' own counts steps on the host, so that no graph can hold it, and takes no word of the device on whether to
skip: each of its steps would wait for the gradient to be known as finite, and then for some thousand launches. The
arithmetic is the same up to rounding.

Source: Shazeer and Stern 2018, arXiv 1804.04235; transformers.optimization.Adafactor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from brimful.step.updates.on_device import OnDevice, gradient_of

#: What transformers' Trainer gives its Adafactor beside a learning rate; anything else is for transformers' own.
SETTINGS = {"scale_parameter": False, "relative_step": False}


class Adafactor(OnDevice):
    """Second moments of matrices by the means of their rows and columns, updates clipped by their root mean square.

    epsilon: added to squares of gradients. clip_threshold: most root mean square of an update. decay_rate: moments of
    step t keep 1 - t ** decay_rate of what they were.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor, *, epsilon: float = 1e-30, clip_threshold: float = 1.0,
        decay_rate: float = -0.8, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, weight_decay)
        self._epsilon, self._clip_threshold, self._decay_rate = epsilon, clip_threshold, decay_rate

    def _updates(self, used: Sequence[Tensor], unscaled: Tensor, skipped: Tensor) -> Iterator[Tensor]:
        for parameter, share in zip(used, self._shares(used, skipped), strict=True):
            yield self._update(parameter, gradient_of(parameter, unscaled), share.to(parameter.dtype), skipped)

    def _shares(self, used: Sequence[Tensor], skipped: Tensor) -> tuple[Tensor, ...]:
        """Count the step; the share of its squares in each parameter's moments, (), 0 where it is skipped."""
        counts = [self._state_of(parameter)["step"] for parameter in used]
        torch._foreach_add_(counts, [(~skipped).float()] * len(counts))  # one tensor would be read by the host
        shares_P = torch.stack(counts).double().pow(self._decay_rate)
        return torch.where(skipped, 0.0, shares_P).unbind()

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        count = state.get("step")
        if not isinstance(count, Tensor):  # new, or of a run by transformers' own
            state["step"] = torch.full((), float(count or 0), dtype=torch.float32, device=parameter.device)
        if "exp_avg_sq" not in state and "exp_avg_sq_row" not in state:
            if parameter.ndim < 2:
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            else:
                shape = parameter.shape
                state["exp_avg_sq_row"] = parameter.new_zeros(shape[:-1])
                state["exp_avg_sq_col"] = parameter.new_zeros(shape[:-2] + shape[-1:])
        return state

    def _update(self, parameter: Tensor, gradient: Tensor, share: Tensor, skipped: Tensor) -> Tensor:
        state = self._state_of(parameter)
        squares = gradient.square().add_(self._epsilon)
        if parameter.ndim < 2:
            update = _followed(state["exp_avg_sq"], squares, share, skipped).rsqrt()
        else:
            rows = _followed(state["exp_avg_sq_row"], squares.mean(dim=-1), share, skipped)
            columns = _followed(state["exp_avg_sq_col"], squares.mean(dim=-2), share, skipped)
            by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(by_row, columns.rsqrt().unsqueeze(-2), out=squares)
        size = update.mul_(gradient).norm() / update.numel() ** 0.5
        return update.div_((size / self._clip_threshold).clamp(min=1.0))


def _followed(moment: Tensor, now: Tensor, share: Tensor, skipped: Tensor) -> Tensor:
    """The moment, moved toward `now` by a share; as it was where the step is skipped."""
    return moment.mul_(1.0 - share).addcmul_(torch.where(skipped, 0.0, now), share)
