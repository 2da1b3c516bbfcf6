"""Gradient checkpointing: layers whose activations are computed again in the backward pass instead of being kept, or
wait for it in host memory.

A layer that is recomputed keeps its input and runs forward once more. Gradients are the same, with dropout on: masks
are drawn again. Where layers share a table of positions, its gradient is summed in another order. A fused layer leaves
out its last product the second time, a third of its arithmetic; a post-norm one keeps what that made, a fifteenth of
all that it would keep. The last layer is not recomputed, unless a decoder's come after it: its turn comes first, when
it would have to be whole again.

Under a limit of bytes (`selective`) each layer keeps all, or all but the results of activation functions, which cost a
pass over memory, or as above, or its input alone: whatever frees the most bytes for a second of what is computed again.
Of equal layers the first ones, as their turn in the backward pass comes when all others are gone.

`offload` copies what a layer keeps to the host while later layers run. Nothing is computed twice; the link is what it
costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from brimful.core import records
from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.units import bytes_text
from brimful.hardware.host_link import host_link_bytes_per_s
from brimful.hardware.memory import free_host_bytes
from brimful.levers.activations import (
    activations_of,
    budget_bytes,
    kept_ways,
    offloaded_layers,
    recomputed_every,
)
from brimful.levers.facts import warn_on_cpu
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.packing import streamed
from brimful.levers.token_budget import TokenBudget
from brimful.models.model_stats import layer_lists, layers_of
from brimful.models.packed.offload import offload
from brimful.models.packed.recompute import call_recomputed
from brimful.models.packed.ways import Way, set_ways

_SOURCES = {"selective": "Korthikanti et al. 2022, arXiv 2205.05198", "offload": "Rhu et al. 2016, arXiv 1602.08124"}
#: Share of free host memory that activations may take.
_HOST_SHARE = 0.8
#: Times as long as without copies that a step may take unsaid.
_HIDDEN = 1.1


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Lever):
    """Amount of each of `depth` layers that is kept, by number where not all is, or of how many all is offloaded.

    again: share of a forward pass of all layers that is computed again. freed: bytes of a micro-batch that a limit
    leaves out, None where no limit was given and nothing was measured.
    """

    name = "gradient_checkpointing"
    source = "Chen et al. 2016, arXiv 1604.06174"
    depth: int
    ways: Mapping[int, Way] = field(default_factory=dict)
    offloaded: int = 0
    again: float = 0.0
    freed: int | None = None

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether layers can be told apart, or Hugging Face's own code recomputes them all."""
        if layers_of(assembly.model) is not None:
            return Verdict(ok=True, because="each layer is recomputed in the context of its forward pass")
        if assembly.options.gradient_checkpointing in _SOURCES:  # type: ignore[union-attr]
            return Verdict(ok=False, because="the model has no list of layers of its own to choose from")
        if assembly.device.type != "cpu":
            because = "the model has no list of layers of its own, by which masks of dropout could be drawn again"
            return Verdict(ok=False, because=because)
        if getattr(assembly.model, "supports_gradient_checkpointing", False):
            return Verdict(ok=True, because="Hugging Face's own code recomputes its layers")
        return Verdict(ok=False, because="Hugging Face's own code cannot recompute this model's layers")

    @classmethod
    def choose(cls, assembly: Assembly) -> Checkpointing | None:
        """Take what was asked for; nothing unless it was."""
        if not assembly.training:
            return None
        options: TrainOptions = assembly.options  # type: ignore[assignment]
        asked, every = options.gradient_checkpointing, recomputed_every(options)
        if asked == "none" or options.stream_weights != "none":  # which computes every layer again
            return None
        layers, verdict = layers_of(assembly.model), cls.supports(assembly)
        if verdict.ok and layers is None and every is not None and every > 1:
            verdict = Verdict(ok=False, because="the model has no list of layers of its own")
        if not verdict.ok:
            hint = "leave it out, or lower --token-budget: a smaller micro-batch keeps less"
            raise OptionError(f"--gradient-checkpointing {asked} does not work here: {verdict.because}", hint=hint)
        depth = 1 if layers is None else len(layers)
        if every is None:
            return cls._by_bytes(assembly, asked, depth)
        numbers = tuple(range(every - 1, depth, every))
        if not numbers:
            raise OptionError(f"--gradient-checkpointing is {asked}, and the model has {depth} layers", hint="full")
        others = 0 if layers is None else sum(map(len, layer_lists(assembly.model))) - depth
        if len(numbers) > 1 and numbers[-1] == depth - 1 and not others:
            numbers = numbers[:-1]
        reason = f"asked for: {len(numbers)} of {depth} layers keep their input, and are computed again"
        if others:
            reason += f"; {others} other layers, such as a decoder's, keep all"
        ways = dict.fromkeys(numbers, Way.RECOMPUTED)
        return cls(value=asked, reason=reason, depth=depth, ways=ways, again=len(numbers) / depth)

    @classmethod
    def _by_bytes(cls, assembly: Assembly, asked: str, depth: int) -> Checkpointing:
        """Choose layers by what they were measured to keep."""
        tokens, found = assembly.lever(TokenBudget).tokens, assembly.fact(activations_of)
        budget = budget_bytes(assembly.options)  # type: ignore[arg-type]
        ways, numbers = dict[int, Way](), tuple[int, ...]()
        if asked == "selective":
            ways, left = kept_ways(found, tokens, budget)
        else:
            numbers, left = offloaded_layers(found, tokens, budget)
        if budget is not None and left > budget:
            raise OptionError(
                f"--activation-memory is {bytes_text(budget)}, and a micro-batch of {tokens:,} tokens keeps"
                f" {bytes_text(left)} at least",
                hint="give more, or lower --token-budget or --max-length",
            )
        if asked == "offload":
            warn_on_cpu(assembly, "--gradient-checkpointing offload")
        freed = round(found.bytes(tokens) - left)
        limit = "" if budget is None else f", of {bytes_text(budget)}"
        said = f"asked for: {bytes_text(left)} of activations a micro-batch of {tokens:,} tokens{limit}, measured;"
        if not ways and not numbers:
            said += " all of it is kept"
        elif asked == "selective":
            said += f" {bytes_text(freed)} less kept; {_ways_said(ways, depth)}"
        else:
            _check_host(freed)
            which = f"layer{'s' if len(numbers) > 1 else ''} {_numbered(numbers)} of {depth}"
            said += f" those of {which} are in host memory"
            _warn_of_the_link(assembly, freed, tokens * sum(layer.forward_s for layer in found.layers))
        whole_s = sum(layer.forward_s for layer in found.layers)
        again_s = sum(found.layers[number].again_s(way) for number, way in ways.items())
        return cls(
            value=asked,
            reason=said,
            depth=depth,
            ways=ways,
            offloaded=len(numbers),
            again=again_s / whole_s if whole_s else 0.0,
            freed=freed,
        )

    @property
    def recomputes(self) -> bool:
        """True where layers may run twice."""
        return self.value != "offload"

    def line(self) -> records.Lever:
        """Its line in the recipe, with the source of what was chosen."""
        return replace(super().line(), source=_SOURCES.get(self.value, self.source))

    def cost(self, work: StepWork) -> Cost:
        """Seconds of the forward passes of these layers once more; copies are taken to be hidden. What they keep is
        counted with the token budget, less what was measured to be freed."""
        forward_s = work.products_s(work.num_tokens) / work.passes
        return Cost(step_bytes=-(self.freed or 0), step_s=self.again * forward_s)

    def apply(self, assembly: Assembly) -> None:
        """Turn it on in these layers."""
        layers = layers_of(assembly.model)
        if layers is None:
            assembly.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=call_recomputed)
        elif self.value == "offload":
            sizes = [layer.kept + layer.input for layer in assembly.fact(activations_of).layers]
            offload(layers, self.offloaded, assembly.device, sizes)
        else:
            set_ways(list(layers), self.ways)


