"""AdamW and SGD of which each process updates a part: states of that part alone are kept (ZeRO 1, 2).

All weights lie in one memory, in buckets that are cut in equal parts, one of each process. A step sums gradients so
that each process has its part, updates this part of the weights, and sends it to all. The arithmetic is that of torch's
fused kernels on whole weights. Source: Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brimful.hardware.ranks import Ranks
from brimful.step.reduce.scattered import ScatteredReduction, Segment, own_part, own_segments
from brimful.step.state import ParameterState, StepState
from brimful.step.updates.own_state import own_state, owned
from brimful.step.updates.update import Update, used_by_all

#: Numbers whose squares are summed in fp64 at once: of a part of a billion weights it would be 16 bytes for each.
_SQUARED = 1 << 24


class ShardedUpdate(Update):
    """AdamW, or SGD without momentum, by parts. weight_decay: by name of those parameters that have any.

    scatters_gradients: whether sums of gradients of other parts are not kept.
    """

    gathers_state = True

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, kind: Literal["adamw", "sgd"],
        betas: tuple[float, float], epsilon: float, weight_decay: Mapping[str, float], scatters_gradients: bool,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled)
        self._kind, self._betas, self._epsilon, self._each = kind, betas, epsilon, scatters_gradients
        self._decays = [weight_decay.get(name, 0.0) for name in self.named]
        self._steps = torch.zeros(len(self.parameters), dtype=torch.float32, device=self.device).unbind()
        self._used: set[int] = set()

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it; parts are cut for these processes."""
        scattered = ScatteredReduction(ranks, self.parameters, each=self._each, half=half, overlap=overlap)
        self.reduction = self._scattered = scattered
        dtype = self.parameters[0].dtype
        self._memory = torch.zeros(scattered.buckets[-1].end, dtype=dtype, device=self.device)
        number = 2 if self._kind == "adamw" else 0
        self._moments = [torch.zeros_like(scattered.own, dtype=dtype) for _ in range(number)]
        with torch.no_grad():
            for bucket in scattered.buckets:
                for index, start in zip(bucket.members, bucket.starts, strict=True):
                    parameter = self.parameters[index]
                    place = self._memory[start : start + parameter.numel()].view(parameter.shape)
                    place.copy_(parameter)
                    parameter.data = place
        sizes = [parameter.numel() for parameter in self.parameters]
        self._segments = list(own_segments(scattered.buckets, sizes, ranks))

    def _own_weight(self, each: Segment) -> Tensor:
        return self.parameters[each.index].detach().view(-1)[each.at]

    def reduce(self) -> None:
        """As `Update` has it; of the sums of gradients, this process has its part."""
        self._scattered.finish()
        ranks = self._scattered.ranks
        has = [index in self._scattered.used for index in range(len(self.parameters))]
        used = used_by_all(ranks, has, self._used_so_far)
        self._scattered.used = {index for index, is_used in enumerate(used) if is_used}
        ranks.sum([self.loss])

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it."""
        own = self._scattered.own
        square = torch.stack([some.double().square().sum() for some in own.split(_SQUARED)]).sum()
        self._scattered.ranks.sum([square])
        norm = square.sqrt().to(own.dtype) / self.scale
        skipped = (~(torch.isfinite(norm) & torch.isfinite(self.loss))).float()
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else torch.ones_like(norm)
        place = self.applied.clamp(max=len(self.schedule) - 1)
        rate = self.schedule.index_select(0, place.view(1))[0]
        readings = torch.stack([t.double() for t in (self.loss, norm, rate, self.scale, skipped)])
        self._used |= self._scattered.used
        self.committed = True
        self._update(rate, (self.scale / clip).float(), skipped)
        self._spread()
        self.applied.add_((1 - skipped).long())
        self.loss.zero_()
        self._rescale(skipped)
        self._scattered.clear()
        return readings

    def _update(self, rate: Tensor, scale: Tensor, skipped: Tensor) -> None:
        if self._used:
            steps = [self._steps[index] for index in sorted(self._used)]
            torch._foreach_add_(steps, [1 - skipped] * len(steps))  # one tensor would be read by the host
        used = [each for each in self._segments if each.index in self._used]
        for decay in sorted({self._decays[each.index] for each in used}):
            chosen = [each for each in used if self._decays[each.index] == decay]
            weights = [self._own_weight(each) for each in chosen]
            gradients = [self._scattered.own[each.own] for each in chosen]
            common: dict[str, Any] = {
                "weight_decay": decay,
                "maximize": False,
                "grad_scale": scale,
                "found_inf": skipped,
            }
            if self._kind == "sgd":
                torch._fused_sgd_(
                    weights, gradients, [], lr=rate, momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False,
                    **common,
                )  # fmt: skip
                continue
            first, second = ([moments[each.own] for each in chosen] for moments in self._moments)
            torch._fused_adamw_(
                weights, gradients, first, second, [], [self._steps[each.index] for each in chosen], lr=rate,
                beta1=self._betas[0], beta2=self._betas[1], eps=self._epsilon, amsgrad=False, **common,
            )  # fmt: skip

    def _spread(self) -> None:
        """Send this process's part of the weights to all. NCCL sends it from its place among them, gloo does not."""
        ranks, buckets = self._scattered.ranks, self._scattered.buckets
        parts = [self._memory[own_part(bucket, ranks)] for bucket in buckets]
        parts = parts if self._memory.is_cuda else [part.clone() for part in parts]
        endings = [
            ranks.begin_gather(self._memory[bucket.part], part) for bucket, part in zip(buckets, parts, strict=True)
        ]
        for end in endings:
            end()

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        self._scattered.clear()

    def release(self) -> None:
        """As `Update` has it."""
        self._scattered.remove()
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = parameter.data.clone()

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from (p.grad for p in self.parameters if p.grad is not None)
        yield from self._scattered.kept

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from self._moments

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for index, name in enumerate(self.named) if index in self._used)

    def state(self) -> StepState:
        """As `Update` has it, of this process's parts."""
        used = set(self._used_names()) if self._kind == "adamw" else set[str]()
        moments = dict(zip(("exp_avg", "exp_avg_sq"), self._moments, strict=False))
        own = owned(self._segments, self.named, self._own_weight, moments, used)
        steps = {name: step.cpu() for name, step in zip(self.named, self._steps, strict=True) if name in used}
        return own_state(own, steps, self.model, self._saved_counters(), leads=self._scattered.ranks.leads)

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        names: Sequence[str] = list(self.named)
        self._used = {index for index, name in enumerate(names) if name in used}
        for index, name in enumerate(names):
            step = state[name].tensors["step"] if name in state and self._kind == "adamw" else None
            self._steps[index].zero_() if step is None else self._steps[index].copy_(step)
        for key, moments in zip(("exp_avg", "exp_avg_sq"), self._moments, strict=False):
            moments.zero_()
            for each in self._segments:
                if names[each.index] in state:
                    moments[each.own].copy_(state[names[each.index]].tensors[key].flatten()[each.at])
        self._scattered.clear()
