"""Calls of a model's layers, each in the context of its forward pass: at its turn, and when it is recomputed.

Where a layer is checkpointed, by Hugging Face's own switch, what is run again in the backward pass is the call with its
context: it draws the same masks, and the last layer is shortened as it was. Compiled layers are checkpointed as a
whole. The compiler sees nothing of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from brimful.kernels.forward_context import ForwardContext, active_context
from brimful.models.fsdp_hooks import call_between_hooks, only_of_fsdp

#: Compiled forms of one layer's code: every model that a process compiles counts against the limit.
_MOST_COMPILED = 64


class LayerCall:
    """Stands where `nn.Module` looks for a compiled form of itself, and calls that, or the module as it is.

    number: of a layer; None for embeddings.
    """

    def __init__(self, module: nn.Module, number: int | None) -> None:
        self._module, self._number = weakref.ref(module), number
        self.compiled: Callable[..., Any] | None = module._compiled_call_impl

    @property
    def module(self) -> Any:
        """The module that is called."""
        return self._module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        context = active_context()
        if context is None:  # the model's owner runs it
            return _call(module, self.compiled, *args, **kwargs)
        if module.training and getattr(module, "gradient_checkpointing", False):
            # As transformers' own checkpointed layers: a second call must not find what the first one has stored.
            args, kwargs = pytree.tree_map(_no_cache, (args, kwargs), is_leaf=_is_cache)
            call = partial(self._checkpointed, context, context.both_calls(), module, **kwargs)
            return module._gradient_checkpointing_func(call, *args)
        return self._run(context, module, *args, **kwargs)

    def _checkpointed(
        self, context: ForwardContext, within: Callable[[], AbstractContextManager[None]], module: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        module.gradient_checkpointing = False  # this call is the checkpoint
        try:
            with context.told(), within():  # the forward pass may be over
                return self._run(context, module, *args, **kwargs)
        finally:
            module.gradient_checkpointing = True

    def _run(self, context: ForwardContext, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self._number is not None:
            context = context.layer(self._number)
        compiled = self.compiled if context.compiled else None
        dropout = _own_dropout() if compiled is None and context.seeded_dropout else nullcontext()
        outside = nullcontext() if compiled is None else context.outside()
        shortened = nullcontext() if context.cut is None else context.cut.within(module, context.rows)
        with context.active(), dropout, outside, shortened as finish:
            output = _call(module, compiled, *args, **kwargs)
            return output if finish is None else finish(output)


def _call(module: nn.Module, compiled: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Call what a module was compiled to, within hooks that put its weights together; as it is where it was not."""
    if compiled is None:
        return module._call_impl(*args, **kwargs)
    if only_of_fsdp(module):
        return call_between_hooks(module, compiled, *args, **kwargs)
    return compiled(*args, **kwargs)


def place_calls(layers: Sequence[nn.Module], embeddings: nn.Module | None) -> None:
    """Have all layers called in their context, and compiled embeddings. What was compiled since stays compiled."""
    for number, layer in enumerate(layers):
        if not isinstance(layer._compiled_call_impl, LayerCall):
            layer._compiled_call_impl = LayerCall(layer, number)
        checkpoint = vars(layer).get("_gradient_checkpointing_func")
        if checkpoint is not None and not isinstance(checkpoint, OneCheckpoint):
            changed: Any = layer
            changed._gradient_checkpointing_func = OneCheckpoint(checkpoint)
    if embeddings is not None and not isinstance(embeddings._compiled_call_impl, LayerCall | None):
        embeddings._compiled_call_impl = LayerCall(embeddings, None)


class OneCheckpoint:
    """Stands for a layer's function for checkpointing, and leaves a layer's call in its context as the one checkpoint.

    In some releases of transformers, 5.17 among them, a layer's `__call__` is a checkpoint of its own, around the one
    that knows the context: the layer would be recomputed twice, once of them outside of its pass.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inner = call.func if isinstance(call, partial) else call
        if isinstance(getattr(inner, "__self__", None), nn.Module) and active_context() is not None:
            return call(*args)
        return self.function(call, *args, **kwargs)


def remove_calls(model: nn.Module) -> None:
    """Have all modules called as they were before they were placed or compiled."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, LayerCall):
            module._compiled_call_impl = None
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if isinstance(checkpoint, OneCheckpoint):
            changed: Any = module
            changed._gradient_checkpointing_func = checkpoint.function


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose code was compiled."""
    found = []
    for module in model.modules():
        call = module._compiled_call_impl
        if call is not None and not (isinstance(call, LayerCall) and call.compiled is None):
            found.append(module)
    return found


@contextmanager
def as_they_were(model: nn.Module) -> Iterator[None]:
    """Within, modules are called as they were before they were placed or compiled. What is placed there is removed."""
    calls = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module in model.modules():
            if module._compiled_call_impl or module in calls:
                module._compiled_call_impl = calls.get(module)


def many_compiled_forms(layers: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Within, torch compiles layers as often as many models need, where layers were compiled."""
    calls = (layer._compiled_call_impl for layer in layers)
    if not any(isinstance(call, LayerCall) and call.compiled is not None for call in calls):
        return nullcontext()
    config: Any = torch._dynamo.config
    patched: AbstractContextManager[Any] = config.patch(recompile_limit=max(config.recompile_limit, _MOST_COMPILED))
    return patched


def _is_cache(given: Any) -> bool:
    return isinstance(given, Cache)


def _no_cache(given: Any) -> Any:
    return None if _is_cache(given) else given


def _own_dropout() -> AbstractContextManager[Any]:
    """Within, dropout of a model's own code is drawn by its place in the pass."""
    # Triton comes with torch for GPUs, and is missing beside torch for CPUs.
    from brimful.kernels.layers.seeded_dropout import SeededDropout

    return SeededDropout()
