"""The part of a model that is trained: an adapter of peft and the head, or all but frozen weights.

An adapter is put into the model before anything is chosen or checked: the equivalence check, the token budgets, the
graphs and the update are those of the model with it. Our fused kernels cover layers with LoRA without dropout; torch's
compiler, or the graphs of a step, take those with other adapters as they are.

Frozen weights are read and never written: those of Linear layers are kept in the precision of products alone, cast
once, where autocast would cast fp32 ones in every step. What is saved of them is what the model's files hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.records import Arithmetic
from brimful.core.trained_part import HEAD_ALONE, FrozenParts
from brimful.core.units import count_text
from brimful.levers.facts import equivalence_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.models.half_weights import halve_linears
from brimful.models.hub.adapters import add_adapter, check_merges, make_config
from brimful.models.hub.inspection import head_parameters
from brimful.models.model_stats import layers_of, linear_parameters

#: Names of norms that stand beside tables of embeddings, not in one module with them.
_NORM_OF_EMBEDDINGS = re.compile(r"norm\w*emb|emb\w*norm")


@dataclass(frozen=True, kw_only=True)
class TrainedPart(Lever):
    """The weights that are trained, of all. adapter: whether they are those of an adapter and the head."""

    name = "trained_weights"
    source = "Hu et al. 2021, arXiv 2106.09685; the peft library"
    trained: int
    adapter: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        """`training`: fewer weights learn."""
        return "training"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether a part of a model may be chosen here: of one that learns."""
        return Verdict(ok=assembly.training, because="weights are chosen for training")

    @classmethod
    def choose(cls, assembly: Assembly) -> TrainedPart | None:
        """Train the part that was asked for; None for all of the model."""
        if not cls.supports(assembly).ok:
            return None
        options: TrainOptions = assembly.options  # type: ignore[assignment]
        if options.peft is None and options.freeze is None:
            return None
        num_before = sum(p.numel() for p in assembly.model.parameters())
        assembly.adapter = choose_part(
            assembly.model, options, new_parameters=assembly.new_parameters, base=assembly.base_name
        )
        trained = sum(p.numel() for p in assembly.model.parameters() if p.requires_grad)
        share = f"asked for: {count_text(trained)} of {count_text(num_before)} weights are trained"
        if assembly.adapter is None:
            alone = FrozenParts.parse(options.freeze or "").all_but_head
            value = HEAD_ALONE if alone else f"all but {options.freeze}"
            return cls(value=value, reason=share, trained=trained)
        config = assembly.adapter.peft_config["default"]
        return cls(value=describe(options.peft or "", config), reason=share, trained=trained, adapter=True)

    def cost(self, work: StepWork) -> Cost:
        """Nothing of its own: fewer gradients, states and products are counted where these are."""
        return Cost()

    def apply(self, assembly: Assembly) -> None:
        """Nothing is left to do: all that is chosen after it is chosen for the model with its adapter."""


