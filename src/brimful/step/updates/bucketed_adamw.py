"""AdamW a bucket of parameters at a time: where less than all weights, gradients and states is to be on the device.

In one bucket the arithmetic is that of torch's fused AdamW, in fp32. Around it each is optional: weights of Linear
layers in bf16 alone, states in bf16 (both rounded by chance), states in host memory, and the update within the backward
pass, as soon as the gradients of a bucket are complete. These are freed then.

Within the backward pass the norm of the whole gradient is not known yet: it is clipped by that of the step before, if
at all. A gradient that is not finite leaves its bucket and those after it as they were; buckets before it are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brimful.step.state import ParameterState
from brimful.step.updates.host_states import HostStates
from brimful.step.updates.rounding import mix, stochastic_bf16
from brimful.step.updates.update import Update

#: Parameters are taken together up to so many elements.
BUCKET = 4 << 20
#: Elements that a parameter's states start at a multiple of.
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Memory that an update does without.

    weights: dtype of Linear weights, whose parameters are `halved` by id; None for fp32. states: dtype of moments.
    on_host: whether these are in host memory. in_backward: whether gradients are freed within the backward pass.
    late_clipping: whether they are clipped by the norm of the step before.
    """

    weights: torch.dtype | None = None
    halved: frozenset[int] = frozenset()
    states: torch.dtype = torch.float32
    on_host: bool = False
    in_backward: bool = False
    late_clipping: bool = False


@dataclass(eq=False)
class Bucket:
    """Parameters by number, the place of each in the states, and how many of them have their gradient by now."""

    number: int
    members: list[int]
    starts: list[int]
    size: int
    num_complete: int = 0
    is_done: bool = False


