"""AdamW and SGD on weights of which each process has a part, as DTensors of torch.

Updates are made of local parts, by a kernel of ours or torch's fused ones. Each process saves its parts; the model at
the end is put together in host memory of the one that leads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brimful.hardware.ranks import ALONE, Ranks
from brimful.measurement.memory import Kept
from brimful.models.tensor_plan import local, starts_of, together
from brimful.step.state import ParameterState, Part, StepState
from brimful.step.updates.own_state import Own, own_state
from brimful.step.updates.update import Update

try:
    from brimful.kernels.optimizers import part_adamw
except ImportError:  # Triton comes with torch for GPUs, and is missing beside torch for CPUs
    part_adamw = None  # type: ignore[assignment]

#: Bytes of whole weights' gradients that are summed at once.
_TOGETHER_BYTES = 32 << 20
#: Least numbers of a part that our kernel updates: torch's takes many small ones in one launch.
_LEAST_OF_KERNEL = 1 << 18


class PartsUpdate(Update):
    """AdamW, or SGD without momentum, of this process's parts. weight_decay: by name of parameters that have any."""

    gathers_state = True
    gathers_weights = True
    releases_together = True
    #: Gradients of a micro-batch are put in the place of none, or added: the host decides, and no graph can.
    captures_several = False

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, device: torch.device,
        kind: Literal["adamw", "sgd"], betas: tuple[float, float], epsilon: float, weight_decay: Mapping[str, float],
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled, device=device)
        self._kind, self._betas, self._epsilon = kind, betas, epsilon
        self._decays = [weight_decay.get(name, 0.0) for name in self.named]
        self._used: set[int] = set()
        self._shared_ranks = ALONE

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it. Weights are cut here, and brought to the device."""
        self._shared_ranks = ranks
        self._cut(ranks, half=half)
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        where = local(self.parameters[0]).device
        self._steps = torch.zeros(len(self.parameters), dtype=torch.float32, device=where).unbind()
        number = 2 if self._kind == "adamw" else 0
        self._moments = [[torch.zeros_like(local(p)) for p in self.parameters] for _ in range(number)]

    def _cut(self, ranks: Ranks, *, half: bool) -> None:
        """Leave this process its parts of the weights, on the device. half: as of `share`."""
        raise NotImplementedError

    def _undo(self) -> None:
        """Leave modules as they were before weights were cut."""
        raise NotImplementedError

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor that is cut as a parameter is."""
        raise NotImplementedError

    def begin(self) -> None:
        """As `Update` has it. Others take part in each pass: a step that fails here is not taken again."""
        self.committed = True

    def _gradients(self) -> dict[int, Tensor]:
        """Sums of gradients of this process's parts, by number."""
        return {i: local(p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}

    def _counts(self, index: int) -> bool:
        """Return whether this process's part of a gradient counts in the norm: each number does once in all."""
        return True

    def _square(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """The sum of squares of what counts in the norm, on the device: few launches, however many parts there are."""
        counted = [each for index, each in gradients.items() if each.numel() and self._counts(index)]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        norms = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float64))
        return norms.square().sum().to(self.device)

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it."""
        gradients = self._gradients()
        square = self._square(gradients)
        self._shared_ranks.sum([square])
        norm = square.sqrt().to(self.loss.dtype) / self.scale
        skipped = (~(torch.isfinite(norm) & torch.isfinite(self.loss))).float()
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else torch.ones_like(norm)
        place = self.applied.clamp(max=len(self.schedule) - 1)
        rate = self.schedule.index_select(0, place.view(1))[0]
        readings = torch.stack([t.double() for t in (self.loss, norm, rate, self.scale, skipped)])
        where = self._steps[0].device
        told = [each.to(where) for each in (rate, (self.scale / clip).float(), skipped)]
        self._update(gradients, *told)
        self.applied.add_((1 - skipped).long())
        self.loss.zero_()
        self._rescale(skipped)
        for parameter in self.parameters:
            parameter.grad = None
        return readings

    @torch.no_grad()
    def _update(self, gradients: Mapping[int, Tensor], rate: Tensor, scale: Tensor, skipped: Tensor) -> None:
        if self._used:
            steps = [self._steps[index] for index in sorted(self._used)]
            torch._foreach_add_(steps, [1 - skipped] * len(steps))  # one tensor would be read by the host
        parts = {i: local(self.parameters[i]) for i in sorted(self._used)}
        own = [i for i, part in parts.items() if part.numel()]
        for decay in sorted({self._decays[i] for i in own}):
            chosen = [i for i in own if self._decays[i] == decay]
            weights = [parts[i] for i in chosen]
            found = ((gradients.get(i), weight) for i, weight in zip(chosen, weights, strict=True))
            given = [torch.zeros_like(w) if gradient is None else gradient.contiguous() for gradient, w in found]
            told: dict[str, Any] = {"weight_decay": decay, "maximize": False, "grad_scale": scale}
            told["found_inf"] = skipped
            if self._kind == "adamw":
                self._adamw(chosen, weights, given, rate, told)
                continue
            torch._fused_sgd_(
                weights, given, [], lr=rate, momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False, **told,
            )  # fmt: skip

    def _adamw(
        self, chosen: Sequence[int], weights: Sequence[Tensor], gradients: Sequence[Tensor], rate: Tensor,
        told: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Update weights of these numbers: large ones by our kernel, the others in torch's few launches."""
        left: list[tuple[Tensor, ...]] = []
        for index, weight, gradient in zip(chosen, weights, gradients, strict=True):
            first, second = (moments[index] for moments in self._moments)
            if min(self._betas) > 0 and _is_for_kernel(weight, gradient, first, second):
                part_adamw.update_part(
                    weight, gradient, (first, second), steps=self._steps[index], rate=rate, scale=told["grad_scale"],
                    skipped=told["found_inf"], decay=told["weight_decay"], betas=self._betas, epsilon=self._epsilon,
                )  # fmt: skip
            else:
                left.append((weight, gradient, first, second, self._steps[index]))
        if left:
            some, given, first_moments, second_moments, steps = (list(each) for each in zip(*left, strict=True))
            torch._fused_adamw_(
                some, given, first_moments, second_moments, [], steps, lr=rate, beta1=self._betas[0],
                beta2=self._betas[1], eps=self._epsilon, amsgrad=False, **told,
            )  # fmt: skip

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Put all weights together, in host memory of the process that leads: its model is a plain one again."""
        leads = self._shared_ranks.leads
        whole = {}
        for name, parameter in self.model.named_parameters():
            gathered = together(parameter.detach())
            if leads:
                whole[name] = gathered.cpu()
        self._undo()
        for name, tensor in whole.items():
            owner, _, own = name.rpartition(".")
            before = self.model.get_parameter(name)
            plain = nn.Parameter(tensor, requires_grad=before.requires_grad)
            self.model.get_submodule(owner)._parameters[own] = plain
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())

    def state(self) -> StepState:
        """As `Update` has it, of this process's parts."""
        ranks, used = self._shared_ranks, self._used if self._kind == "adamw" else set[int]()
        steps = {name: self._steps[i].to("cpu", copy=True) for i, name in enumerate(self.named) if i in used}
        gives = ranks.mesh is None or ranks.data_rank == 0  # others of its kind have the same parts
        own = self._own(used) if gives else ()
        return own_state(own, steps, self.model, self._saved_counters(), leads=ranks.leads)

    def _own(self, used: Collection[int]) -> Iterator[Own]:
        for i, (name, parameter) in enumerate(self.named.items()):
            weight, starts = local(parameter), starts_of(parameter)
            if not weight.numel() and starts is not None:
                continue
            place = None if starts is None else Part(shape=tuple(parameter.shape), starts=starts)
            moments = dict(zip(("exp_avg", "exp_avg_sq"), (m[i] for m in self._moments), strict=False))
            yield Own(name, weight, place, moments if i in used else {})

    def load_state(self, state: StepState) -> None:
        """As `Update` has it, each process of its part."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                local(parameter).copy_(self._part(name, state.weights[name]))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state.buffers[name])
            for name in ("applied", "scale", "growth"):
                getattr(self, name).fill_(getattr(state.counters, name))
        self._load_optimizer_state(state.optimizer, set(state.counters.used))

    @property
    def num_updated(self) -> int:
        """As `Update` has it, of this process's parts."""
        return sum(local(p).numel() for p in self.parameters)

    def kept(self) -> Kept:
        """As `Update` has it, of this process's parts."""
        weights = [local(p) for p in self.model.parameters()]
        gradients = (local(p.grad) for p in self.parameters if p.grad is not None)
        return Kept.of(self.device, [*weights, *self.model.buffers()], gradients, self._state_tensors())

    def _state_tensors(self) -> Iterator[Tensor]:
        for moments in self._moments:
            yield from moments

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for index, name in enumerate(self.named) if index in self._used)

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        names: Sequence[str] = list(self.named)
        self._used = {index for index, name in enumerate(names) if name in used}
        for index, name in enumerate(names):
            kept = state.get(name) if self._kind == "adamw" else None
            self._steps[index].zero_() if kept is None else self._steps[index].copy_(kept.tensors["step"])
            for key, moments in zip(("exp_avg", "exp_avg_sq"), self._moments, strict=False):
                moment = moments[index]
                moment.zero_() if kept is None else moment.copy_(self._part(name, kept.tensors[key]))
        for parameter in self.parameters:
            parameter.grad = None


def _is_for_kernel(*tensors: Tensor) -> bool:
    """Return whether our kernel updates a part: large, contiguous, in fp32, on a GPU, with Triton there."""
    if part_adamw is None or tensors[0].numel() < _LEAST_OF_KERNEL:
        return False
    return all(_on_gpu(each) and each.dtype == torch.float32 and each.is_contiguous() for each in tensors)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def sum_together(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Sum tensors over all processes in place, small ones as one."""
    for some in _parts(tensors):
        if len(some) == 1:
            ranks.sum(some)
            continue
        flat = torch.cat([tensor.flatten() for tensor in some])
        ranks.sum([flat])
        pieces = flat.split([tensor.numel() for tensor in some])
        summed = [piece.view_as(tensor) for tensor, piece in zip(some, pieces, strict=True)]
        torch._foreach_copy_(list(some), summed)


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype one after another, as many at once as fit."""
    some, num_bytes = list[Tensor](), 0
    for tensor in tensors:
        if some and (tensor.dtype != some[0].dtype or num_bytes + tensor.nbytes > _TOGETHER_BYTES):
            yield some
            some, num_bytes = [], 0
        some.append(tensor)
        num_bytes += int(tensor.nbytes)
    if some:
        yield some
