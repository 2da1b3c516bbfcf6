"""AdamW a bucket of parameters at a time: where less than all weights, gradients and states is to be on the device.

In one bucket the arithmetic is that of torch's fused AdamW, in fp32. Around it each is optional: weights of Linear
layers in bf16 alone, states in bf16 (both rounded by chance) or in 8 bits, states in host memory, and the update within
the backward pass, as soon as the gradients of a bucket are complete. These are freed then. On a GPU what is rounded is
updated by a kernel of ours, a parameter a launch. Updates within the backward pass go on beside it there, on a stream
of their own: products leave memory idle, and updates the matrix units.

Within the backward pass the norm of the whole gradient is not known yet: it is clipped by that of the step before, if
at all. A gradient that is not finite leaves its bucket and those after it as they were; buckets before it are updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brimful.hardware.memory import release_unused
from brimful.hardware.streams import stream_for
from brimful.step.state import ParameterState
from brimful.step.updates.buckets import Bucket, buckets_of, norms_of
from brimful.step.updates.host_states import AHEAD, LEAVING, HostStates
from brimful.step.updates.moments import Moments, moments_in, num_bytes
from brimful.step.updates.rounded_kernels import RoundedKernels, can_launch
from brimful.step.updates.rounding import mix, stochastic_bf16
from brimful.step.updates.update import Update

#: Parameters are taken together up to so many elements.
BUCKET = 4 << 20
#: Buckets whose update may be under way while the backward pass goes on: their gradients are there until it is done.
_BEHIND = 2
#: Most of all states that stay on the device with those of the last bucket.
MOST_STAYING = 0.25
#: Bytes of buckets that are on the device at once, about: of gradients within a backward pass, and of states from the
#: host, in fp32.
GRADIENTS_UNDER_WAY, STATES_UNDER_WAY = (_BEHIND + 1) * 4 * BUCKET, AHEAD + (LEAVING + 1) * 8 * BUCKET
#: Least elements of a Linear weight whose states are in 8 bits, where they are to be; those of all else stay fp32.
LEAST_IN_8_BITS = 4096


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Memory that an update does without.

    weights: dtype of Linear weights, whose parameters are `linear` by id; None for fp32. states: dtype of moments,
    uint8 for 8 bits, which those of Linear weights alone have. on_host: whether they are in host memory.
    in_backward: whether gradients are freed within the backward pass.
    late_clipping: whether they are clipped by the norm of the step before.
    """

    weights: torch.dtype | None = None
    linear: frozenset[int] = frozenset()
    states: torch.dtype = torch.float32
    on_host: bool = False
    in_backward: bool = False
    late_clipping: bool = False


