"""The problem type of a call: which loss transformers' heads compute of its labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.core.errors import ArgumentError


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
