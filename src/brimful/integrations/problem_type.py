"""The problem type of a call: which loss transformers' heads compute of its labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.core.errors import ArgumentError

#: Model types whose heads compute other losses while `problem_type` is None, and leave it None.
_OF_THEIR_OWN = ("deberta", "deberta-v2")


def problem_of(config: Any, labels: Tensor) -> str:
    """The problem type as transformers' heads read it: of the configuration, else of the labels' dtype.

    Raises: ArgumentError for numbers where classes are meant.
    """
    num_labels = config.num_labels
    if config.problem_type is not None:
        found = str(config.problem_type)
    elif num_labels == 1:
        found = "regression"
    else:
        whole = labels.dtype in (torch.long, torch.int)
        found = "single_label_classification" if whole else "multi_label_classification"
    if found != "regression" and labels.is_floating_point() and labels.ndim < 2:
        raise ArgumentError(
            f"labels are floats, one a row, and the model has {num_labels} classes",
            hint=f"give integers below {num_labels}, or for multi-label rows of {num_labels} floats",
        )
    return found


def keeps_problem_type(config: Any) -> bool:
    """Return True if the head does not write the problem type that it finds into the configuration."""
    return getattr(config, "model_type", None) in _OF_THEIR_OWN


def has_own_loss(config: Any, labels: Tensor) -> bool:
    """Return True if the head's loss of these labels is not that of the problem type: DeBERTa's of soft labels."""
    if config.problem_type is not None or config.num_labels == 1 or not keeps_problem_type(config):
        return False
    return labels.is_floating_point() or (labels.ndim > 1 and labels.shape[-1] > 1)
