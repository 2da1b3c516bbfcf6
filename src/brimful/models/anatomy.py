"""What a model is made of, found in its modules rather than by its name."""

from __future__ import annotations

from typing import Any

from torch import nn


def layers_of(model: Any) -> nn.ModuleList | None:
    """The list of a model's transformer layers; None where layers are shared or nested (ALBERT)."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that every token is multiplied with: matrices outside embeddings.

    A forward pass takes two operations for each and token, a backward pass four (Kaplan et al. 2020, arXiv 2001.08361).
    """
    return sum(
        parameter.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    )
