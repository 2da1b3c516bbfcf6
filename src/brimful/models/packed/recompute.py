"""Layers whose activations are computed again in the backward pass instead of being kept (gradient checkpointing).

A layer that is recomputed is called in the context of its forward pass (`layer_calls`), so that it draws the same
masks. Hugging Face's own switch on a layer is what turns it on, so that layers of padded rows are recomputed too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(layers: Sequence[nn.Module], numbers: Collection[int]) -> None:
    """Have the layers of these numbers recomputed, and no others."""
    for number, layer in enumerate(layers):
        chosen: Any = layer
        chosen.gradient_checkpointing = number in numbers
        chosen._gradient_checkpointing_func = call_recomputed


def keep_all(layers: Sequence[nn.Module]) -> None:
    """Undo `recompute`."""
    for layer in layers:
        for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
            vars(layer).pop(name, None)


def call_recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose activations are computed again in the backward pass, and not kept until then.

    torch's random streams are set back for it, but within a CUDA graph, where they cannot be: what draws numbers there
    must draw them by its place in the pass.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=not capturing, determinism_check="none"
    )
