"""The linear layer that a classifier's outputs come from."""

from __future__ import annotations

from typing import Any

from torch import nn

from brimful.core.records import LabelSpace
from brimful.models.hub.inspection import ModelFacts, empty_model, head_parameters
from brimful.models.hub.load import config_for


def last_linear(model: Any) -> nn.Linear | None:
    """The last linear layer of the head with as many outputs as the model; None where there is no such layer."""
    modules, outputs = dict(model.named_modules()), int(model.config.num_labels)
    for name in reversed(list(head_parameters(model))):
        owner = modules[name.rpartition(".")[0]]
        if name.endswith(".weight") and isinstance(owner, nn.Linear):
            return owner if owner.out_features == outputs else None
    return None


def last_linear_of(facts: ModelFacts, space: LabelSpace) -> nn.Linear | None:
    """The same of a model that is not loaded, without numbers."""
    return last_linear(empty_model(facts.folder, config_for(facts.config, space), facts.runs_own_code))
