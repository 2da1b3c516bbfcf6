"""Modules and parameters of a model, looked up once: to walk through a model takes longer than to launch a step."""

from __future__ import annotations

from itertools import chain
from typing import Any

from brimful.integrations.module_hooks import OF_ALL, PLACES, num_gradient_hooks

#: Attributes that stand in front of those of a module's class where they are there.
_REPLACED = ("forward", "_loss_function")
#: Values of a configuration that are read at each pass, or by no pass.
_READ_EACH_TIME = frozenset({"problem_type", "pad_token_id", "return_dict", "use_cache", "name_or_path"})
_OF_FILES = frozenset({"dtype", "architectures", "id2label", "label2id", "transformers_version"})


def settings_of(config: Any) -> dict[str, Any]:
    """Return what a configuration says of how a model computes. Those that torch modules read once are among them."""
    named = {**vars(config.get_text_config()), **vars(config)}
    left_out = _READ_EACH_TIME | _OF_FILES
    return {name: value for name, value in named.items() if name not in left_out and not name.startswith("_")}


class ModelStructure:
    """Modules and parameters that a model has, which of these are trained, what its configuration says, and what its
    owner put on modules and gradients: hooks, forwards, a loss.

    parameters: in the model's order.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = list(model.modules())
        self.parameters = list(model.parameters())
        self._tables = [table for module in self._modules for table in (module._parameters, module._modules)]
        # By their numbers, of which no two in a process are the same.
        self._hooks = [*(getattr(module, place) for module in self._modules for place in PLACES), *OF_ALL]
        self._attributes = [vars(module) for module in self._modules]
        self._found = self._look()

    def _look(self) -> tuple[Any, ...]:
        parts = [id(part) for table in self._tables for part in table.values()]
        trained = [parameter.requires_grad for parameter in self.parameters]
        replaced = [id(there[name]) for there in self._attributes for name in _REPLACED if name in there]
        hooks = [*chain.from_iterable(self._hooks), *num_gradient_hooks(self.parameters)]
        return parts, trained, hooks, replaced, settings_of(self._model.config)

    def is_of(self, model: Any) -> bool:
        """True while it is of this model, no part of which was replaced, frozen, released, hooked or configured
        otherwise since."""
        return model is self._model and self._look() == self._found

    @property
    def trains(self) -> bool:
        """True if all modules are in train mode."""
        return all(module.training for module in self._modules)
