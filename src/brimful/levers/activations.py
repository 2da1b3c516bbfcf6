"""Activations that a model keeps for its backward pass, and what each kind of checkpointing leaves of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from brimful.core.options.train import TrainOptions
from brimful.core.units import parse_bytes
from brimful.hardware.process_settings import RandomStream
from brimful.kernels.layout import map_tensors
from brimful.levers.facts import kernels_of
from brimful.levers.lever import Assembly
from brimful.levers.packing import Packing
from brimful.models.model_stats import layers_of
from brimful.models.packed.activations import Activations, measure_activations
from brimful.models.packed.check_inputs import filled_row, padded_rows, random_sequences
from brimful.models.packed.offload import AHEAD

#: Tokens of a micro-batch that fill a GPU, and a CPU.
_FILLS = 8192
#: Tokens of the two passes that activations are measured by.
_SMALL, _LARGE = 128, 384


def recomputed_every(options: TrainOptions) -> int | None:
    """Return the distance of recomputed layers from one another, None where it is not fixed."""
    asked = options.gradient_checkpointing
    if options.stream_weights != "none":
        return 1
    if asked in ("none", "selective", "offload"):
        return None
    return 1 if asked == "full" else int(asked.removeprefix("every-"))


def budget_bytes(options: TrainOptions) -> int | None:
    """Return the bytes that activations of a micro-batch may have, None where they were not limited."""
    return None if options.activation_memory is None else parse_bytes(options.activation_memory)


def activations_of(assembly: Assembly) -> Activations:
    """Return what the model keeps of a token, measured on texts as long as the data's. Its layers are not compiled yet;
    fused ones keep no more."""
    packing, model, precision = assembly.lever(Packing), assembly.model, assembly.precision
    layers, execution, kernels = layers_of(model), assembly.execution, assembly.fact(kernels_of)
    assert layers is not None
    assert execution is not None

    def run(inputs: Any) -> Any:
        with precision.autocast():
            return execution(inputs, precision.context()).logits

    length = max(1, min(assembly.typical_length, assembly.max_length))
    sizes = []
    for num_rows in (1 + _SMALL // length, 2 + _LARGE // length):
        sequences = random_sequences(model.config, np.full(num_rows, length))
        inputs = padded_rows(sequences, model.config)
        if packing.packed:
            inputs = filled_row(sequences, model.config, (kernels.typical_length, kernels.fastest))
        sizes.append(map_tensors(inputs, lambda tensor: tensor.to(assembly.device)))
    kept = [*model.parameters(), *model.buffers()]
    weights = {each.untyped_storage().data_ptr() for each in kept}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_inference()]
    try:
        with RandomStream(assembly.device).seeded(0):
            return measure_activations(layers, run, sizes, weights, assembly.device)
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def recomputed_layers(found: Activations, tokens: int, budget: int | None) -> tuple[tuple[int, ...], float]:
    """Return layers to recompute for a micro-batch to keep at most `budget` bytes, and the bytes that are kept then.

    Layers that free the most for a second of their forward pass come first, and of equal ones the earlier. All of them
    where even that is not enough, or there is no limit.
    """
    chosen: list[int] = []
    left = set(range(len(found.layers)))
    while left and (budget is None or found.bytes(tokens, chosen) > budget):
        kept = found.bytes(tokens, chosen)

        def gain(number: int, kept: float = kept) -> tuple[float, float, int]:
            layer = found.layers[number]
            freed = kept - found.bytes(tokens, [*chosen, number])
            return freed / max(layer.forward_s, 1e-12), layer.kept, -number

        chosen.append(max(left, key=gain))
        left.remove(chosen[-1])
    return tuple(sorted(chosen)), found.bytes(tokens, chosen)


def offloaded_layers(found: Activations, tokens: int, budget: int | None) -> tuple[tuple[int, ...], float]:
    """Return layers to offload, as `recomputed_layers` does: the first ones, as those wait the longest."""
    most = max(0, len(found.layers) - AHEAD)
    counts = range(most + 1) if budget is not None else [most]
    count = next((n for n in counts if budget is not None and found.bytes(tokens, offloaded=n) <= budget), most)
    return tuple(range(count)), found.bytes(tokens, offloaded=count)


def fitting_tokens(assembly: Assembly, most: int) -> int:
    """Return the most tokens of a micro-batch, up to `most`, that fit in what activations were asked to have.

    As many as fit whole, where those fill the device; else as many as fill it, if they fit with the most layers
    recomputed or offloaded, or else what does.
    """
    options: TrainOptions = assembly.options  # type: ignore[assignment]
    budget = budget_bytes(options)
    if budget is None or layers_of(assembly.model) is None:
        return most
    found = assembly.fact(activations_of)
    depth = len(found.layers)
    recomputed, offloaded = (range(depth), 0) if options.gradient_checkpointing == "selective" else ((), depth)

    def tokens(kept: float) -> int:
        return int((budget - found.fixed) / max(1.0, kept - found.fixed))

    whole, least = tokens(found.bytes(1)), tokens(found.bytes(1, recomputed, offloaded))
    return max(1, min(most, max(whole, min(least, _FILLS))))
