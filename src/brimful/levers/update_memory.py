"""Ways to update weights in less memory: checked for the model that they are asked for, and said in the recipe."""

from __future__ import annotations

import numpy as np
import torch

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.units import bytes_text
from brimful.hardware.memory import free_host_bytes
from brimful.levers.facts import equivalence_of, recomputes, warn_on_cpu
from brimful.levers.lever import Assembly
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.step.updates.bucketed_adamw import Savings

#: Share of free host memory that states may take.
_HOST_SHARE = 0.8
#: Batches whose micro-batches are counted.
_LOOKED_AT = 100
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_SAID = {
    torch.float32: "states in fp32",
    torch.bfloat16: "states in bf16, rounded by chance",
    torch.uint8: "states of Linear weights in 8 bits, of all else in fp32",
}


def asked_savings(options: TrainOptions) -> Savings | None:
    """Return what was asked for; None for the update of all weights at once."""
    found = Savings(
        weights=torch.bfloat16 if options.weight_dtype == "bf16" else None,
        states=_DTYPES[options.optimizer_state_dtype],
        on_host=options.optimizer_offload or options.stream_weights != "none",
        in_backward=options.optimizer_in_backward,
        late_clipping=options.late_clipping,
    )
    return None if found == Savings() else found


def check_savings(assembly: Assembly, asked: Savings) -> None:
    """Check that what was asked for works on this model and device. Raises: OptionError."""
    if asked.in_backward:
        _check_in_backward(assembly)
    if asked.weights is not None:
        precision = assembly.precision
        if precision.half != asked.weights:
            raise OptionError(
                f"--weight-dtype bf16 needs products in bf16, and --precision is {precision.value}",
                hint="add --precision bf16",
            )
        equivalence = assembly.fact(equivalence_of)
        if not equivalence.half_weights:
            raise OptionError(
                "--weight-dtype bf16 does not work on this model: with weights in bf16 it computes something else",
                hint="leave it out; --optimizer-state-dtype bf16 and --optimizer-offload save memory, too",
            )
    if asked.in_backward:
        _warn_of_parts(assembly)
    if asked.on_host and assembly.options.stream_weights == "none":  # which counts all that is streamed
        warn_on_cpu(assembly, "--optimizer-offload")
        _check_host(assembly, asked)


def described(savings: Savings, *, streamed: str = "none") -> str:
    """Say what is saved, and what that changes. streamed: --stream-weights."""
    said = []
    if savings.weights is not None:
        said.append("Linear weights in bf16 alone, rounded by chance")
    place = "with their layers in the file" if streamed == "disk" else "in host memory"
    where = f", {place}" if savings.on_host else ""
    where += ", but for those that are updated last" if savings.on_host and savings.in_backward else ""
    said.append(f"{_SAID[savings.states]}{where}")
    if savings.in_backward:
        clipped = "clipped by the norm of the step before" if savings.late_clipping else "not clipped"
        said.append(
            f"updated within the backward pass where a batch is one micro-batch, gradients freed and {clipped};"
            " a gradient that is not finite does not undo what was updated before it"
        )
    return "; ".join(said)


def _check_in_backward(assembly: Assembly) -> None:
    if assembly.precision.scaled:
        raise OptionError(
            "--optimizer-in-backward does not work with --precision fp16: overflows are known only at the end",
            hint="use --precision bf16",
        )
    layers = layers_of(assembly.model)
    within = [id(p) for layer in layers or () for p in layer.parameters()]
    if recomputes(assembly.options) and (layers is None or len(within) != len(set(within))):  # type: ignore[arg-type]
        raise OptionError(
            "--optimizer-in-backward does not work with --gradient-checkpointing on this model: its layers share"
            " weights, whose gradients are complete only when the last of them was computed again",
            hint="leave one of the two out",
        )


def _warn_of_parts(assembly: Assembly) -> None:
    """Warn where batches are mostly of several micro-batches: gradients are summed up then, and are there whole."""
    options, layout = assembly.options, assembly.layout
    assert isinstance(options, TrainOptions)
    if layout is None:
        return
    batches = assembly.batches(layout.most_tokens)[:_LOOKED_AT]
    num = int(np.median([layout.count(lengths_N) for lengths_N in batches if len(lengths_N)]))
    if num > 1:
        larger = "--token-budget" if options.per_device_batch_size is None else "--per-device-batch-size"
        assembly.warn(
            f"--optimizer-in-backward has no effect on gradients' memory: a batch is {num} micro-batches, whose"
            f" gradients are summed up; raise {larger}, or lower --batch-size"
        )


def _check_host(assembly: Assembly, asked: Savings) -> None:
    linear = linear_parameters(assembly.model) if asked.states == torch.uint8 else ()
    trained = (p for p in assembly.model.parameters() if p.requires_grad)
    wide = asked.states.itemsize if asked.states != torch.uint8 else 4
    needed = sum(2 * (1 if id(p) in linear else wide) * p.numel() for p in trained)
    free = free_host_bytes()
    if free is not None and needed > _HOST_SHARE * free:
        raise OptionError(
            f"--optimizer-offload needs {bytes_text(needed)} of host memory, and {bytes_text(free)} are free",
            hint="--optimizer-state-dtype bf16 halves it, and 8bit takes a quarter",
        )
