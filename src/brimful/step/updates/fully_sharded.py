"""AdamW and SGD on weights of which each process keeps a part (FSDP2, `torch.distributed.fsdp.fully_shard`).

A layer's weights are put together for its turn, in the forward pass and again in the backward pass, in which sums of
its gradients are scattered. All processes therefore run each pass together, with as many micro-batches.

Embeddings, what is around the layers and the head are sharded by themselves: a packed pass calls the base model and the
head one after the other, not the whole.
Source: Zhao et al. 2023, arXiv 2304.11277; Rajbhandari et al. 2020, arXiv 1910.02054 (stage 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brimful.hardware.ranks import ALONE, Ranks
from brimful.measurement.memory import Kept
from brimful.models.model_stats import layers_of
from brimful.step.state import Counters, ParameterState, StepState
from brimful.step.updates.update import Update


class FullyShardedUpdate(Update):
    """AdamW, or SGD without momentum, of this process's parts. weight_decay: by name of parameters that have any.

    offload: whether weights, gradients and states are in host memory, and weights come to the device for their turn.
    """

    gathers_state = True
    gathers_weights = True

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool, device: torch.device,
        kind: Literal["adamw", "sgd"], betas: tuple[float, float], epsilon: float, weight_decay: Mapping[str, float],
        offload: bool,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, max_grad_norm=max_grad_norm, scaled=scaled, device=device)
        self._kind, self._betas, self._epsilon, self._offload = kind, betas, epsilon, offload
        self._decays = [weight_decay.get(name, 0.0) for name in self.named]
        self._used: set[int] = set()
        self._shared_ranks = ALONE
        self._classes: list[tuple[nn.Module, type]] = []

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """As `Update` has it. Weights are cut here, and brought to the device."""
        self._shared_ranks = ranks
        self._classes = [(module, type(module)) for module in self.model.modules()]
        _cut(self.model, ranks, self.device, half=half, offload=self._offload)
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        where = self._local(self.parameters[0]).device
        self._steps = torch.zeros(len(self.parameters), dtype=torch.float32, device=where).unbind()
        number = 2 if self._kind == "adamw" else 0
        self._moments = [[torch.zeros_like(self._local(p)) for p in self.parameters] for _ in range(number)]

    @staticmethod
    def _local(tensor: Tensor) -> Tensor:
        """This process's part."""
        detached: Any = tensor.detach()
        part: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
        return part

    def begin(self) -> None:
        """As `Update` has it. Others take part in each pass: a step that fails here is not taken again."""
        self.committed = True

    def reduce(self) -> None:
        """As `Update` has it; gradients were summed in the backward passes."""
        ranks = self._shared_ranks
        used = ranks.any([parameter.grad is not None for parameter in self.parameters])
        self._used |= {index for index, is_used in enumerate(used) if is_used}
        ranks.sum([self.loss])

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it."""
        gradients = {i: self._local(p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        square = torch.stack(squares).sum().to(self.device)
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
            torch._foreach_add_([self._steps[index] for index in sorted(self._used)], 1 - skipped)
        own = [i for i in sorted(self._used) if self._local(self.parameters[i]).numel()]
        for decay in sorted({self._decays[i] for i in own}):
            chosen = [i for i in own if self._decays[i] == decay]
            weights = [self._local(self.parameters[i]) for i in chosen]
            given = [gradients.get(i, torch.zeros(())).expand_as(w) for i, w in zip(chosen, weights, strict=True)]
            given = [gradient.contiguous() for gradient in given]
            common: dict[str, Any] = {"weight_decay": decay, "maximize": False, "grad_scale": scale}
            common["found_inf"] = skipped
            if self._kind == "sgd":
                torch._fused_sgd_(
                    weights, given, [], lr=rate, momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False,
                    **common,
                )  # fmt: skip
                continue
            first, second = ([moments[i] for i in chosen] for moments in self._moments)
            torch._fused_adamw_(
                weights, given, first, second, [], [self._steps[i] for i in chosen], lr=rate, beta1=self._betas[0],
                beta2=self._betas[1], eps=self._epsilon, amsgrad=False, **common,
            )  # fmt: skip

    def abandon(self) -> None:
        """As `Update` has it."""
        super().abandon()
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Put all weights together, in host memory of the process that leads: its model is a plain one again."""
        leads = self._shared_ranks.leads
        whole = {name: _whole(parameter.detach()) for name, parameter in self.model.named_parameters()}
        for module, kind in self._classes:
            module.__class__ = kind
            for key in [key for key, hook in module._forward_pre_hooks.items() if _is_of_fsdp(hook)]:
                del module._forward_pre_hooks[key]
            for key in [key for key, hook in module._forward_hooks.items() if _is_of_fsdp(hook)]:
                del module._forward_hooks[key]
        for name, tensor in whole.items() if leads else ():
            owner, _, own = name.rpartition(".")
            before = self.model.get_parameter(name)
            plain = nn.Parameter(tensor.cpu(), requires_grad=before.requires_grad)
            self.model.get_submodule(owner)._parameters[own] = plain
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())

    def state(self) -> StepState:
        """As `Update` has it, in host memory of the process that leads; all others send their parts, and get none."""
        leads = self._shared_ranks.leads
        weights = {}
        for name, parameter in self.named.items():
            whole = _whole(parameter.detach())
            if leads:
                weights[name] = whole.to("cpu", copy=True)
        counters = Counters(
            applied=int(self.applied), scale=float(self.scale), growth=int(self.growth), used=self._used_names()
        )
        return StepState(
            weights=weights,
            buffers=dict(self.model.named_buffers()),
            optimizer=self._optimizer_state(),
            counters=counters,
        )

    def load_state(self, state: StepState) -> None:
        """As `Update` has it, each process of its part."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                self._local(parameter).copy_(self._part(state.weights[name], self._local(parameter)))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state.buffers[name])
            for name in ("applied", "scale", "growth"):
                getattr(self, name).fill_(getattr(state.counters, name))
        self._load_optimizer_state(state.optimizer, set(state.counters.used))

    def _part(self, whole: Tensor, local: Tensor) -> Tensor:
        """This process's part of a whole tensor, cut along its first dimension as torch cuts it."""
        size = -(-whole.shape[0] // self._shared_ranks.count)
        first = self._shared_ranks.rank * size
        part = whole[first : first + size]
        if part.shape != local.shape:
            raise ValueError(
                f"a part of {tuple(whole.shape)} is {tuple(local.shape)}, and {tuple(part.shape)} is loaded"
            )
        return part

    def kept(self) -> Kept:
        """As `Update` has it, of this process's parts."""
        weights = [self._local(p) for p in self.model.parameters()]
        gradients = (self._local(p.grad) for p in self.parameters if p.grad is not None)
        return Kept.of(self.device, [*weights, *self.model.buffers()], gradients, self._state_tensors())

    def _state_tensors(self) -> Iterator[Tensor]:
        for moments in self._moments:
            yield from moments

    def _used_names(self) -> tuple[str, ...]:
        return tuple(name for index, name in enumerate(self.named) if index in self._used)

    def _optimizer_state(self) -> dict[str, ParameterState]:
        if self._kind == "sgd":
            return {}
        leads, found = self._shared_ranks.leads, dict[str, ParameterState]()
        for index, (name, parameter) in enumerate(self.named.items()):
            if index not in self._used:
                continue
            whole = [_whole(_like(moments[index], parameter)) for moments in self._moments]
            if leads:
                first, second = (each.to("cpu", copy=True) for each in whole)
                tensors = {"step": self._steps[index].to("cpu", copy=True), "exp_avg": first, "exp_avg_sq": second}
                found[name] = ParameterState(tensors=tensors)
        return found

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        names: Sequence[str] = list(self.named)
        self._used = {index for index, name in enumerate(names) if name in used}
        for index, name in enumerate(names):
            kept = state.get(name) if self._kind == "adamw" else None
            self._steps[index].zero_() if kept is None else self._steps[index].copy_(kept.tensors["step"])
            for key, moments in zip(("exp_avg", "exp_avg_sq"), self._moments, strict=False):
                moment = moments[index]
                moment.zero_() if kept is None else moment.copy_(self._part(kept.tensors[key], moment))
        for parameter in self.parameters:
            parameter.grad = None


def _cut(model: Any, ranks: Ranks, device: torch.device, *, half: bool, offload: bool) -> None:
    """Shard each layer, each module beside them, which may be called by itself, the rest, and the head's modules."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    given: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": policy,
        "mp_policy": reduced,
        "reshard_after_forward": True,
    }
    base = model.base_model
    heads = [each for each in model.children() if each is not base and any(True for _ in each.parameters())]
    layers = list(layers_of(model) or ())
    own = {id(layer) for layer in layers}
    around = [each for each in base.children() if any(True for _ in each.parameters())]
    around = [each for each in around if not any(id(module) in own for module in each.modules())]
    for module in [*layers, *around, base, *heads]:
        fully_shard(module, **given)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _whole(tensor: Tensor) -> Tensor:
    """A tensor put together of the parts of all processes."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _like(local: Tensor, parameter: Any) -> Tensor:
    """A tensor of parts that are cut as a parameter's."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _is_of_fsdp(hook: Any) -> bool:
    """True for a hook that sharding has put there."""
    inner = getattr(hook, "__wrapped__", hook)
    return "fsdp" in (getattr(inner, "__module__", "") or "")
