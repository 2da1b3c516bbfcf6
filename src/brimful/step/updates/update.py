"""How gradients become weights: clipping, the optimizer where all is finite, the schedule and the loss scale.

Everything it decides by lives on the device: the host launches it without knowing what will come of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from brimful.levers.optimizer import Optimizer
from brimful.levers.precision import Precision

#: torch.amp.GradScaler's own constants.
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000

States = dict[str, dict[str, Tensor]]


class Update:
    """The update by torch's own kernels: any device, any of our optimizers. `FusedUpdate` is the fast one for GPUs.

    schedule: (steps + 1,) fp32 learning rate by applied steps; the last one holds for any step beyond.
    half_weights: whether Linear layers may hold their weights in half precision, where the update can keep copies.
    loss: () addends of the effective batch's loss so far. applied, scale, growth: () counters that training keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        schedule: Tensor,
        *,
        max_grad_norm: float,
        half_weights: bool = True,
    ) -> None:
        self.model, self.precision, self.max_grad_norm, self.half_weights = (
            model,
            precision,
            max_grad_norm,
            half_weights,
        )
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.device = device = self.parameters[0].device
        double = self.parameters[0].dtype == torch.float64
        self.schedule = schedule.to(device=device, dtype=torch.float32)
        self.loss = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        self.scale = torch.full((), _FIRST_SCALE if precision.scaled else 1.0, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        for parameter in self.parameters:
            parameter.grad = None  # made by the first backward: what a model does not use is never decayed
        self._set_up(optimizer)

    def _set_up(self, optimizer: Optimizer) -> None:
        self._learning_rate = torch.zeros((), device=self.device)
        self._optimizer = optimizer.apply(self.model, self._learning_rate)

    def before(self) -> None:
        """Before each backward pass. Here gradients are kept, and added to."""

    def around_backward(self) -> AbstractContextManager[None]:
        """What a backward pass runs in."""
        return nullcontext()

    def prepare_gathering(self) -> None:
        """Before the first capture that gathers: what is allocated in one is not the update's own."""

    def gather(self) -> None:
        """After each backward pass of a batch of several micro-batches."""

    def compile_kernels(self, *, gathered: bool) -> None:
        """Compiles the kernels of ours that `apply` and `gather` launch, on the gradients that there are.

        gathered: as `apply` has it.
        """

    def apply(self, *, gathered: bool) -> Tensor:
        """Updates the weights. Returns readings, (5,) fp64: loss, gradient norm, learning rate, scale, skipped.

        gathered: whether gradients were gathered from several micro-batches.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True) / self.scale
        skipped = (~(torch.isfinite(norm) & torch.isfinite(self.loss))).float()
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else torch.ones_like(norm)
        place = self.applied.clamp(max=len(self.schedule) - 1)
        self._learning_rate.copy_(self.schedule.index_select(0, place.view(1))[0])
        self._optimizer.grad_scale = (self.scale / clip).float()  # type: ignore[attr-defined]
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._optimizer.step()
        self.precision.after_update()
        readings = torch.stack([t.double() for t in (self.loss, norm, self._learning_rate, self.scale, skipped)])
        self.applied += (1 - skipped).long()
        self.loss.zero_()
        self._rescale(skipped)
        torch._foreach_zero_(gradients)
        return readings

    def _rescale(self, skipped: Tensor) -> None:
        if self.precision.scaled:
            torch._amp_update_scale_(self.scale, self.growth, skipped, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)

    def num_idle(self) -> int:
        """Parameters that were left alone so far, never having had a gradient. Waits for the device."""
        return 0

    def captured(self) -> Any:
        """After a graph was captured: what of this update it needs to live as long as it does."""

    def release(self) -> None:
        """The end of training: the model's parameters are plain fp32 ones again, and nothing may be updated."""

    def state_tensors(self) -> States:
        """Everything an exact continuation needs: weights, optimizer states by parameter name, counters."""
        weights = dict(self.model.named_parameters()) | dict(self.model.named_buffers()) | self._masters()
        counters = {"applied": self.applied, "scale": self.scale, "growth": self.growth, "in_use": self._in_use()}
        return {
            "weights": {name: tensor.detach() for name, tensor in weights.items()},
            "optimizer": self._optimizer_states(),
            "step": counters,
        }

    def load_state_tensors(self, tensors: States) -> None:
        """Takes up where `state_tensors` was taken."""
        with torch.no_grad():
            own = dict(self.model.named_parameters()) | dict(self.model.named_buffers()) | self._masters()
            for name, target in own.items():
                target.copy_(tensors["weights"][name])
            for name in ("applied", "scale", "growth"):
                getattr(self, name).copy_(tensors["step"][name])
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors["optimizer"].items():
            name, _, field = key.rpartition("/")
            by_name.setdefault(name, {})[field] = value
        self._load_optimizer_states(by_name, tensors["step"]["in_use"])

    def _masters(self) -> dict[str, Tensor]:
        """fp32 weights that are not the model's own parameters, by name."""
        return {}

    def _in_use(self) -> Tensor:
        """(parameters,) bool: a parameter that no batch has used yet has no gradient, and no update: not even decay."""
        return torch.tensor([parameter.grad is not None for parameter in self.parameters])

    def _optimizer_states(self) -> dict[str, Tensor]:
        names = {id(parameter): name for name, parameter in self.named.items()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for parameter, state in self._optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _load_optimizer_states(self, by_name: dict[str, dict[str, Tensor]], in_use: Tensor) -> None:
        for parameter, used in zip(self.parameters, in_use.tolist(), strict=True):
            parameter.grad = torch.zeros_like(parameter) if used else None
        self._optimizer.state.clear()
        for name, parameter in self.named.items():
            if name in by_name:
                self._optimizer.state[parameter] = {k: v.to(self.device, copy=True) for k, v in by_name[name].items()}
