"""The update by an optimizer that the loop's owner made, and none at all, for a loop that updates by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from brimful.core.errors import OptionError
from brimful.step.state import ParameterState
from brimful.step.updates.torch_update import TorchUpdate
from brimful.step.updates.update import Update

#: torch's own optimizers whose fused kernels on a GPU compute the same; they take whether to skip from the device.
_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


class GivenUpdate(TorchUpdate):
    """`Update` by the owner's optimizer, whose learning rates are those of its groups at each step.

    On a GPU, torch's own optimizers are switched to their fused kernels unless the owner chose others. Rates are
    copied to the device before each step: a graph reads them there, and the groups keep the owner's numbers.
    Raises: OptionError for an optimizer of other parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float, scaled: bool
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        if strangers := [p for p in parameters if id(p) not in trained and p.requires_grad]:
            raise OptionError(
                f"the optimizer has {len(strangers)} parameters that are not the model's",
                hint="make it of this model's parameters(), after the model is loaded and adapted",
            )
        _follow(optimizer)
        if parameters[0].is_cuda:
            _fuse(optimizer)
        super().__init__(
            model, lambda _: optimizer, torch.zeros(1), max_grad_norm=max_grad_norm, scaled=scaled, own_states=False
        )
        self._owners = optimizer
        self._rates = [torch.zeros((), dtype=torch.float32, device=self.device) for _ in optimizer.param_groups]
        self.begin()

    def begin(self) -> None:
        """Take the learning rates that the groups have now."""
        for rate, group in zip(self._rates, self._owners.param_groups, strict=True):
            value = group["lr"]
            rate.copy_(value) if isinstance(value, Tensor) else rate.fill_(value)

    def _rate(self) -> Tensor:
        self._learning_rate.copy_(self._rates[0])
        return self._learning_rate

    @contextmanager
    def _lent_rates(self) -> Iterator[None]:
        """Within, groups of a GPU's optimizer have the rates on the device."""
        if not (self.on_device and self.device.type == "cuda"):
            yield
            return
        before = [group["lr"] for group in self._owners.param_groups]
        for group, rate in zip(self._owners.param_groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(self._owners.param_groups, before, strict=True):
                group["lr"] = value

    def around_backward(self) -> AbstractContextManager[None]:
        """As `Update` has it. The owner's hooks on gradients wait until all passes of the batch are made."""
        return _hooks_waiting(self.parameters)

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it, from gradients as the owner's hooks leave them."""
        _call_hooks(self.parameters)
        return super().apply(gathered=gathered)

    def _prepare(self, used: Any) -> None:
        with self._lent_rates():
            super()._prepare(used)

    def _step_on_device(self) -> None:
        with self._lent_rates():
            super()._step_on_device()

    def _step_on_host(self, learning_rate: float) -> None:
        self._owners.step()

    def _groups(self) -> tuple[Mapping[str, Any], ...]:
        rates = [float(group["lr"]) for group in self._owners.param_groups]
        return tuple({**group, "lr": rate} for group, rate in zip(super()._groups(), rates, strict=True))

    def release(self) -> None:
        """As `Update` has it. The optimizer is its owner's again."""
        super().release()
        for name in ("grad_scale", "found_inf"):
            vars(self._owners).pop(name, None)
        for parameter in self.parameters:
            parameter.grad = None


@contextmanager
def _hooks_waiting(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within, no hook on the gradient of a parameter is called: a pass has a part of the gradient."""
    hooked = [(parameter, hooks) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


def _call_hooks(parameters: Sequence[Tensor]) -> None:
    """Call the hooks on gradients with those that there are, and put in their place what hooks return."""
    with torch.no_grad():
        for parameter in parameters:
            for hook in tuple((parameter._backward_hooks or {}).values()):
                if parameter.grad is not None and (changed := hook(parameter.grad)) is not None:
                    parameter.grad.copy_(changed)


def _follow(optimizer: torch.optim.Optimizer) -> None:
    """Move states that were loaded already to where the parameters are now."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.device != parameter.device:
                state[name] = value.to(parameter.device)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Switch torch's own optimizer to its fused kernels, whose arithmetic is the same."""
    groups = optimizer.param_groups
    own_choice = any(g.get(name) for g in groups for name in ("foreach", "differentiable"))
    if type(optimizer) not in _FUSED or own_choice or not all(p.is_cuda for g in groups for p in g["params"]):
        return
    for group in groups:
        group["fused"] = True
        if "capturable" in group:
            group["capturable"] = True
    vars(optimizer)["_step_supports_amp_scaling"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


class Gradients(Update):
    """No update: gradients of the effective batch are left in `.grad`, for a loop that clips and updates by itself.

    The loop may set them to None after its update. On a GPU their memory is kept, filled with zeros and given back: a
    graph goes on writing to it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.zeros(1), max_grad_norm=0.0, scaled=False)
        self._memory: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Drop the gradients of before; where they are kept, give parameters that ever had one one of zeros."""
        for parameter in self.parameters:
            parameter.grad = None
        for name, gradient in self._memory.items():
            self.named[name].grad = gradient
        if self._memory:
            torch._foreach_zero_(list(self._memory.values()))

    def around_backward(self) -> AbstractContextManager[None]:
        """As `Update` has it. The owner's hooks on gradients wait until all passes of the batch are made."""
        return _hooks_waiting(self.parameters)

    def apply(self, *, gathered: bool) -> Tensor:
        """Read the loss, and leave everything but the owner's hooks to the loop. The norm is not computed here."""
        _call_hooks(self.parameters)
        zero = torch.zeros_like(self.loss).double()
        readings = torch.stack([self.loss.double(), zero, zero, zero + 1.0, zero])
        self.committed = True
        self.loss.zero_()
        if self.device.type != "cpu":
            self._memory |= {name: p.grad for name, p in self.named.items() if p.grad is not None}
        return readings

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """As `Update` has it: memory that a probe's gradients had is not the step's."""
        memory = dict(self._memory)
        self._memory.clear()
        with super().undisturbed():
            yield
        self._memory = memory

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        self._memory.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def _state_tensors(self) -> Iterator[Tensor]:
        return iter(())

    def _used_names(self) -> tuple[str, ...]:
        return tuple(self._memory)

    def _optimizer_state(self) -> dict[str, ParameterState]:
        return {}

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        """Nothing: the optimizer is the loop's."""
