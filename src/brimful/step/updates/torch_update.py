"""The update by any torch optimizer, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from brimful.step.state import ParameterState
from brimful.step.updates.update import Update


class TorchUpdate(Update):
    """`Update` by an optimizer that `make` makes, given the () learning rate that it may read at each step.

    torch's fused optimizers take the loss scale, clipping and whether to skip from the device. For others gradients are
    scaled here, the host waits to see whether they are finite, and the learning rate is a number.
    """

    def __init__(
        self, model: nn.Module, make: Callable[[Tensor], torch.optim.Optimizer], schedule: Tensor, *,
        max_grad_norm: float, scaled: bool,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled)
        self._learning_rate = torch.zeros((), device=self.device)
        self._optimizer = make(self._learning_rate)
        self.on_device = getattr(self._optimizer, "_step_supports_amp_scaling", False)

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it; gradients of several micro-batches were added up by their backward passes."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True) / self.scale
        skipped = (~(torch.isfinite(norm) & torch.isfinite(self.loss))).float()
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else torch.ones_like(norm)
        place = self.applied.clamp(max=len(self.schedule) - 1)
        self._learning_rate.copy_(self.schedule.index_select(0, place.view(1))[0])
        if self.on_device:
            self._optimizer.grad_scale = (self.scale / clip).float()  # type: ignore[attr-defined]
            self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not skipped.item():
            self._step_on_host(gradients, clip / self.scale)
        readings = torch.stack([t.double() for t in (self.loss, norm, self._learning_rate, self.scale, skipped)])
        self.applied += (1 - skipped).long()
        self.loss.zero_()
        self._rescale(skipped)
        torch._foreach_zero_(gradients)
        return readings

    def _step_on_host(self, gradients: list[Tensor], factor: Tensor) -> None:
        torch._foreach_mul_(gradients, float(factor))
        for group in self._optimizer.param_groups:
            if group["lr"] is not self._learning_rate:
                group["lr"] = float(self._learning_rate)
        self._optimizer.step()

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self.named.items() if parameter.grad is not None)

    def _optimizer_state(self) -> dict[str, ParameterState]:
        kept = self._optimizer.state
        return {name: ParameterState.of(kept[p], p) for name, p in self.named.items() if kept.get(p)}

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        self._optimizer.state.clear()
        for name, parameter in self.named.items():
            parameter.grad = torch.zeros_like(parameter) if name in used else None
            if name in state:
                self._optimizer.state[parameter] = state[name].restored(parameter)
