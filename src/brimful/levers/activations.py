"""Activations that a model keeps for its backward pass, and what each kind of checkpointing leaves of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from brimful.core.options.train import TrainOptions
from brimful.core.units import parse_bytes
from brimful.hardware.process_settings import RandomStream
from brimful.kernels.layout import map_tensors
from brimful.levers.compiled_layers import compiled_for_a_while
from brimful.levers.facts import kernels_of
from brimful.levers.lever import Assembly
from brimful.levers.packing import Packing, streamed
from brimful.levers.parameter_efficient import TrainedPart
from brimful.models.model_stats import layers_of
from brimful.models.packed.activations import Activations, measure_activations
from brimful.models.packed.check_inputs import filled_row, padded_rows, random_sequences
from brimful.models.packed.offload import AHEAD
from brimful.models.packed.ways import Way

#: Tokens of a micro-batch that fill a GPU, and a CPU.
_FILLS = 8192
#: Tokens of the two passes that activations are measured by.
_MEASURED = {"cuda": (512, 2048), "cpu": (128, 384)}


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


def fuses_layers(assembly: Assembly) -> bool:
    """Return whether layers that are compiled are fused around our attention: not around an adapter, whose sums stay in
    fp32."""
    part = assembly.find(TrainedPart)
    adapted = part is not None and part.adapter
    return assembly.lever(Packing).packed and assembly.fact(kernels_of).fused and not adapted


def compiled_for_less(assembly: Assembly) -> bool:
    """Return whether layers will be fused for certain, as was asked for, or as activations are limited, of which fused
    layers keep less."""
    if not assembly.training or assembly.device.type != "cuda":
        return False
    options: TrainOptions = assembly.options  # type: ignore[assignment]
    limited = options.gradient_checkpointing == "selective" or budget_bytes(options) is not None
    if options.execution != "compiled" and (options.execution != "auto" or assembly.num_ranks > 1 or not limited):
        return False
    return fuses_layers(assembly) and not streamed(assembly)


def activations_of(assembly: Assembly) -> Activations:
    """Return what the model keeps of a token, measured on texts as long as the data's, by fused layers where those will
    run: they keep less than the model's own code does."""
    packing, model, precision = assembly.lever(Packing), assembly.model, assembly.precision
    layers, execution, kernels = layers_of(model), assembly.execution, assembly.fact(kernels_of)
    assert layers is not None
    assert execution is not None

    def run(inputs: Any) -> Any:
        with precision.autocast():
            return execution(inputs, precision.context()).logits

    length = max(1, min(assembly.typical_length, assembly.max_length))
    sizes = []
    small, large = _MEASURED.get(assembly.device.type, _MEASURED["cpu"])
    for num_rows in (1 + small // length, 2 + large // length):
        sequences = random_sequences(model.config, np.full(num_rows, length))
        inputs = padded_rows(sequences, model.config)
        if packing.packed:
            inputs = filled_row(sequences, model.config, (kernels.typical_length, kernels.fastest))
        sizes.append(map_tensors(inputs, lambda tensor: tensor.to(assembly.device)))
    kept = [*model.parameters(), *model.buffers()]
    weights = {each.untyped_storage().data_ptr() for each in kept}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_inference()]
    fused = compiled_for_less(assembly)
    compiled = compiled_for_a_while(execution, note=assembly.warn) if fused else nullcontext()
    try:
        with RandomStream(assembly.device).seeded(0), compiled:
            found = measure_activations(layers, run, sizes, weights, assembly.device)
        # Copies of weights in the precision of products are the optimizer's in fused layers, and no activations.
        return replace(found, fixed=0) if fused else found
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def kept_ways(found: Activations, tokens: int, budget: int | None) -> tuple[dict[int, Way], float]:
    """Return how much of each layer to keep for a micro-batch to keep at most `budget` bytes, by number where not all
    is kept, and the bytes that are kept then.

    One layer after another is kept in less, the one first that frees the most for a second of what is computed again,
    and of equal ones the earlier; what turns out not to be needed is undone, the dearest first. As little as can be
    where even that is not enough, or there is no limit.
    """
    ways: dict[int, Way] = {}

    def with_way(number: int, way: Way) -> dict[int, Way]:
        others = {each: of for each, of in ways.items() if each != number}
        return others if way is Way.KEPT else {**others, number: way}

    def gain(move: tuple[int, Way], kept: float) -> tuple[float, float, int]:
        number, way = move
        layer, now = found.layers[number], ways.get(number, Way.KEPT)
        freed = kept - found.bytes(tokens, with_way(number, way))
        longer = layer.again_s(way) - layer.again_s(now)
        return freed / max(longer, 1e-12), layer.left(now) - layer.left(way), -number

    while budget is None or found.bytes(tokens, ways) > budget:
        kept = found.bytes(tokens, ways)
        moves = [
            (number, way)
            for number, layer in enumerate(found.layers)
            for way in Way
            if layer.left(way) < layer.left(ways.get(number, Way.KEPT))
        ]
        if not moves:
            break
        number, way = max(moves, key=partial(gain, kept=kept))
        ways = with_way(number, way)
    most = max(budget or 0, found.bytes(tokens, ways))
    for number in sorted(ways, key=lambda each: -found.layers[each].again_s(ways[each])):
        for way in Way:
            if way < ways[number] and found.bytes(tokens, with_way(number, way)) <= most:
                ways = with_way(number, way)
                break
    return dict(sorted(ways.items())), found.bytes(tokens, ways)


def offloaded_layers(found: Activations, tokens: int, budget: int | None) -> tuple[tuple[int, ...], float]:
    """Return layers to offload and the bytes that are kept then: the first ones, as those wait the longest. As few as
    `budget` allows; without one, or where none does, as few as leave the least."""
    left = [found.bytes(tokens, offloaded=n) for n in range(max(0, len(found.layers) - AHEAD) + 1)]
    least = left.index(min(left))
    count = next((n for n, kept in enumerate(left) if budget is not None and kept <= budget), least)
    return tuple(range(count)), left[count]


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
    selective = options.gradient_checkpointing == "selective"
    ways, offloaded = dict.fromkeys(range(depth), Way.EMPTIED) if selective else {}, 0 if selective else depth

    def tokens(kept: float) -> int:
        return int((budget - found.fixed) / max(1.0, kept - found.fixed))

    whole, least = tokens(found.bytes(1)), tokens(found.bytes(1, ways, offloaded))
    return max(1, min(most, max(whole, min(least, _FILLS))))