@dataclass(frozen=True, kw_only=True)
class FrozenWeights(Lever):
    """Linear weights that are not trained, kept in the precision of products alone."""

    name = "frozen_weights"
    source = "Micikevicius et al. 2018, arXiv 1710.03740; torch.amp casts them in every step"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether there are any, and the model computes the same with them."""
        if not assembly.training or not assembly.weights_on_disk or assembly.precision.half is None:
            return Verdict(ok=False, because="for half-precision training of a model that can be read again")
        linear = linear_parameters(assembly.model)
        if not any(id(p) in linear and not p.requires_grad for p in assembly.model.parameters()):
            return Verdict(ok=False, because="no Linear weight is frozen")
        equivalence = assembly.fact(equivalence_of)
        if not (assembly.packing_wanted and equivalence.packed and equivalence.half_weights):
            return Verdict(ok=False, because="the model was not shown to compute the same with them")
        return Verdict(ok=True, because="cast once, to what each product would cast them to")

    @classmethod
    def choose(cls, assembly: Assembly) -> FrozenWeights | None:
        """Halve wherever that works."""
        verdict, kept_in = cls.supports(assembly), "fp16" if assembly.precision.value == "fp16" else "bf16"
        return cls(value=kept_in, reason=verdict.because) if verdict.ok else None

    def cost(self, work: StepWork) -> Cost:
        """Half the bytes of these weights, and neither their casts nor the seconds of these."""
        frozen = work.linear_parameters - work.trained_linear
        return Cost(resident_bytes=-2 * frozen, step_bytes=-2 * frozen, step_s=-3 * 2 * frozen / work.bytes_per_s)

    def apply(self, assembly: Assembly) -> None:
        """Halve them where the model lies, before it is moved to its device: there is never room for both."""
        halve_linears(assembly.model, assembly.precision.dtype)


def choose_part(model: Any, options: TrainOptions, *, new_parameters: Collection[str], base: str) -> Any:
    """Put the adapter that was asked for into `model`, or freeze what was asked for. Return peft's wrapper, or None.

    Raises: OptionError for parts that the model does not have, and for an adapter that does not work on it.
    """
    if options.peft is not None:
        head, config = tuple(head_parameters(model)), make_config(options)
        wrapped = add_adapter(model, config, head=head, new_parameters=new_parameters, base=base, seed=options.seed)
        if options.merge:
            check_merges(wrapped)
        return wrapped
    if options.freeze is not None:
        frozen = frozen_names(model, FrozenParts.parse(options.freeze), new_parameters)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    return None


def describe(asked: str, config: Any) -> str:
    """An adapter in a few words: its method, and the settings by which it is known."""
    method = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    said = [asked.lower() if asked.lower() in ("dora", "rslora") else method]
    said += [f"{name}={getattr(config, name)}" for name in ("r", "lora_alpha", "lora_dropout") if hasattr(config, name)]
    targets = getattr(config, "target_modules", None)
    if targets:
        said.append(f"on {targets if isinstance(targets, str) else ', '.join(sorted(targets))}")
    return " ".join(said)


def frozen_names(model: Any, parts: FrozenParts, new_parameters: Collection[str] = ()) -> set[str]:
    """Names of the parameters of these parts.

    new_parameters: those that the model's files do not hold, which `all-but-head` trains with the head.
    Raises: OptionError for a part that the model does not have, and where nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    if parts.all_but_head:
        frozen |= set(names) - set(head_parameters(model)) - set(new_parameters)
    if parts.embeddings:
        frozen |= _named(model, _embeddings(model), "embeddings")
    if parts.layers:
        layers = _layers(model)
        parts.check_layers(len(layers))
        for first, last in parts.layers:
            frozen |= _named(model, layers[first : last + 1], f"layers {first}-{last}")
    if parts.pattern is not None:
        frozen |= {name for name in names if re.search(parts.pattern, name)}
        if not frozen:
            raise OptionError(
                f"--freeze: no parameter's name has regex:{parts.pattern}", hint=f"they are called as {names[0]}"
            )
    if frozen >= set(names):
        raise OptionError("--freeze leaves nothing to train", hint="all-but-head trains the head alone")
    return frozen


def _named(model: nn.Module, modules: Collection[nn.Module], part: str) -> set[str]:
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    if not ids:
        raise OptionError(f"--freeze: this model has no {part}", hint="name its parameters, as in regex:PATTERN")
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def _layers(model: Any) -> list[nn.Module]:
    layers = layers_of(model)
    if layers is None:
        said = "--freeze: this model has no list of layers of its own"
        raise OptionError(said, hint="name parameters, as in regex:PATTERN")
    return list(layers)


def _embeddings(model: Any) -> list[nn.Module]:
    """Modules of the base model beside its layers that have tables of embeddings, with the norms after these."""
    base = model.base_model
    return list(_beside_layers(getattr(base, "language_model", None) or getattr(base, "text_model", None) or base))


def _beside_layers(part: nn.Module) -> Iterator[nn.Module]:
    """Those of one part of a model, and of the models within it, as an encoder and a decoder with positions each."""
    for name, child in part.named_children():
        if any(isinstance(module, nn.ModuleList) for module in child.modules()):
            if isinstance(child, PreTrainedModel):
                yield from _beside_layers(child)
        elif any(isinstance(module, nn.Embedding) for module in child.modules()) or _NORM_OF_EMBEDDINGS.search(name):
            yield child
