"""Hooks on the modules of a model that a loop has: whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

#: Places of a module's hooks.
PLACES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Hooks of transformers that do nothing to a pass: for recomputed layers, and for outputs that a call asks for.
_IDLE = frozenset({"make_inputs_require_grads", "output_capturing_hook"})


def foreign_hook(modules: Iterable[nn.Module]) -> str | None:
    """Return the name of a hook that looks into a pass or changes it; None where there is none."""
    names = (name for name, hook in _hooks(modules) if not _gathers(hook))
    return next((name for name in names if name not in _IDLE), None)


def gathers_weights(modules: Iterable[nn.Module]) -> bool:
    """Return True if torch's own hooks gather the weights of modules, as `fully_shard` has them."""
    return any(_gathers(hook) for _, hook in _hooks(modules))


def _hooks(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    for module in modules:
        held = module.__dict__
        for place in PLACES:
            for hook in held[place].values():
                yield getattr(hook, "__name__", type(hook).__name__), hook


def _gathers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")
