"""Layers whose weights torch's FSDP2 puts together for their turn, by hooks of its own around a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: What an attribute's name begins with in which torch keeps that a module is sharded.
STATE_OF_FSDP = "__composable_api_state_key_"


def is_of_fsdp(hook: Any) -> bool:
    """Return whether sharding has put a hook there."""
    inner = getattr(hook, "__wrapped__", hook)
    return "fsdp" in (getattr(inner, "__module__", "") or "")


def only_of_fsdp(module: nn.Module) -> bool:
    """Return whether a module has hooks around its calls, and sharding has put all of them there."""
    hooks = list(_hooks_around(module))
    return bool(hooks) and all(map(is_of_fsdp, hooks)) and not (module._backward_hooks or module._backward_pre_hooks)


def call_between_hooks(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what stands for a module's code, weights being whole within. As `nn.Module` calls hooks of `only_of_fsdp`:
    those before are given keywords, and return both; one that returns None changes nothing."""
    for hook in module._forward_pre_hooks.values():
        args, kwargs = hook(module, args, kwargs) or (args, kwargs)  # type: ignore[misc, call-arg]
    out = call(*args, **kwargs)
    for hook in module._forward_hooks.values():
        found = hook(module, args, out)  # type: ignore[call-arg]
        out = out if found is None else found
    return out


def _hooks_around(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
