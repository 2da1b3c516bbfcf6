"""The protocol of levers. Each says where it works, what it costs, what it does and why it was chosen.

`Assembly` walks them. A new lever is a file with a subclass of `Lever`, named once in `engine.assemble`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from brimful.core import records
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.train import TrainOptions
from brimful.core.records import Arithmetic
from brimful.data.batches.batch import Layout
from brimful.hardware.ranks import ALONE, Ranks
from brimful.models.model_stats import Attention, attention_of, linear_parameters, matrices, token_matrices
from brimful.models.packed.packed_forward import LayoutModel
from brimful.step.precision import Precision
from brimful.step.updates.given_adamw import OwnersAdamW
from brimful.step.updates.update import Update

Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Answer to whether a lever works here, with the reason."""

    ok: bool
    because: str


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One training step of a model in numbers, or one forward pass, and what its device reaches.

    lengths_N: tokens of each sequence. linear_parameters: those that autocast casts, trained_linear_parameters:
    those of them that are trained, None for all. token_matrices: how many matrices
    of each shape every token is multiplied with. flops_per_s: of products. bytes_per_s: of memory.
    """

    lengths_N: np.ndarray
    num_parameters: int
    num_trained: int
    linear_parameters: int
    token_matrices: Counter[Shape]
    attention: Attention | None
    width: int
    depth: int
    flops_per_s: float
    bytes_per_s: float
    trained_linear_parameters: int | None = None

    @classmethod
    def of(cls, model: Any, lengths_N: np.ndarray, *, flops_per_s: float, bytes_per_s: float) -> StepWork:
        """Count what `model` does to sequences of these lengths; without trained parameters it is a forward pass."""
        parameters, linear = list(model.parameters()), linear_parameters(model)
        return cls(
            lengths_N=lengths_N,
            num_parameters=sum(p.numel() for p in parameters),
            num_trained=sum(p.numel() for p in parameters if p.requires_grad),
            linear_parameters=sum(p.numel() for p in parameters if id(p) in linear),
            token_matrices=token_matrices(model) or matrices(model),
            attention=attention_of(model),
            width=getattr(model.config, "hidden_size", None) or 0,
            depth=getattr(model.config, "num_hidden_layers", None) or 0,
            flops_per_s=flops_per_s,
            bytes_per_s=bytes_per_s,
            trained_linear_parameters=sum(p.numel() for p in parameters if id(p) in linear and p.requires_grad),
        )

    @property
    def trained_linear(self) -> int:
        """Parameters of Linear layers that are trained."""
        known = self.trained_linear_parameters
        return self.linear_parameters if known is None else known

    @property
    def passes(self) -> float:
        """Passes worth one forward pass: a backward pass is two, of which one is for gradients of trained weights."""
        if not self.num_trained:
            return 1
        return 2 + self.trained_linear / max(1, self.linear_parameters)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return int(self.lengths_N.sum())

    def products_s(self, num_tokens: int) -> float:
        """Seconds of the products of so many tokens with the model's matrices."""
        each = sum(count * rows * columns for (rows, columns), count in self.token_matrices.items())
        return 2 * self.passes * num_tokens * each / self.flops_per_s


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes and seconds of a lever; negative where it saves what another lever counts.

    Seconds are estimates, from operations and bytes and what the device was measured to reach, but for fp8 products,
    which are timed on the run's device. Bytes of weights, gradients and optimizer states are counted, those of
    activations estimated.

    resident_bytes: on the device for as long as the run lasts. step_bytes: besides, for the length of one step.
    step_s: of one step.
    """

    resident_bytes: int = 0
    step_bytes: int = 0
    step_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            resident_bytes=self.resident_bytes + other.resident_bytes,
            step_bytes=self.step_bytes + other.step_bytes,
            step_s=self.step_s + other.step_s,
        )


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A lever as it was chosen for one model, device and workload.

    name: of its line in the recipe. source: of the method and its figures. value: what was chosen. reason: why.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    value: str
    reason: str

    @property
    def arithmetic(self) -> Arithmetic:
        """Effect on results: `exact` is equal up to the order of sums."""
        return "exact"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether it works here: wherever a lever has no conditions of its own."""
        return Verdict(ok=True, because="it runs everywhere")

    @classmethod
    def choose(cls, assembly: Assembly) -> Self | None:
        """Choose its value: what was asked for, else the best that is supported. None where it has no place at all.

        Raises: OptionError for what was asked for and is not supported.
        """
        raise NotImplementedError

    def cost(self, work: StepWork) -> Cost:
        """Return what it adds to one step, or pass, of `work`."""
        raise NotImplementedError

    def apply(self, assembly: Assembly) -> None:
        """Make what was chosen of the model and the parts around it."""
        raise NotImplementedError

    def line(self) -> records.Lever:
        """Its line in the recipe."""
        return records.Lever(
            name=self.name, value=self.value, arithmetic=self.arithmetic, reason=self.reason, source=self.source
        )


