"""Parts of a loop's step: its model and optimizer without their wrappers, the outcome of a call, a state to save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from brimful.core.errors import OptionError, listed, printable
from brimful.core.options.choices import PrecisionChoice
from brimful.core.records import LabelSpace
from brimful.integrations.packed import WRAPPERS, packing_of
from brimful.integrations.replaced_parts import replaced_part
from brimful.models.hub.adapters import unwrapped
from brimful.step.state import Counters, ParameterState, StepState
from brimful.step.step import Outcome, Pending

#: Accelerate's names of mixed precision, and ours.
_MIXED: Mapping[str, PrecisionChoice] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
#: Weights of the labels in their order, or by name.
ClassWeights: TypeAlias = Mapping[str, float] | Sequence[float] | np.ndarray | torch.Tensor


def class_weights_C(given: ClassWeights | None, space: LabelSpace) -> np.ndarray | None:
    """(C,) fp32 weights of labels; 1 for those that are not named. Raises: OptionError."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in space.names]:
            said = f"class_weights has {printable(unknown[0])!r}, which is no label of the model"
            raise OptionError(said, hint="its labels are " + listed([printable(name) for name in space.names], 20))
        given = [given.get(name, 1.0) for name in space.names]
    try:
        numbers = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
        weights: np.ndarray = np.asarray(numbers, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise OptionError(f"class_weights is {printable(given)[:80]}", hint="give a number for each label") from error
    if weights.shape != (space.num_outputs,):
        said = f"class_weights has the shape {tuple(weights.shape)}, and the model {space.num_outputs} labels"
        raise OptionError(said, hint="give a number for each label, in the model's order")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise OptionError("class_weights has numbers that are no weights", hint="give numbers of at least 0")
    return weights


@dataclass(frozen=True)
class Unwrapped:
    """A model without wrappers that are no part of it.

    given: what the owner gave. model: the classifier in it. attributes: a forward that Accelerate put in the place of
    the model's own, and others. pack: packs it again, where `brimful.packed` was called on it.
    """

    given: Any
    model: Any
    attributes: Mapping[str, Any]
    pack: Callable[[Any], Any] | None

    @classmethod
    def of(cls, given: Any) -> Unwrapped:
        """Take the wrappers off.

        Raises: OptionError for one that several processes or a compiler need, and for a loss or forward of the owner's.
        """
        kind = type(given).__name__
        if hasattr(given, "_orig_mod") or kind in WRAPPERS:
            raise OptionError(
                f"the model is wrapped in {kind}, and a step runs one process's own model",
                hint="pass the model itself; a step compiles and captures by itself",
            )
        if (replaced := replaced_part(given)) is not None:
            raise OptionError(
                f"{replaced}, and a step runs those of transformers",
                hint="brimful.packed(model) keeps your loop, and a loss of your own",
            )
        model = unwrapped(given)
        if (pack := packing_of(model)) is not None:
            model.unpacked()
        attributes = {name: vars(model).pop(name) for name in ("forward", "_original_forward") if name in vars(model)}
        return cls(given=given, model=model, attributes=attributes, pack=pack)

    def restored(self) -> Any:
        """The model with its wrappers again."""
        for name in self.attributes:  # where a step between its passes has put them back
            vars(self.model).pop(name, None)
        if self.pack is not None:
            self.pack(self.model)
        vars(self.model).update(self.attributes)
        return self.given


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer that Accelerate prepared, or the one given. Raises: OptionError for what is none."""
    inner = getattr(optimizer, "optimizer", None) if _is_accelerated(optimizer) else optimizer
    if inner is not None and not isinstance(inner, torch.optim.Optimizer):
        raise OptionError(
            f"the optimizer is a {type(inner).__name__}", hint="pass a torch.optim.Optimizer, or a name of `optim`"
        )
    return inner


def asked_precision(asked: PrecisionChoice, optimizer: Any) -> PrecisionChoice:
    """The precision that was asked for; where none was, that of the Accelerator that prepared the optimizer."""
    if asked != "auto" or not _is_accelerated(optimizer):
        return asked
    return _MIXED.get(str(optimizer.accelerator_state.mixed_precision), asked)


def _is_accelerated(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "accelerator_state")


class StepOutcome:
    """Result of one call of a step. updated: whether it made an optimizer step.

    Other attributes are those of `Outcome`; reading one waits for the device. Without an update they are None.
    """

    def __init__(self, pending: Pending | None) -> None:
        self._pending, self._read = pending, cast(Outcome | None, None)
        self.updated = pending is not None

    def read(self) -> Outcome | None:
        """Wait for the outcome; None without an update."""
        if self._read is None and self._pending is not None:
            self._read, self._pending = self._pending.read(), None
        return self._read

    def _field(self, name: str) -> Any:
        outcome = self.read()
        return None if outcome is None else getattr(outcome, name)

    @property
    def loss(self) -> float | None:
        """Mean over all rows of the update."""
        return cast("float | None", self._field("loss"))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping."""
        return cast("float | None", self._field("grad_norm"))

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the first group."""
        return cast("float | None", self._field("learning_rate"))

    @property
    def applied(self) -> bool | None:
        """False where the update was skipped: its loss or gradient was not finite."""
        return cast("bool | None", self._field("applied"))


def frozen_weights(model: Any, names: Container[str]) -> dict[str, torch.Tensor]:
    """Those of the weights of these names that are frozen."""
    frozen = ((name, p.detach()) for name, p in model.named_parameters() if not p.requires_grad)
    return {name: weight for name, weight in frozen if name in names}


def readable_state(state: StepState) -> dict[str, Any]:
    """A state as plain dictionaries of its tensors as they are."""
    optimizer = {
        name: {"tensors": dict(each.tensors), "values": dict(each.values), "on_host": list(each.on_host)}
        for name, each in state.optimizer.items()
    }
    return {
        "weights": dict(state.weights),
        "buffers": dict(state.buffers),
        "optimizer": optimizer,
        "groups": [dict(group) for group in state.groups],
        "counters": dataclasses.asdict(state.counters),
    }


def state_of(state: Mapping[str, Any]) -> StepState:
    """The state of `readable_state`. Raises: OptionError for another dictionary."""
    try:
        optimizer = {
            name: ParameterState(tensors=each["tensors"], values=each["values"], on_host=tuple(each["on_host"]))
            for name, each in state["optimizer"].items()
        }
        counters = Counters(**{**state["counters"], "used": tuple(state["counters"]["used"])})
        return StepState(
            weights=state["weights"],
            buffers=state["buffers"],
            optimizer=optimizer,
            groups=tuple(state["groups"]),
            counters=counters,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError("this is not the state of a step", hint="load what state_dict() returned") from error
