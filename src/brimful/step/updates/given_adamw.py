"""The update of torch's AdamW that the loop's owner made, by our kernels, within the step.

The optimizer stays what the loop saves, loads and schedules by: its states are views of the arenas that the kernels
write, so that `state_dict` has torch's own layout, and its groups' learning rate is read at each step. Its own `step`
does nothing once for each step of ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from brimful.step.state import ParameterState
from brimful.step.updates.fused_adamw import FusedAdamW, can_fuse

#: Options of torch's AdamW that ask for other arithmetic, or for an implementation by name.
_OTHERWISE = ("amsgrad", "maximize", "differentiable", "foreach")
#: States that the kernels keep.
_STATES = frozenset({"step", "exp_avg", "exp_avg_sq"})
#: Values of groups that schedules and loops may set at any step.
_OF_SCHEDULES = frozenset({"params", "lr", "initial_lr", "fused", "capturable"})


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnersAdamW:
    """torch's AdamW of a loop's owner, which our kernels may update by."""

    optimizer: torch.optim.AdamW


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return all that its groups say but the learning rate, and the parameters that they are of."""
    return tuple(
        (*map(id, group["params"]), *(value for name, value in group.items() if name not in _OF_SCHEDULES))
        for group in optimizer.param_groups
    )


def shared_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of all groups; None where they differ, or where one is a tensor."""
    rates = [group["lr"] for group in optimizer.param_groups]
    alike = all(isinstance(rate, int | float) and rate == rates[0] for rate in rates)
    return float(rates[0]) if alike else None


def can_take(model: nn.Module, optimizer: Any) -> bool:
    """Return whether our kernels compute what this optimizer does: AdamW of all trained weights, in fp32 on a GPU."""
    if type(optimizer) is not torch.optim.AdamW or not can_fuse(model) or shared_rate(optimizer) is None:
        return False
    groups = optimizer.param_groups
    theirs = {id(p) for group in groups for p in group["params"]}
    alike = all(group["betas"] == groups[0]["betas"] and group["eps"] == groups[0]["eps"] for group in groups)
    numbers = [value for group in groups for value in (*group["betas"], group["eps"], group["weight_decay"])]
    hooks = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks),
    )
    return (
        alike
        and theirs == {id(p) for p in model.parameters() if p.requires_grad}
        and not any(isinstance(value, Tensor) for value in numbers)
        and min(groups[0]["betas"]) > 0
        and not any(group.get(name) for group in groups for name in _OTHERWISE)
        and not any(hooks)
        and _is_its_own(vars(optimizer).get("step"))
        and all(not state or state.keys() == _STATES for state in optimizer.state.values())
    )


def _is_its_own(step: Callable[..., Any] | None) -> bool:
    """True for an optimizer's step that nobody has replaced, or a schedule alone, to count calls."""
    return step is None or hasattr(step, "_wrapped_by_lr_sched")


class GivenAdamW(FusedAdamW):
    """`FusedAdamW` for an optimizer of its owner. The model's parameters stay fp32 ones, which a loop may read between
    steps; there are no half-precision copies, which a loop that writes weights would leave behind.

    was_loaded: the owner has loaded other states since, which only a new update takes up.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, *, max_grad_norm: float) -> None:
        groups, names = optimizer.param_groups, {id(p): name for name, p in model.named_parameters()}
        self._owners, self.was_loaded, self._given = optimizer, False, False
        self.settings = settings_of(optimizer)
        super().__init__(
            model,
            torch.tensor([float(groups[0]["lr"])]),
            max_grad_norm=max_grad_norm,
            scaled=False,
            betas=groups[0]["betas"],
            epsilon=groups[0]["eps"],
            weight_decay={names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]},
            half=None,
        )
        kept = {name: state for name, p in self.named.items() if (state := optimizer.state.get(p))}
        states = {name: ParameterState.of(state, self.named[name]) for name, state in kept.items()}
        self._load_optimizer_state(states, set(states))
        self._hooks = [
            optimizer.register_state_dict_pre_hook(_calling(self, GivenAdamW.give_states)),
            optimizer.register_load_state_dict_post_hook(_calling(self, GivenAdamW._note_loaded)),
        ]
        self._is_due, self._step_before = False, vars(optimizer).get("step")
        vars(optimizer)["step"] = self._skipping(optimizer.step)

    def _skipping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The optimizer's step, without one that was made already. Schedules look whether it was called."""
        this = weakref.ref(self)

        def skipping(closure: Any = None) -> Any:
            update = this()
            if update is None or not update._is_due:
                return step(closure)
            update.skip()
            return None

        skipping._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return skipping

    def begin(self) -> None:
        """Take the learning rate that the groups have now."""
        self.schedule.fill_(self._owners.param_groups[0]["lr"])

    def made(self) -> None:
        """Note that a step was made, which the owner will ask the optimizer for."""
        self._is_due = True
        if not self._given:
            self._given = True
            self.give_states()

    def skip(self) -> None:
        """Take the owner's call for a step that was made. Schedules look whether there was one."""
        self._is_due, self._owners._opt_called = False, True  # type: ignore[attr-defined]

    def give_states(self) -> None:
        """Have the optimizer's states be what the kernels keep, of those parameters that ever had a gradient.

        Waits for the device.
        """
        if self.was_loaded:
            return
        views, on_device = self._state_views(), set[int]()
        for group in self._owners.param_groups:  # torch's other implementations count steps on the host
            if group.get("fused") or group.get("capturable"):
                on_device |= {id(p) for p in group["params"]}
        steps = self._steps.cpu()
        for name, step in zip(self.named, steps.unbind(), strict=True):
            views[name]["step"] = views[name]["step"] if id(self.named[name]) in on_device else step.clone()
        for name in self._used_names():
            self._owners.state[self.named[name]] = views[name]

    def _note_loaded(self) -> None:
        self.was_loaded = True

    def is_current(self) -> bool:
        """True while the optimizer is as it was, but for its learning rate."""
        return (
            not self.was_loaded and shared_rate(self._owners) is not None and settings_of(self._owners) == self.settings
        )

    def release(self) -> None:
        """As `FusedAdamW` has it. The optimizer is its owner's again."""
        self.give_states()
        super().release()
        for hook in self._hooks:
            hook.remove()
        vars(self._owners).pop("step", None)
        if self._step_before is not None:
            vars(self._owners)["step"] = self._step_before


def _calling(update: GivenAdamW, method: Callable[[GivenAdamW], None]) -> Callable[[Any], None]:
    """A hook that keeps no arena alive."""
    this = weakref.ref(update)

    def hook(_: Any) -> None:
        if (found := this()) is not None:
            method(found)

    return hook
