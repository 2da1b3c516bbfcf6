"""Weights of which each process keeps a part (FSDP2, `torch.distributed.fsdp.fully_shard`).

A layer's weights are put together for its turn, in the forward pass and again in the backward pass, in which sums of
its gradients are scattered. All processes therefore run each pass together, with as many micro-batches.

Embeddings, what is around the layers and the head are sharded by themselves: a packed pass calls the base model and the
head one after the other, not the whole.
Source: Zhao et al. 2023, arXiv 2304.11277; Rajbhandari et al. 2020, arXiv 1910.02054 (stage 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from brimful.hardware.ranks import Ranks
from brimful.models.fsdp_hooks import is_of_fsdp
from brimful.models.model_stats import layers_of
from brimful.models.tensor_plan import local
from brimful.step.updates.parts import PartsUpdate


class FullyShardedUpdate(PartsUpdate):
    """AdamW, or SGD without momentum, of this process's parts.

    offload: whether weights, gradients and states are in host memory, and weights come to the device for their turn.
    """

    #: A second use's cast would be the first's, whose gradient then comes after its weight was summed: a pooler's.
    casts_once = False

    def __init__(self, model: nn.Module, schedule: Tensor, *, offload: bool, **given: Any) -> None:
        super().__init__(model, schedule, **given)
        self._offload = offload
        self._classes: list[tuple[nn.Module, type]] = []

    def _cut(self, ranks: Ranks, *, half: bool) -> None:
        self._classes = [(module, type(module)) for module in self.model.modules()]
        _cut(self.model, ranks, self.device, half=half, offload=self._offload)

    def reduce(self) -> None:
        """As `Update` has it; gradients were summed in the backward passes."""
        ranks = self._shared_ranks
        used = ranks.any([parameter.grad is not None for parameter in self.parameters])
        self._used |= {index for index, is_used in enumerate(used) if is_used}
        ranks.sum([self.loss])

    def _undo(self) -> None:
        for module, kind in self._classes:
            module.__class__ = kind
            for key in [key for key, hook in module._forward_pre_hooks.items() if is_of_fsdp(hook)]:
                del module._forward_pre_hooks[key]
            for key in [key for key, hook in module._forward_hooks.items() if is_of_fsdp(hook)]:
                del module._forward_hooks[key]

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """As `PartsUpdate` has it, cut along the first dimension as torch cuts it."""
        own, size = local(self.named[name]), -(-whole.shape[0] // self._shared_ranks.count)
        first = self._shared_ranks.rank * size
        part = whole[first : first + size]
        if part.shape != own.shape:
            raise ValueError(f"a part of {tuple(whole.shape)} is {tuple(own.shape)}, and {tuple(part.shape)} is loaded")
        return part


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
            if isinstance(module, nn.Embedding):
                module.set_unshard_in_backward(False)  # type: ignore[operator]  # its gradient is of ids alone
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
