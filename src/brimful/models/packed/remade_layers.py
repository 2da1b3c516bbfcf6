"""Layers whose activation functions' results are made again in the backward pass, and all else is kept.

Fused layers tell how their results are made (`kernels.remade`); of others, the modules of activation functions are
asked. Hugging Face's own switch on a layer is what turns it on, as for layers that are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from brimful.kernels.remade import Remade, note_maker
from brimful.models.packed.layer_calls import LayerCall


def call_remade(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a layer: in the place of Hugging Face's function for gradient checkpointing."""
    with told(_layer_of(function)), Remade().active():
        return function(*arguments)


def _layer_of(function: Callable[..., Any]) -> nn.Module | None:
    """The layer that a call is of: a method of its own, or of the call in its context."""
    bound = function.func if isinstance(function, partial) else function
    owner = getattr(bound, "__self__", None)
    owner = owner.module if isinstance(owner, LayerCall) else owner
    return owner if isinstance(owner, nn.Module) else None


@contextmanager
def told(layer: nn.Module | None) -> Iterator[None]:
    """Within, activation functions of a layer that is not compiled tell how their results are made."""
    call = None if layer is None else layer._compiled_call_impl
    compiled = call.compiled if isinstance(call, LayerCall) else call
    with ExitStack() as hooks:
        for module in layer.modules() if layer is not None and compiled is None else ():
            if isinstance(module, _activations()):
                hooks.callback(module.register_forward_hook(_tell).remove)
        yield


def _tell(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
    x = given[0] if len(given) == 1 else None
    if isinstance(x, Tensor) and isinstance(result, Tensor) and result.data_ptr() != x.data_ptr():
        kind = x.device.type
        autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        note_maker(result, partial(_again, module, autocast), x)


def _again(module: nn.Module, autocast: torch.autocast, x: Tensor) -> Tensor:
    with autocast:
        found: Tensor = module.forward(x)
    return found


@cache
def _activations() -> tuple[type[nn.Module], ...]:
    """Classes of the activation functions that transformers has: each a function of its input alone."""
    found = (each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())
    modules: set[Any] = {each for each in found if isinstance(each, type) and not issubclass(each, nn.RReLU)}
    return tuple(modules)
