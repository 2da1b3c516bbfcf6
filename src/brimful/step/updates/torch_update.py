"""The update by any torch optimizers, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from brimful.hardware.memory import CaptureMemoryError
from brimful.step.state import ParameterState
from brimful.step.updates.torchao_states import is_of_torchao, make_states
from brimful.step.updates.update import Graphs, Update

#: Settings of torch's optimizers that say how a step is computed, and not what: a run is gone on with in any form.
_FORMS = ("foreach", "fused", "capturable", "differentiable")


class TorchUpdate(Update):
    """`Update` by optimizers that `make` makes, given the () learning rate that they may read at each step.

    torch's fused optimizers take the loss scale, clipping and whether to skip from the device. For others gradients are
    scaled here, the host waits to see whether they are finite, and the learning rate is a number.
    own_states: whether only an optimizer's own step can make its states, of classes or memory of its own.
    is_recordable: whether a step of an optimizer that the host decides on can be a graph: its numbers are where its
    weights are.
    """

    def __init__(
        self, model: nn.Module, make: Callable[[Tensor], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]],
        schedule: Tensor, *, max_grad_norm: float, scaled: bool, own_states: bool = False,
        is_recordable: Callable[[torch.optim.Optimizer], bool] = is_of_torchao,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled)
        self._learning_rate = torch.zeros((), dtype=torch.float32, device=self.device)
        made = make(self._learning_rate)
        self._optimizers: list[Any] = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        self._own_states, self._is_recordable = own_states, is_recordable
        self._graphs: Graphs | None = None
        self.on_device = all(getattr(each, "_step_supports_amp_scaling", False) for each in self._optimizers)
        self._set_mode("train")
        self._used: Sequence[Tensor] = ()  # parameters that an update had a gradient of
        # Graphs write gradients where they are. On a CPU a backward pass leaves its own: none is filled and added to.
        self._keeps_gradients = self.device.type != "cpu"
        self._num_prepared = 0

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it; gradients of several micro-batches were added up by their backward passes."""
        for parameter in self._used:  # what has a gradient once has one ever after
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        used = [p for p in self.parameters if p.grad is not None]
        gradients = [p.grad for p in used if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True) / self.scale
        skipped = (~(torch.isfinite(norm) & torch.isfinite(self.loss))).float()
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else torch.ones_like(norm)
        readings = torch.stack([t.double() for t in (self.loss, norm, self._rate(), self.scale, skipped)])
        applied, factor = self.applied + (1 - skipped).long(), clip / self.scale
        if self.on_device:
            self._prepare(used)
            scale = (self.scale / clip).float()
            for optimizer in self._optimizers:
                optimizer.grad_scale, optimizer.found_inf = scale, skipped
        self.committed = True
        if self.on_device:
            self._step_on_device()
        elif not skipped.item():
            torch._foreach_mul_(gradients, float(factor))
            self._step_on_host(float(self._learning_rate))
        self.applied.copy_(applied)
        self.loss.zero_()
        self._rescale(skipped)
        self._used = used
        self._clear(used)
        return readings

    def _clear(self, used: Sequence[Tensor]) -> None:
        """Leave no gradient of the last batch in parameters that had one."""
        if self._keeps_gradients:
            torch._foreach_zero_([parameter.grad for parameter in used if parameter.grad is not None])
            return
        for parameter in used:
            parameter.grad = None

    def _rate(self) -> Tensor:
        """The learning rate of this step, where the optimizers read it."""
        place = self.applied.clamp(max=len(self.schedule) - 1)
        self._learning_rate.copy_(self.schedule.index_select(0, place.view(1))[0])
        return self._learning_rate

    def _step_on_device(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def _prepare(self, used: Sequence[Tensor]) -> None:
        """Have optimizers make their states before the update, by a step that they skip.

        torch makes them one after another within a step: were memory to run out, half the weights would be updated.
        """
        if len(used) == self._num_prepared:
            return
        ones = torch.ones_like(self.scale)
        for optimizer in self._optimizers:
            before = set(optimizer.state)
            optimizer.grad_scale = optimizer.found_inf = ones
            try:
                optimizer.step()
            except BaseException:
                for parameter in set(optimizer.state) - before:
                    del optimizer.state[parameter]
                raise
        self._num_prepared = len(used)

    def abandon(self) -> None:
        """As `Update` has it: gradients are what they were before the batch."""
        super().abandon()
        self._clear_graphs()
        used = set(self._used)
        for parameter in self.parameters:
            if self._keeps_gradients and parameter in used and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def _step_on_host(self, learning_rate: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(learning_rate)
                else:
                    group["lr"] = learning_rate
            if is_of_torchao(optimizer):
                make_states(optimizer)
            if (graph := self._graph_of(optimizer)) is None:
                optimizer.step()
            else:
                graph.replay()

    def record_with(self, graphs: Graphs | None) -> None:
        """As `Update` has it."""
        self._graphs = graphs

    def _clear_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _graph_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """The graph of a step of the parameters that have a gradient; None where it is launched by the host, as it is
        where there is no memory for a graph."""
        if self._graphs is None or not self._is_recordable(optimizer):
            return None
        used = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        key = (id(optimizer), tuple((p.data_ptr(), p.grad.data_ptr()) for p in used if p.grad is not None))
        if not self._graphs.meet([key]):
            return None
        try:
            return self._graphs.find(key, lambda _: optimizer.step())
        except CaptureMemoryError:
            self._graphs.stop("there is no memory for a graph of them")
            return None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """As `Update` has it: optimizers without a schedule judge by an average of their weights.

        Taking the average and undoing it rounds, so the weights that are trained are kept aside meanwhile.
        """
        trained = [(parameter, parameter.detach().clone()) for parameter in self._averaged()]
        self._set_mode("eval")
        try:
            yield
        finally:
            self._set_mode("train")
            with torch.no_grad():
                for parameter, kept in trained:
                    parameter.copy_(kept)

    def release(self) -> None:
        """As `Update` has it."""
        self._clear_graphs()
        self._set_mode("eval")

    def _averaged(self) -> list[Tensor]:
        """Parameters whose optimizer has an average of them for evaluation."""
        averaging = [optimizer for optimizer in self._optimizers if hasattr(optimizer, "eval")]
        return [p for optimizer in averaging for group in optimizer.param_groups for p in group["params"]]

    def _set_mode(self, mode: str) -> None:
        for optimizer in self._optimizers:
            if hasattr(optimizer, mode):
                getattr(optimizer, mode)()

    def _used_names(self) -> tuple[str, ...]:
        used = set(map(id, self._used))
        return tuple(name for name, parameter in self.named.items() if id(parameter) in used)

    def _kept(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, empty if it has none yet."""
        return next((each.state[parameter] for each in self._optimizers if each.state.get(parameter)), {})

    def _optimizer_state(self) -> dict[str, ParameterState]:
        kept = {name: (self._kept(p), p) for name, p in self.named.items()}
        return {name: ParameterState.of(state, p) for name, (state, p) in kept.items() if state}

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        self._clear_graphs()
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._used, self._num_prepared = [self.named[name] for name in self.named if name in used], 0
        for name, parameter in self.named.items():
            with_gradient = name in state if self._own_states else name in used
            parameter.grad = torch.zeros_like(parameter) if with_gradient else None
        if self._own_states and state:
            self._step_on_host(0.0)  # of no gradient, by no rate: weights are as they were
        for name, parameter in self.named.items():
            if name in state and self._own_states:
                state[name].fill(self._kept(parameter))
            elif name in state:
                kept = state[name].restored(parameter)
                if self.on_device and "step" in kept:  # of a run whose host counted steps
                    kept["step"] = torch.as_tensor(kept["step"], dtype=torch.float32, device=parameter.device)
                self._holder(parameter).state[parameter] = kept
            if name in used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._clear([self.named[name] for name in self.named if name in used])

    def _state_tensors(self) -> Iterator[Tensor]:
        states = (state for each in self._optimizers for state in each.state.values() if isinstance(state, dict))
        return (value for state in states for value in state.values() if isinstance(value, Tensor))

    def _holder(self, parameter: Tensor) -> Any:
        """The optimizer of a parameter."""
        return next(
            each for each in self._optimizers if any(p is parameter for g in each.param_groups for p in g["params"])
        )

    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]

    def _groups(self) -> tuple[Mapping[str, Any], ...]:
        left_out = {"params", "lr", *_FORMS}
        return tuple(
            {key: value for key, value in group.items() if key not in left_out and not isinstance(value, Tensor)}
            for group in self._all_groups()
        )

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for group, saved in zip(self._all_groups(), groups, strict=False):
            kept = {key: value for key, value in saved.items() if key not in _FORMS}
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()})