L = TypeVar("L", bound=Lever)
T = TypeVar("T")


@dataclass(kw_only=True)
class Assembly:
    """A loaded model on its way to running: facts that levers are chosen by, and what levers made so far.

    max_length: most tokens of a sequence. typical_length: mean length of the sequences to come, by which kernels are
    chosen. num_tokens: of the whole run, about. batches: lengths of the sequences of batches as they will come, given
    the most tokens of a micro-batch. schedule: (steps + 1,) learning rate by applied steps, None for a model that is
    only read. cache: whether an equivalence check of the same architecture holds for it too. shaped_length: longest
    sequence that shapes are chosen for, None for max_length: of texts to read, the rare longer one has its own.

    eager_attention: whether padded rows must have it, where torch's fused one computes something else.
    packing_refused: whether packed answers were not those of the plain model. attention: the kernel of packed rows that
    the first process found the fastest, "" where it timed none; None to time them here. new_parameters: names of the
    base model's that were drawn when it was loaded. base_name: by which an adapter finds its model. weights_on_disk:
    whether all else can be read again. adapter: peft's wrapper around the model, if any.

    optimizer: the owner's, in `OwnersAdamW` to update as it does by our kernels, or `elsewhere` for gradients alone;
    None for the one that the options name.
    ranks: processes that take each step together.

    precision: asked for, later with its fp8 products. budget: most tokens of a micro-batch.
    """

    options: TrainOptions | ClassifyOptions
    model: Any
    precision: Precision
    max_length: int
    typical_length: int
    num_tokens: int
    batches: Callable[[int], Sequence[np.ndarray]]
    schedule: Tensor | None
    warn: Callable[[str], None]
    cache: bool = True
    eager_attention: bool = False
    packing_refused: bool = False
    attention: str | None = None
    shaped_length: int | None = None
    new_parameters: Sequence[str] = ()
    base_name: str = ""
    weights_on_disk: bool = False
    adapter: Any = None
    optimizer: TorchOptimizer | OwnersAdamW | Literal["elsewhere"] | None = None
    ranks: Ranks = ALONE
    execution: LayoutModel | None = None
    layout: Layout | None = None
    budget: int = 0
    update: Update | None = None
    seed: int = 0
    levers: dict[type[Lever], Lever | None] = field(default_factory=dict)
    facts: dict[Callable[[Assembly], Any], Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device that the model is to run on."""
        return self.precision.device

    @property
    def num_ranks(self) -> int:
        """Number of processes that take each step together."""
        return self.ranks.count

    @property
    def usual_length(self) -> int:
        """Longest sequence that shapes are chosen for."""
        return self.shaped_length or self.max_length

    @property
    def packing_wanted(self) -> bool:
        """True if sequences may run packed."""
        return self.options.packing == "auto"

    @property
    def training(self) -> bool:
        """True for a model that learns."""
        return self.schedule is not None

    def fact(self, find: Callable[[Assembly], T]) -> T:
        """Return what `find` finds of this assembly, found once: what is measured or checked on its model."""
        if find not in self.facts:
            self.facts[find] = find(self)
        return self.facts[find]  # type: ignore[no-any-return]

    def find(self, kind: type[L]) -> L | None:
        """Return the lever of a kind, chosen and applied by the first that asks for it."""
        if kind not in self.levers:
            chosen = self.levers[kind] = kind.choose(self)
            if chosen is not None:
                chosen.apply(self)
        return self.levers[kind]  # type: ignore[return-value]

    def lever(self, kind: type[L]) -> L:
        """`find`, of a lever that every run has."""
        found = self.find(kind)
        assert found is not None
        return found

    def drop(self, lever: Lever) -> None:
        """Leave out a lever that turned out not to work when it was applied."""
        self.levers[type(lever)] = None

    def recipe(self, kinds: Sequence[type[Lever]], device: str) -> records.Recipe:
        """Walk the levers: choose and apply each, and write down its line."""
        chosen = [self.find(kind) for kind in kinds]
        return records.Recipe(device=device, levers=tuple(lever.line() for lever in chosen if lever is not None))