def seeds_dropout(assembly: Assembly) -> bool:
    """Return whether dropout of the model's own code must be drawn by its place in the pass."""
    found = assembly.find(Checkpointing)
    recomputes = streamed(assembly) or (found is not None and found.recomputes)
    return assembly.device.type == "cuda" and recomputes


def _ways_said(ways: dict[int, Way], depth: int) -> str:
    """Say what becomes of layers."""
    said = []
    for way, what in (
        (Way.REMADE, "activation functions' results made again"),
        (Way.RECOMPUTED, "computed again"),
        (Way.EMPTIED, "computed again from the input alone"),
    ):
        numbers = tuple(number for number, of in ways.items() if of is way)
        if numbers:
            said.append(f"{what}: layer{'s' if len(numbers) > 1 else ''} {_numbered(numbers)} of {depth}")
    return "; ".join(said)


def _numbered(numbers: tuple[int, ...]) -> str:
    """Layers as people count them: `1 to 4`, or `1, 3, 5`."""
    counted = [number + 1 for number in numbers]
    if len(counted) > 2 and counted == list(range(counted[0], counted[-1] + 1)):
        return f"{counted[0]} to {counted[-1]}"
    return ", ".join(map(str, counted))


def _warn_of_the_link(assembly: Assembly, num_bytes: int, forward_s: float) -> None:
    """Warn where copies take longer than the passes beside which they are made: a forward one, and a backward one of
    twice its seconds."""
    rate = host_link_bytes_per_s(assembly.device)
    if rate is None or not forward_s:
        return
    copy_s = num_bytes / rate
    times = (max(copy_s, forward_s) + max(copy_s, 2 * forward_s)) / (3 * forward_s)
    if times > _HIDDEN:
        assembly.warn(
            f"activations of {bytes_text(num_bytes)} take {copy_s:.2g} s each way by this machine's link, and the"
            f" layers {forward_s:.2g} s forward: a step will take about {times:.1f} times as long;"
            " --gradient-checkpointing full or selective computes again instead, and --activation-memory leaves more on"
            " the device"
        )


def _check_host(num_bytes: int) -> None:
    """Check that activations fit in host memory. Raises: OptionError."""
    free = free_host_bytes()
    if free is not None and num_bytes > _HOST_SHARE * free:
        raise OptionError(
            f"--gradient-checkpointing offload needs {bytes_text(num_bytes)} of host memory, and {bytes_text(free)} are"
            " free",
            hint="lower --token-budget, or recompute: --gradient-checkpointing full",
        )
