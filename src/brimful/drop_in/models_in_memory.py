"""Models in memory that answer as their configuration and weights say, and those that somebody has changed.

A pipeline saves a model and reads it again: what a folder does not hold (hooks, a forward or a module of one's own, an
adapter) would be lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from brimful.core.errors import printable
from brimful.models.hub.inspection import empty_model


class NotHere(Exception):  # noqa: N818  (it is a reason, which leads to transformers)
    """A reason why transformers' pipeline runs."""


def refuse_changed(model: Any) -> None:
    """Check that a model in memory is the one that its saved files give again.

    Raises: NotHere, with the reason, for any other.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as REGISTERED

    if getattr(model, "is_quantized", False):
        raise NotHere("the model is quantized")
    if type(model).__module__.startswith("peft.") or getattr(model, "_hf_peft_config_loaded", False):
        raise NotHere("the model in memory has an adapter of peft, which its merge_and_unload() would merge")
    registered = REGISTERED.get(type(getattr(model, "config", None)), None)
    if _own_class(model) is not registered:
        raise NotHere(f"the model's class, {printable(type(model).__name__)}, is not transformers' own")
    for name, module in model.named_modules():
        where = printable(name or "the model")
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotHere(f"{where} has forward hooks")
        if "forward" in vars(module):
            raise NotHere(f"{where} has a forward of its own")
    if (different := _different_module(model)) is not None:
        raise NotHere(f"{printable(different)} is not that of a {registered.__name__} with the model's configuration")


def model_state(model: Any) -> Any:
    """Return what changes where somebody changes a model: its configuration, its modules with hooks and forwards, its
    weights and how often torch wrote them.

    Writing to a tensor's `data` is not among it.
    """
    hooks = [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()]
    modules = [(id(module), id(vars(module).get("forward"))) for module in model.modules()]
    tensors = (*model.parameters(), *model.buffers())
    written = [(id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return model.config.to_dict(), hooks, modules, written


def _different_module(model: Any) -> str | None:
    """Name of the first module, parameter or buffer that the model's configuration does not give; None without any."""
    plain = empty_model(Path(model.config.name_or_path), model.config, False)
    found: dict[str, nn.Module] = dict(model.named_modules())
    expected = dict(plain.named_modules())
    for name in found | expected:
        if name not in found or name not in expected or _own_class(found[name]) is not type(expected[name]):
            return name
    shapes, expected_shapes = _shapes(model), _shapes(plain)
    return next((name for name in shapes | expected_shapes if shapes.get(name) != expected_shapes.get(name)), None)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _own_class(module: Any) -> type[Any]:
    """The module's class, under those that `brimful.packed` has put in front of it."""
    classes = type(module).__mro__
    ours = [place for place, each in enumerate(classes) if each.__module__.startswith("brimful.")]
    return classes[ours[-1] + 1] if ours else classes[0]
