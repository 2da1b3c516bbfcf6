"""Modules and parameters of a model, looked up once: to walk through a model takes longer than to launch a step."""

from __future__ import annotations

from itertools import chain
from typing import Any

from brimful.integrations.module_hooks import PLACES

#: Attributes that stand in front of those of a module's class where they are there.
_REPLACED = ("forward", "_loss_function")


class ModelStructure:
    """Modules and parameters that a model has, which of these are trained, and what its owner put on modules: hooks,
    forwards, a loss.

    parameters: in the model's order.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = list(model.modules())
        self.parameters = list(model.parameters())
        self._tables = [table for module in self._modules for table in (module._parameters, module._modules)]
        # By their numbers, of which no two in a process are the same.
        self._hooks = [getattr(module, place) for module in self._modules for place in PLACES]
        self._attributes = [vars(module) for module in self._modules]
        self._found = self._look()

    def _look(self) -> tuple[list[Any], ...]:
        parts = [id(part) for table in self._tables for part in table.values()]
        trained = [parameter.requires_grad for parameter in self.parameters]
        replaced = [id(there[name]) for there in self._attributes for name in _REPLACED if name in there]
        return parts, trained, list(chain.from_iterable(self._hooks)), replaced

    def is_of(self, model: Any) -> bool:
        """True while it is of this model, no part of which was replaced, frozen, released or hooked since."""
        return model is self._model and self._look() == self._found

    @property
    def trains(self) -> bool:
        """True if all modules are in train mode."""
        return all(module.training for module in self._modules)
