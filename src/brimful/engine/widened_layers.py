"""Layers with weights in half precision, in fp32 for their turn alone: for a model that is compared, not trained.

A layer has its turn in the forward pass, and in the backward pass, where it is computed again. Then its gradients are
given away. At no time are the weights of two layers wide, nor all gradients there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from brimful.models.packed.recompute import call_recomputed_within
from brimful.models.packed.streamed_layers import own_parameters


class WidenedLayers:
    """Turns of a model's layers. halves: ids of parameters in half precision. members: of those that layers widen; one
    that two layers share is not. take: called with each of these and its gradient, which is gone afterwards."""

    def __init__(self, model: nn.Module, halves: Collection[int], take: Callable[[nn.Parameter, Tensor], None]) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        own = own_parameters(nn.ModuleList(self._layers))
        self._halves = [[p for p in each if id(p) in halves] for each in own]
        self.members = {id(p) for each in self._halves for p in each}
        self._take = take
        self._turns = [0] * len(self._layers)
        self._kept: list[list[Tensor]] = [[] for _ in self._layers]

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """Within, layers are recomputed, and take turns. Whatever recomputed them before does not."""
        hooks = []
        for number, layer in enumerate(self._layers):
            if self._halves[number]:
                changed: Any = layer
                changed.gradient_checkpointing = True
                changed._gradient_checkpointing_func = partial(call_recomputed_within, partial(self._backward, number))
                hooks.append(layer.register_forward_pre_hook(lambda *_, number=number: self._begin(number)))
                hooks.append(layer.register_forward_hook(lambda *_, number=number: self._end(number), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _backward(self, number: int) -> Iterator[None]:
        self._begin(number)
        try:
            yield
            for parameter in self._halves[number]:
                if parameter.grad is not None:
                    self._take(parameter, parameter.grad)
        finally:
            for parameter in self._halves[number]:
                parameter.grad = None
            self._end(number)

    def _begin(self, number: int) -> None:
        self._turns[number] += 1
        if self._turns[number] == 1:
            self._kept[number] = [p.data for p in self._halves[number]]
            for parameter in self._halves[number]:
                parameter.data = parameter.data.float()

    def _end(self, number: int) -> None:
        self._turns[number] -= 1
        if not self._turns[number]:
            for parameter, kept in zip(self._halves[number], self._kept[number], strict=True):
                parameter.data = kept
            self._kept[number] = []
            torch.clear_autocast_cache()  # casts of weights would stay until the pass is over
