"""Parts of a model that its owner replaced: a loss or a forward of their own, of which a step of ours knows nothing."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel

from brimful.models.hub.adapters import unwrapped

#: Modules that Accelerate's wrappers around a forward are of.
_WRAPPERS = ("accelerate.", "torch.amp.")


def replaced_part(given: Any) -> str | None:
    """Return the loss or the forward of a classifier that is not transformers' own, in words; None if there is none.

    given: it may be in peft's wrapper, prepared by Accelerate, or packed. Raises: OptionError as `unwrapped`.
    """
    model = unwrapped(given)
    kind = getattr(type(model), "_plain", type(model))  # in front of which `brimful.packed` puts a class
    if not _module_of(kind.forward).startswith("transformers."):
        return f"{kind.__name__} has a forward of its own"
    if not _asks_for_loss(kind) or hasattr(model, "_loss_function"):
        return "the model's loss_function was replaced"
    if any("forward" in vars(each) and not _leads_to(vars(each)["forward"], each) for each in (given, model)):
        return "the model's forward was replaced"
    return None


def _asks_for_loss(kind: type[Any]) -> bool:
    """True if a class asks for its loss as transformers has it."""
    return inspect.getattr_static(kind, "loss_function", None) is vars(PreTrainedModel)["loss_function"]


def _leads_to(call: Any, model: Any) -> bool:
    """True if a forward that was put in the place of the model's own is Accelerate's wrapper around that."""
    while (call := getattr(call, "__func__", call)) is not type(model).forward:
        if not _module_of(call).startswith(_WRAPPERS) or not hasattr(call, "__wrapped__"):
            return False
        call = call.__wrapped__
    return True


def _module_of(call: Any) -> str:
    """Name of the module that a function was written in, whatever it wraps, or that the class of a callable is of."""
    return str(getattr(call, "__globals__", {}).get("__name__", type(call).__module__))