class BucketedAdamW(Update):
    """AdamW by buckets. weight_decay: by name of those parameters that have any."""

    #: Of states on their way to the host while others are updated, as `HostStates` has it.
    _leaving_bytes = 0

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, betas: tuple[float, float],
        epsilon: float, weight_decay: Mapping[str, float], savings: Savings, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled, device=device)
        self._savings, self._betas, self._epsilon = savings, betas, epsilon
        self._decays = [weight_decay.get(name, 0.0) for name in self.named]
        for parameter in self.parameters:
            if savings.weights is not None and id(parameter) in savings.linear:
                parameter.data = parameter.data.to(savings.weights)
        if savings.weights is not None:
            release_unused(self.device)  # states would come on top of what the wide weights had
        self._buckets = self._made_buckets()
        self._bucket_of = {i: each for each in self._buckets for i in each.members}
        for each in self._buckets:
            self._lay_out(each)
        staying = {each.number for each in self._buckets if self._stays(each)}
        self._arenas = [self._arena(each.num_bytes, stays=each.number in staying) for each in self._buckets]
        kept_on_host = (self._arenas, self.device, staying, self._leaving_bytes)
        self._host = HostStates(*kept_on_host) if savings.on_host else None
        zeros: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        self._counts = torch.zeros(len(self.parameters), **zeros)
        self._steps = self._counts.unbind()
        self._learning_rate, self._squares, self._skipped = (torch.zeros((), **zeros) for _ in range(3))
        self._late_norm, self._scale = torch.zeros((), **zeros), torch.ones((), **zeros)
        self._number = self.applied.clone()  # of the steps before this one, by which noise is drawn
        self._kernels: RoundedKernels | None = None
        if can_launch(self.device, betas):
            given = (self._learning_rate, self._skipped, self._number)
            self._kernels = RoundedKernels(self.device, betas, epsilon, *given)
        self._used: set[int] = set()
        self._sums: dict[int, Tensor] | None = None
        self._gathered: set[int] = set()
        self._is_held = self._is_begun = False
        self._left: dict[int, Tensor] = {}  # gradients in host memory, by parameter
        self._beside = stream_for("updates", self.device) if self._has_stream() else None
        self._under_way: deque[tuple[list[Tensor], Any]] = deque()  # gradients, and the event of their update
        index = {id(p): i for i, p in enumerate(self.parameters)}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: self._complete(index[id(p)]))
            for p in self.parameters
            if savings.in_backward
        ]

    def _made_buckets(self) -> list[Bucket]:
        return buckets_of(self.parameters, BUCKET)

    def _has_stream(self) -> bool:
        """True if updates within the backward pass have a stream of their own."""
        return self._savings.in_backward and self.device.type == "cuda"

    def _lay_out(self, bucket: Bucket) -> None:
        for i in bucket.members:
            bucket.places[i] = bucket.num_bytes
            bucket.num_bytes += num_bytes(self._dtype_of_states(i), self.parameters[i].numel())

    def _dtype_of_states(self, index: int) -> torch.dtype:
        parameter, asked = self.parameters[index], self._savings.states
        is_small = parameter.ndim < 2 or parameter.numel() < LEAST_IN_8_BITS
        in_fp32 = asked == torch.uint8 and (is_small or id(parameter) not in self._savings.linear)
        return torch.float32 if in_fp32 else asked

    def _stays(self, bucket: Bucket) -> bool:
        """Return whether states are on the device where others are in host memory.

        Of the last bucket to be complete they are: nothing runs beside their copies. In BERT it is the table of words.
        """
        is_last = self._savings.in_backward and bucket is self._buckets[-1]
        return is_last and bucket.num_bytes <= MOST_STAYING * sum(each.num_bytes for each in self._buckets)

    def _arena(self, num_bytes: int, *, stays: bool) -> Tensor:
        on_host = self._savings.on_host and not stays
        device, pinned = torch.device("cpu") if on_host else self.device, on_host and self.device.type == "cuda"
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def put_states_aside(self) -> None:
        """As `Update` has it, of states on the device."""
        here = [arena for arena in self._arenas if self._host is None or arena.device.type != "cpu"]
        if here and not self._used:
            for arena in here:
                arena.untyped_storage().resize_(0)
            release_unused(self.device)

    def restore_states(self) -> None:
        """As `Update` has it."""
        aside = [arena for arena in self._arenas if arena.untyped_storage().nbytes() < arena.nbytes]
        if aside:
            release_unused(self.device)
        for arena in aside:
            arena.untyped_storage().resize_(arena.nbytes)
            arena.zero_()

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
        torch.div(self.scale, clip, out=self._scale)
        self._is_begun = True
        yield

    def _complete(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if self._is_held and self.whole:
            self._leave_on_host(index)
        elif self._is_begun:
            bucket.num_complete += 1
            if bucket.num_complete == len(bucket.members):
                self._update_early(bucket)

    def _leave_on_host(self, index: int) -> None:
        """Give a gradient that is asked for, and not used, away: at no time are all of them on the device."""
        gradient = self.parameters[index].grad
        assert gradient is not None
        host = self._left.get(index)
        if host is None:
            pinned = self.device.type == "cuda"
            host = self._left[index] = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=pinned)
        host.copy_(gradient, non_blocking=True)
        self.parameters[index].grad = None

    def _update_early(self, bucket: Bucket) -> None:
        """Update a bucket from the gradients that there are, which go when that is done."""
        gradients = {i: g for i in bucket.members if (g := self.parameters[i].grad) is not None}
        with self._on_own_stream(list(gradients.values())):
            self._take(bucket, gradients)
        bucket.is_done = True
        for i in bucket.members:
            self.parameters[i].grad = None

    @contextmanager
    def _on_own_stream(self, gradients: list[Tensor]) -> Iterator[None]:
        """Within, what is launched comes after what was launched so far, and beside what is from now on."""
        if self._beside is None:
            yield
            return
        main = torch.cuda.current_stream(self.device)
        self._beside.wait_stream(main)
        try:
            with torch.cuda.stream(self._beside):
                yield
        finally:
            self._under_way.append((gradients, self._beside.record_event()))
        if len(self._under_way) > _BEHIND:
            main.wait_event(self._under_way[0][1])
            self._under_way.popleft()

    def _join(self) -> None:
        """Have what is launched from now on come after all updates."""
        if self._beside is not None and self._under_way:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)
        self._under_way.clear()

    def _take(self, bucket: Bucket, gradients: Mapping[int, Tensor]) -> None:
        """Add the norm of these gradients to the whole, and update their bucket unless it is not finite."""
        counted = self._kernels is not None and len(gradients) == len(bucket.members)
        if gradients and self._kernels is not None:
            # Members of a bucket are next to one another, and so are their counts of steps.
            counts = self._counts[min(bucket.members) : max(bucket.members) + 1] if counted else None
            self._kernels.take(list(gradients.values()), self.scale, self._squares, counts)
        elif gradients:
            norm = torch.linalg.vector_norm(torch.stack(norms_of(list(gradients.values())))) / self.scale
            self._squares.add_(norm * norm)
            self._skipped.copy_(torch.maximum(self._skipped, (~torch.isfinite(norm)).float()))
        self.committed = True
        self._update(bucket, gradients, counted=counted)

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
            self._join()
            norm = self._squares.sqrt()
        else:
            norm = self._apply_whole(gathered=gathered)
        self._end_copies()
        skipped = self._skipped.clone()
        readings = torch.stack([t.double() for t in (self.loss, norm, self._learning_rate, self.scale, skipped)])
        self._late_norm.copy_(torch.where(skipped > 0, self._late_norm, norm))
        self.applied.add_((1 - skipped).long())
        self.loss.zero_()
        self._rescale(skipped)
        self._end(gathered=gathered)
        return readings

    def _end_copies(self) -> None:
        """Have what is launched from now on come after all copies of states."""
        if self._host is not None:
            self._host.finish()

    def _apply_whole(self, *, gathered: bool) -> Tensor:
        found = self._gradients(gathered=gathered)
        self._begin()
        norm = self._norm(found) / self.scale
        self._skipped.copy_((~(torch.isfinite(norm) & torch.isfinite(self.loss))).float())
        late = self._savings.late_clipping
        torch.div(self.scale, self._clip(self._late_norm if late else norm), out=self._scale)
        self.committed = True
        self._update_all(found)
        return norm

    def _norm(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """The norm of the whole gradient, times the scale."""
        found = norms_of(list(gradients.values()))
        return torch.linalg.vector_norm(torch.stack(found)) if found else torch.zeros((), device=self.device)

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
        self._under_way.clear()
        if self._host is not None:
            self._host.forget()
        place = self.applied.clamp(max=len(self.schedule) - 1)
        self._learning_rate.copy_(self.schedule.index_select(0, place.view(1))[0])
        self._number.copy_(self.applied)
        self._squares.zero_()

    def _clip(self, norm: Tensor) -> Tensor:
        if not self.max_grad_norm:
            return torch.ones_like(norm)
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _update(
        self, bucket: Bucket, gradients: Mapping[int, Tensor], *, counted: bool = False, ahead: int = 1
    ) -> None:
        """Update those parameters of a bucket that ever had a gradient. counted: whether their steps are already.
        ahead: as of `HostStates.fetch`."""
        self._used |= gradients.keys()
        members = [i for i in bucket.members if i in self._used]
        if not members:
            return
        arena = self._arenas[bucket.number] if self._host is None else self._host.fetch(bucket.number, ahead=ahead)
        if not counted:
            steps = [self._steps[i] for i in members]
            torch._foreach_add_(steps, [1 - self._skipped] * len(steps))  # one tensor would be read by the host
        ours = [i for i in members if self._is_for_kernels(i)]
        for i in ours:
            assert self._kernels is not None
            moments = self._moments(i, arena)
            given = (self.parameters[i].detach(), gradients.get(i), moments, self._steps[i], self._scale)
            self._kernels.update(i, *given, self._decays[i])
        for decay in sorted({self._decays[i] for i in members if i not in ours}):
            self._fused([i for i in members if i not in ours and self._decays[i] == decay], arena, gradients, decay)
        if self._host is not None:
            self._host.put(bucket.number, arena)

    def _is_for_kernels(self, index: int) -> bool:
        parameter, states = self.parameters[index], self._dtype_of_states(index)
        is_rounded = (parameter.dtype, states) != (torch.float32, torch.float32)
        return self._kernels is not None and is_rounded and parameter.is_contiguous()

    def _fused(self, chosen: Sequence[int], arena: Tensor, gradients: Mapping[int, Tensor], decay: float) -> None:
        """Update parameters by torch's kernel, in fp32, and round what is kept in less."""
        weights = [self.parameters[i].detach().float() for i in chosen]
        given = [gradients[i].float() if i in gradients else torch.zeros_like(w)
                 for i, w in zip(chosen, weights, strict=True)]  # fmt: skip
        kept = [self._moments(i, arena) for i in chosen]
        read = [moments.read() for moments in kept]
        first, second = ([m[k].view(w.shape) for m, w in zip(read, weights, strict=True)] for k in (0, 1))
        torch._fused_adamw_(
            weights, given, first, second, [], [self._steps[i] for i in chosen],
            lr=self._learning_rate, beta1=self._betas[0], beta2=self._betas[1], weight_decay=decay, eps=self._epsilon,
            amsgrad=False, maximize=False, grad_scale=self._scale.float(), found_inf=self._skipped,
        )  # fmt: skip
        with torch.no_grad():
            for i, weight, moments, wide in zip(chosen, weights, kept, read, strict=True):
                if self.parameters[i].dtype != torch.float32:
                    self.parameters[i].copy_(stochastic_bf16(weight, mix(self._number, i, 2)))
                # A seed is two dozen launches: of fp32 there are none.
                moments.write(*wide, self._seeds(i) if moments.by_chance else None)

    def _seeds(self, index: int) -> tuple[Tensor, Tensor]:
        """Seeds of both moments of a parameter in this step."""
        return mix(self._number, index, 1), mix(self._number, index, 3)

    def _end(self, *, gathered: bool) -> None:
        self._is_begun = False
        for bucket in self._buckets:
            bucket.num_complete, bucket.is_done = 0, False
        if gathered and self._sums is not None:
            torch._foreach_zero_(list(self._sums.values()))
        self.before()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """As `Update` has it: nothing is updated within a backward pass, and sums over micro-batches are dropped."""
        self._is_held = True
        try:
            with super().undisturbed():
                try:
                    yield
                finally:
                    self._end(gathered=True)
        finally:
            self._is_held = False
            self._left = {}

    def gradients(self, *, gathered: bool) -> list[Tensor]:
        """As `Update` has it; while updates within the backward pass are held back, those of a whole batch are in host
        memory, once the device has done all that it was told."""
        found = self._gradients(gathered=gathered)
        if self._left and not gathered:
            found |= self._left
            return [found[i] if i in found else torch.zeros(p.shape) for i, p in enumerate(self.parameters)]
        return [found[i].clone() if i in found else torch.zeros_like(p) for i, p in enumerate(self.parameters)]

    def _counters(self) -> tuple[Tensor, ...]:
        return (*super()._counters(), self._late_norm, self._skipped, *self._steps)

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        self._join()
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
        return {name: self.weight(name) for name in self.named}

    def weight(self, name: str) -> Tensor:
        """As `Update` has it."""
        kept = self.named[name].detach()
        return kept.float() if kept.dtype.itemsize == 2 else kept

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from super()._gradient_tensors()
        yield from (self._sums or {}).values()

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from self._arenas

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for i, name in enumerate(self.named) if i in self._used)

    def _moments(self, index: int, arena: Tensor | None = None) -> Moments:
        """Moments of a parameter. arena: of its bucket, where that is not where they are kept."""
        bucket = self._bucket_of[index]
        memory = self._arenas[bucket.number] if arena is None else arena
        dtype = self._dtype_of_states(index)
        return moments_in(memory, bucket.places[index], dtype, self.parameters[index].numel())

    def _optimizer_state(self) -> dict[str, ParameterState]:
        if self._host is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = {}
        for i, name in enumerate(self.named):
            if i in self._used:
                kept, shape = self._moments(i), self.parameters[i].shape
                # In 8 bits they are saved as fp32, of which the same 8 bits are made again.
                first, second = (kept.first, kept.second) if kept.scales is None else kept.on_host().read()
                tensors = {"exp_avg": first.view(shape), "exp_avg_sq": second.view(shape)}
                found[name] = ParameterState(tensors={"step": self._steps[i]} | tensors)
        return found

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        self._used = {i for i, name in enumerate(self.named) if name in used}
        for arena in self._arenas:
            arena.zero_()
        for i, name in enumerate(self.named):
            if name in state:
                tensors = state[name].tensors
                self._steps[i].copy_(tensors["step"])
                self._moments(i).load(tensors["exp_avg"], tensors["exp_avg_sq"])
            else:
                self._steps[i].zero_()
        self.abandon()

    def _groups(self) -> tuple[Mapping[str, Any], ...]:
        return ({"late_norm": float(self._late_norm)},) if self._savings.late_clipping else ()

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if groups and "late_norm" in groups[0]:
            self._late_norm.fill_(groups[0]["late_norm"])
