"""Gradient checkpointing: layers whose activations are computed again in the backward pass instead of being kept.

A layer keeps its input alone and runs forward once more: a third of its products again. Gradients are the same bit for
bit, with dropout on: masks are drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.core.options import TrainOptions
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.models.model_stats import layers_of
from brimful.models.packed.recompute import call_recomputed, recompute


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Lever):
    """The layers that are recomputed, by number, of `depth` layers; all there are in a model without a list of them."""

    name = "gradient_checkpointing"
    source = "Chen et al. 2016, arXiv 1604.06174"
    layers: tuple[int, ...]
    depth: int

    @property
    def share(self) -> float:
        """Share of the layers that are recomputed."""
        return len(self.layers) / self.depth

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether layers can be told apart, or Hugging Face's own code recomputes them all."""
        if layers_of(assembly.model) is not None:
            return Verdict(ok=True, because="each layer is recomputed in the context of its forward pass")
        if assembly.device.type != "cpu":
            because = "the model has no list of layers of its own, by which masks of dropout could be drawn again"
            return Verdict(ok=False, because=because)
        if getattr(assembly.model, "supports_gradient_checkpointing", False):
            return Verdict(ok=True, because="Hugging Face's own code recomputes its layers")
        return Verdict(ok=False, because="Hugging Face's own code cannot recompute this model's layers")

    @classmethod
    def choose(cls, assembly: Assembly) -> Checkpointing | None:
        """Recompute what was asked for; nothing unless it was."""
        if not assembly.training:
            return None
        every = recomputed_every(assembly.options)  # type: ignore[arg-type]
        if every is None:
            return None
        layers, verdict = layers_of(assembly.model), cls.supports(assembly)
        asked: str = assembly.options.gradient_checkpointing  # type: ignore[union-attr]
        if verdict.ok and layers is None and every > 1:
            verdict = Verdict(ok=False, because="the model has no list of layers of its own")
        if not verdict.ok:
            hint = "leave it out, or lower --token-budget: a smaller micro-batch keeps less"
            raise OptionError(f"--gradient-checkpointing {asked} does not work here: {verdict.because}", hint=hint)
        depth = 1 if layers is None else len(layers)
        numbers = tuple(range(every - 1, depth, every))
        if not numbers:
            raise OptionError(f"--gradient-checkpointing is {asked}, and the model has {depth} layers", hint="full")
        reason = f"asked for: {len(numbers)} of {depth} layers keep their input alone, and are computed again"
        return cls(value=asked, reason=reason, layers=numbers, depth=depth)

    def cost(self, work: StepWork) -> Cost:
        """Seconds of the forward passes of these layers once more. What they keep is counted with the token budget."""
        return Cost(step_s=self.share * work.products_s(work.num_tokens) / work.passes)

    def apply(self, assembly: Assembly) -> None:
        """Turn it on in these layers."""
        layers = layers_of(assembly.model)
        if layers is None:
            assembly.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=call_recomputed)
            return
        recompute(list(layers), self.layers)


def recomputed_every(options: TrainOptions) -> int | None:
    """Return the distance of recomputed layers from one another, None where none is recomputed."""
    asked = options.gradient_checkpointing
    if asked == "none":
        return None
    return 1 if asked == "full" else int(asked.removeprefix("every-"))


def seeds_dropout(assembly: Assembly) -> bool:
    """Return whether dropout of the model's own code must be drawn by its place in the pass."""
    return assembly.device.type == "cuda" and assembly.find(Checkpointing) is not None