class BucketedAdamW(Update):
    """AdamW by buckets. weight_decay: by name of those parameters that have any."""

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, betas: tuple[float, float],
        epsilon: float, weight_decay: Mapping[str, float], savings: Savings, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled, device=device)
        self._savings, self._betas, self._epsilon = savings, betas, epsilon
        self._decays = [weight_decay.get(name, 0.0) for name in self.named]
        for parameter in self.parameters:
            if savings.weights is not None and id(parameter) in savings.halved:
                parameter.data = parameter.data.to(savings.weights)
        self._buckets = self._made_buckets()
        self._bucket_of = {i: each for each in self._buckets for i in each.members}
        self._arenas = [self._arena(each) for each in self._buckets]
        self._host = HostStates(self._arenas, self.device) if savings.on_host else None
        zeros: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        self._steps = torch.zeros(len(self.parameters), **zeros).unbind()
        self._learning_rate, self._squares, self._skipped = (torch.zeros((), **zeros) for _ in range(3))
        self._late_norm, self._scale = torch.zeros((), **zeros), torch.ones((), **zeros)
        self._used: set[int] = set()
        self._sums: dict[int, Tensor] | None = None
        self._gathered: set[int] = set()
        self._is_held = self._is_begun = False
        index = {id(p): i for i, p in enumerate(self.parameters)}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: self._complete(index[id(p)]))
            for p in self.parameters
            if savings.in_backward
        ]

    def _made_buckets(self) -> list[Bucket]:
        return buckets_of(self.parameters, BUCKET)

    def _arena(self, bucket: Bucket) -> Tensor:
        device = torch.device("cpu") if self._savings.on_host else self.device
        pinned = self._savings.on_host and self.device.type == "cuda"
        return torch.zeros(2, bucket.size, dtype=self._savings.states, device=device, pin_memory=pinned)

    def before(self) -> None:
        """Drop gradients: those of several micro-batches are in their sums."""
        for parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Within, buckets are updated as their gradients are complete, if that was asked for and the batch is whole."""
        if not self._savings.in_backward or self._is_held or not self.whole:
            yield
            return
        self._begin()
        clip = self._clip(self._late_norm)
        self._skipped.copy_((~torch.isfinite(self.loss)).float())
        self._scale = self.scale / clip
        self._is_begun = True
        yield

    def _complete(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if self._is_begun:
            bucket.num_complete += 1
            if bucket.num_complete == len(bucket.members):
                self._update_early(bucket)

    def _update_early(self, bucket: Bucket) -> None:
        """Update a bucket from the gradients that there are, and free them."""
        gradients = {i: g for i in bucket.members if (g := self.parameters[i].grad) is not None}
        if gradients:
            norm = torch.nn.utils.get_total_norm(list(gradients.values())).float() / self.scale
            self._squares.add_(norm * norm)
            self._skipped.copy_(torch.maximum(self._skipped, (~torch.isfinite(norm)).float()))
        self.committed = True
        self._update(bucket, gradients)
        bucket.is_done = True
        for i in bucket.members:
            self.parameters[i].grad = None

    def prepare_gathering(self) -> None:
        """Allocate the sums: memory of a capture is written to at every replay."""
        if self._sums is None:
            here = (i for i in range(len(self.parameters)) if self._is_summed_here(i))
            self._sums = {i: torch.zeros_like(self.parameters[i], dtype=torch.float32) for i in here}

    def _is_summed_here(self, index: int) -> bool:
        """True for a parameter whose gradients of several micro-batches are summed on the device."""
        return True

    def gather(self) -> None:
        """Add the gradients of one micro-batch to the batch's, in fp32."""
        self.prepare_gathering()
        assert self._sums is not None
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._gathered.add(i)
                self._sums[i].add_(parameter.grad)
                parameter.grad = None

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it. Buckets that were updated within the backward pass are left alone."""
        if self._is_begun:
            for bucket in self._buckets:
                if not bucket.is_done:
                    self._update_early(bucket)
            norm = self._squares.sqrt()
        else:
            norm = self._apply_whole(gathered=gathered)
        if self._host is not None:
            self._host.finish()
        skipped = self._skipped.clone()
        readings = torch.stack([t.double() for t in (self.loss, norm, self._learning_rate, self.scale, skipped)])
        self._late_norm.copy_(torch.where(skipped > 0, self._late_norm, norm))
        self.applied.add_((1 - skipped).long())
        self.loss.zero_()
        self._rescale(skipped)
        self._end(gathered=gathered)
        return readings

    def _apply_whole(self, *, gathered: bool) -> Tensor:
        found = self._gradients(gathered=gathered)
        self._begin()
        norm = self._norm(found) / self.scale
        self._skipped.copy_((~(torch.isfinite(norm) & torch.isfinite(self.loss))).float())
        late = self._savings.late_clipping
        self._scale = self.scale / self._clip(self._late_norm if late else norm)
        self.committed = True
        self._update_all(found)
        return norm

    def _norm(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """The norm of the whole gradient, times the scale."""
        return torch.nn.utils.get_total_norm(list(gradients.values()), foreach=True)

    def _update_all(self, gradients: Mapping[int, Tensor]) -> None:
        for bucket in self._buckets:
            self._update(bucket, {i: gradients[i] for i in bucket.members if i in gradients})

    def _gradients(self, *, gathered: bool) -> dict[int, Tensor]:
        if not gathered:
            return {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        assert self._sums is not None
        return {i: self._sums[i] for i in sorted(self._gathered)}

    def _begin(self) -> None:
        """Read the learning rate, and begin the norm. What a capture that was refused left behind is dropped."""
        for bucket in self._buckets:
            bucket.num_complete, bucket.is_done = 0, False
        if self._host is not None:
            self._host.forget()
        place = self.applied.clamp(max=len(self.schedule) - 1)
        self._learning_rate.copy_(self.schedule.index_select(0, place.view(1))[0])
        self._squares.zero_()

    def _clip(self, norm: Tensor) -> Tensor:
        if not self.max_grad_norm:
            return torch.ones_like(norm)
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _update(self, bucket: Bucket, gradients: Mapping[int, Tensor]) -> None:
        """Update those parameters of a bucket that ever had a gradient."""
        self._used |= gradients.keys()
        members = [(i, start) for i, start in zip(bucket.members, bucket.starts, strict=True) if i in self._used]
        if not members:
            return
        states = self._arenas[bucket.number] if self._host is None else self._host.fetch(bucket.number)
        wide = states.float()
        for decay in sorted({self._decays[i] for i, _ in members}):
            chosen = [(i, start) for i, start in members if self._decays[i] == decay]
            self._fused(chosen, wide, gradients, decay)
        if states.dtype != torch.float32:
            states.copy_(stochastic_bf16(wide, mix(self.applied, bucket.number, 1)))
        if self._host is not None:
            self._host.put(bucket.number, states)

    def _fused(
        self, chosen: Sequence[tuple[int, int]], wide: Tensor, gradients: Mapping[int, Tensor], decay: float
    ) -> None:
        parameters = [self.parameters[i] for i, _ in chosen]
        weights = [p.detach().float() for p in parameters]
        given = [gradients[i].float() if i in gradients else torch.zeros_like(w)
                 for (i, _), w in zip(chosen, weights, strict=True)]  # fmt: skip
        first, second = (
            [part[start : start + w.numel()].view(w.shape) for (_, start), w in zip(chosen, weights, strict=True)]
            for part in wide.unbind()
        )
        steps = [self._steps[i] for i, _ in chosen]
        torch._foreach_add_(steps, [1 - self._skipped] * len(steps))  # one tensor would be read by the host
        torch._fused_adamw_(
            weights, given, first, second, [], steps,
            lr=self._learning_rate, beta1=self._betas[0], beta2=self._betas[1], weight_decay=decay, eps=self._epsilon,
            amsgrad=False, maximize=False, grad_scale=self._scale.float(), found_inf=self._skipped,
        )  # fmt: skip
        with torch.no_grad():
            for (i, _), parameter, weight in zip(chosen, parameters, weights, strict=True):
                if parameter.dtype != torch.float32:
                    parameter.copy_(stochastic_bf16(weight, mix(self.applied, i, 2)))

    def _end(self, *, gathered: bool) -> None:
        self._is_begun = False
        for bucket in self._buckets:
            bucket.num_complete, bucket.is_done = 0, False
        if gathered and self._sums is not None:
            torch._foreach_zero_(list(self._sums.values()))
        self.before()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """As `Update` has it: nothing is updated within a backward pass."""
        self._is_held = True
        try:
            with super().undisturbed():
                yield
        finally:
            self._is_held = False

    def gradients(self, *, gathered: bool) -> list[Tensor]:
        """As `Update` has it."""
        found = self._gradients(gathered=gathered)
        return [found[i].clone() if i in found else torch.zeros_like(p) for i, p in enumerate(self.parameters)]

    def _counters(self) -> tuple[Tensor, ...]:
        return (*super()._counters(), self._late_norm, self._skipped, *self._steps)

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        if self._host is not None:
            self._host.finish()
        self._end(gathered=True)

    def captured(self) -> Any:
        """Leave the gradients to the graph, whose memory they are."""
        self.before()

    def release(self) -> None:
        """As `Update` has it."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = parameter.data.float()

    def weights(self) -> dict[str, Tensor]:
        """As `Update` has it; those in bf16 are widened."""
        return {name: parameter.detach().float() for name, parameter in self.named.items()}

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from super()._gradient_tensors()
        yield from (self._sums or {}).values()

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from self._arenas

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for i, name in enumerate(self.named) if i in self._used)

    def _moments(self, index: int) -> tuple[Tensor, Tensor]:
        bucket, parameter = self._bucket_of[index], self.parameters[index]
        start = bucket.starts[bucket.members.index(index)]
        first, second = self._arenas[bucket.number][:, start : start + parameter.numel()].unbind()
        return first.view(parameter.shape), second.view(parameter.shape)

    def _optimizer_state(self) -> dict[str, ParameterState]:
        if self._host is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = {}
        for i, name in enumerate(self.named):
            if i in self._used:
                one, two = self._moments(i)
                found[name] = ParameterState(tensors={"step": self._steps[i], "exp_avg": one, "exp_avg_sq": two})
        return found

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        self._used = {i for i, name in enumerate(self.named) if name in used}
        for i, name in enumerate(self.named):
            places = dict(zip(("step", "exp_avg", "exp_avg_sq"), (self._steps[i], *self._moments(i)), strict=True))
            for key, place in places.items():
                place.copy_(state[name].tensors[key]) if name in state else place.zero_()
        self.abandon()

    def _groups(self) -> tuple[Mapping[str, Any], ...]:
        return ({"late_norm": float(self._late_norm)},) if self._savings.late_clipping else ()

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if groups and "late_norm" in groups[0]:
            self._late_norm.fill_(groups[0]["late_norm"])


def buckets_of(
    parameters: Sequence[Tensor], most: int, owner: Callable[[int], Hashable] = lambda _: None
) -> list[Bucket]:
    """Parameters from the last to the first, as a backward pass comes to them; in one bucket those of one owner."""
    found: list[Bucket] = []
    for index in reversed(range(len(parameters))):
        size = -(-parameters[index].numel() // _ALIGNMENT) * _ALIGNMENT
        if not found or found[-1].size + size > most or owner(found[-1].members[0]) != owner(index):
            found.append(Bucket(number=len(found), members=[], starts=[], size=0))
        found[-1].members.append(index)
        found[-1].starts.append(found[-1].size)
        found[-1].size += size
    return found
