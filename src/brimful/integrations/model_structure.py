"""Modules and parameters of a model, looked up once: to walk through a model takes longer than to launch a step."""

from __future__ import annotations

from typing import Any


class ModelStructure:
    """Modules and parameters that a model has, and which of these are trained.

    parameters: in the model's order.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = list(model.modules())
        self.parameters = list(model.parameters())
        self._tables = [table for module in self._modules for table in (module._parameters, module._modules)]
        self._found = self._look()

    def _look(self) -> tuple[list[int], list[bool]]:
        parts = [id(part) for table in self._tables for part in table.values()]
        return parts, [parameter.requires_grad for parameter in self.parameters]

    def is_of(self, model: Any) -> bool:
        """True while it is of this model, no part of which was replaced, frozen or released since."""
        return model is self._model and self._look() == self._found

    @property
    def trains(self) -> bool:
        """True if all modules are in train mode."""
        return all(module.training for module in self._modules)
