"""Levers to name where memory does not suffice: those that are not on, and work with what is.

First those that leave what is learned as it is, then the others. Where counted bytes tell which is the first that fits,
it comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.hardware.memory import device_free_bytes
from brimful.levers.lever import Assembly
from brimful.levers.optimizer import asked_optimizer
from brimful.levers.token_budget import bytes_a_token
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.models.packed.streamed_layers import TRAINED

#: Share of a GPU that counted bytes may take: kernels' workspaces and what a pass has on the way come on top.
_MOST = 0.85
#: Share of a model's weights that an adapter has, about.
_ADAPTER = 0.01


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A lever as it is typed, and the options that it sets. alike: whether it leaves what is learned as it is."""

    said: str
    sets: Mapping[str, Any]
    alike: bool = True
    on_gpus: bool = True


def remedies(options: TrainOptions, *, on_gpu: bool, num_ranks: int = 1, num_gpus: int = 1) -> list[Remedy]:
    """Levers that are not on and work with those that are, in the order in which to try them."""
    in_backward = {"optimizer_in_backward": True, "late_clipping": options.max_grad_norm > 0}
    flags = "--optimizer-in-backward" + (" --late-clipping" if options.max_grad_norm > 0 else "")
    several = "--sharding parameters" if num_ranks > 1 else "--gpus all --sharding parameters"
    cut = {"sharding": "parameters"}
    each = [
        Remedy(said="--gradient-checkpointing full", sets={"gradient_checkpointing": "full"}, on_gpus=False),
        Remedy(said="--optimizer-offload", sets={"optimizer_offload": True}),
        Remedy(said="--stream-weights host", sets={"stream_weights": "host"}),
        *([Remedy(said=several, sets=cut)] if max(num_ranks, num_gpus) > 1 else []),
        Remedy(said=flags, sets=in_backward, alike=options.max_grad_norm == 0, on_gpus=False),
        Remedy(said="--precision bf16", sets={"precision": "bf16"}, alike=False),
        Remedy(said="--optimizer-state-dtype 8bit", sets={"optimizer_state_dtype": "8bit"}, alike=False, on_gpus=False),
        Remedy(said="--peft lora", sets={"peft": "lora"}, alike=False, on_gpus=False),
    ]
    there = [one for one in each if (on_gpu or not one.on_gpus) and _is_new(options, one, num_ranks)]
    return sorted(there, key=lambda one: not one.alike)


def _is_new(options: TrainOptions, remedy: Remedy, num_ranks: int) -> bool:
    """Return whether a lever is not on, and options allow it beside what is."""
    sets = remedy.sets
    if "gradient_checkpointing" in sets and (
        options.gradient_checkpointing != "none" or options.stream_weights != "none"
    ):
        return False
    if "optimizer_offload" in sets and options.stream_weights != "none":  # which has states there
        return False
    if "stream_weights" in sets and (options.stream_weights != "none" or num_ranks > 1):
        return False
    if "precision" in sets and options.precision not in ("fp32", "tf32"):
        return False
    if "optimizer_in_backward" in sets and (options.precision == "fp16" or options.batch_size > 1):
        return False  # gradients of several micro-batches are summed up
    if "peft" in sets and options.peft is not None:
        return False
    if all(getattr(options, name) == value for name, value in sets.items()):
        return False
    try:
        dataclasses.replace(options, **sets)
    except OptionError:
        return False
    return True


def device_bytes(assembly: Assembly, options: TrainOptions, tokens: int) -> int | None:
    """Bytes of a step of so many tokens on its device, about: weights, their copies in half precision, gradients,
    states and activations; None for a model of unknown size."""
    each_token = bytes_a_token(dataclasses.replace(assembly, options=options))
    if each_token is None:
        return None
    model, asked = assembly.model, asked_optimizer(options)
    linear, layers = linear_parameters(model), layers_of(model) or ()
    inside = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    half = assembly.precision.half is not None or options.precision == "bf16"
    share = _ADAPTER if options.peft is not None else 1.0
    kept = states = 0.0
    for parameter in model.parameters():
        learns = parameter.requires_grad
        kept += parameter.numel() * (4 + (2 if half and learns and id(parameter) in linear else 0))
        states += share * parameter.numel() * (asked.gradient_bytes + asked.device_state_bytes) if learns else 0
    if options.stream_weights != "none" and inside:
        on_device = 1 - max(0, sum(inside) - TRAINED * max(inside)) / sum(p.numel() for p in model.parameters())
        kept, states = kept * on_device, states * on_device
    if options.sharding == "parameters":
        kept, states = kept / max(2, assembly.num_ranks), states / max(2, assembly.num_ranks)
    return int(kept + states + tokens * each_token)


def more_room(assembly: Assembly, *, in_a_step: bool) -> str | None:
    """Return what to do where memory does not suffice, as a hint; None where there is no lever.

    in_a_step: whether weights and states are there, and a micro-batch of one row did not fit beside them.
    """
    options = assembly.options
    if not isinstance(options, TrainOptions) or assembly.optimizer is not None:
        return None
    on_gpu = assembly.device.type == "cuda"
    num_gpus = torch.cuda.device_count() if on_gpu else 1
    found = remedies(options, on_gpu=on_gpu, num_ranks=assembly.num_ranks, num_gpus=num_gpus)
    fitting = first_that_fits(assembly, found)
    words = ["lower --max-length"] if in_a_step else []
    if fitting is not None:
        words = [f"add {fitting.said}, with which it should fit", *words]
        found = [one for one in found if one is not fitting]
    for alike, begun in ((True, "the same is learned with"), (False, "something else with")):
        if said := [one.said for one in found if one.alike == alike]:
            words.append(f"{begun} {' or '.join([', '.join(said[:-1]), said[-1]] if len(said) > 1 else said)}")
    return "; ".join(words) if found or fitting else None


def first_that_fits(assembly: Assembly, found: list[Remedy]) -> Remedy | None:
    """Return the first lever with which a step of the longest row takes less than the device has; None where that is
    not known, as where the step that did not fit is thought to."""
    options, room = assembly.options, room_bytes(assembly.device)
    assert isinstance(options, TrainOptions)
    now = device_bytes(assembly, options, assembly.max_length)
    if room is None or now is None or now <= _MOST * room:
        return None
    for one in found:
        needed = device_bytes(assembly, dataclasses.replace(options, **one.sets), assembly.max_length)
        if needed is not None and needed <= _MOST * room:
            return one
    return None


def room_bytes(device: torch.device) -> int | None:
    """Bytes that torch may have in all of a GPU; None of a CPU, whose memory others use."""
    if device.type != "cuda":
        return None
    return device_free_bytes(device) + torch.cuda.memory_reserved(device)
