"""Amount of each layer of a model that is kept for its backward pass: set, and read from the layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from torch import nn

from brimful.models.packed.layer_calls import OneCheckpoint
from brimful.models.packed.recompute import call_emptied, call_recomputed
from brimful.models.packed.remade_layers import call_remade


class Way(IntEnum):
    """Amount of a layer that is kept for its backward pass, from all to its input alone.

    REMADE: all but results of activation functions. RECOMPUTED: its input, and what a fused layer's last function
    needs. EMPTIED: its input.
    """

    KEPT = 0
    REMADE = 1
    RECOMPUTED = 2
    EMPTIED = 3


_CALLS = {Way.REMADE: call_remade, Way.RECOMPUTED: call_recomputed, Way.EMPTIED: call_emptied}


def set_ways(layers: Iterable[nn.Module], ways: Mapping[int, Way]) -> None:
    """Have layers keep so much, by number; all others keep all.

    Hugging Face's own switch on a layer is what turns it on, so that it works in layers of padded rows too.
    """
    for number, layer in enumerate(layers):
        way, changed = ways.get(number, Way.KEPT), layer
        switched: Any = changed
        switched.gradient_checkpointing = way is not Way.KEPT
        switched._gradient_checkpointing_func = _CALLS.get(way, call_recomputed)


def ways_of(layers: Iterable[nn.Module]) -> dict[int, Way] | None:
    """Return what was set; None where layers are called by something else."""
    found = {}
    for number, layer in enumerate(layers):
        if not vars(layer).get("gradient_checkpointing", False):
            continue
        call = vars(layer).get("_gradient_checkpointing_func")
        call = call.function if isinstance(call, OneCheckpoint) else call
        way = next((way for way, known in _CALLS.items() if known is call), None)
        if way is None:
            return None
        found[number] = way
    return found
