"""Hooks on the modules of a model that a loop has: whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

#: Places of a module's hooks.
PLACES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Hooks of all modules there are, as torch's `register_module_forward_hook` and others put them.
OF_ALL: tuple[Any, ...] = tuple(getattr(torch_module, f"_global{place}") for place in PLACES)
#: Places of a parameter's hooks: those that are called when its gradient is complete, and all.
COMPLETE = ("_post_accumulate_grad_hooks",)
_OF_GRADIENTS = ("_backward_hooks", *COMPLETE)
#: Hooks of transformers that do nothing to a pass: for recomputed layers, and for outputs that a call asks for.
_IDLE = frozenset({"make_inputs_require_grads", "output_capturing_hook"})


def foreign_hook(modules: Iterable[nn.Module], *, gathering: bool = True) -> str | None:
    """Return the name of a hook that looks into a pass or changes it; None where there is none.

    gathering: whether torch's own, which gather weights, are such hooks.
    """
    named = ((getattr(hook, "__name__", type(hook).__name__), hook) for hook in hooks_of(modules))
    return next((name for name, hook in named if name not in _IDLE and (gathering or not _gathers(hook))), None)


def gathers_weights(modules: Iterable[nn.Module]) -> bool:
    """Return True if torch's own hooks gather the weights of modules, as `fully_shard` has them."""
    return any(map(_gathers, hooks_of(modules)))


def hooks_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the hooks of modules, which see what these are called with."""
    yield from (hook for module in modules for place in PLACES for hook in vars(module)[place].values())
    yield from (hook for hooks in OF_ALL for hook in hooks.values())


def num_gradient_hooks(parameters: Iterable[Any]) -> list[int]:
    """Count the hooks on the gradient of each parameter."""
    return [len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in parameters]


def hooked_gradient(model: nn.Module, places: Iterable[str] = _OF_GRADIENTS) -> str | None:
    """Return the name of a trained parameter that has a hook on its gradient; None where none has."""
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return next((name for name, p in named if any(getattr(p, place) for place in places)), None)


def _gathers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")
