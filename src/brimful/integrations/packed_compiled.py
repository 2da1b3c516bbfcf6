"""Layers of a packed model on fused kernels: when they are compiled, and the comparison that they pass first.

One launch of ours stands for ten of a layer's own code, so a loop that waits for its host's launches goes on sooner.
Compiled layers run in packed training calls alone. Before the first of these, the layers as they are and the compiled
ones compute the logits and the gradient of that very call, dropout off; where they differ, or anything fails, nothing
stays compiled, and a warning says so once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

from brimful.core.errors import printable
from brimful.core.tolerances import TOLERANCES
from brimful.hardware.memory import is_out_of_memory, release_unused
from brimful.hardware.process_settings import unchanged_random_streams
from brimful.integrations.packed_execution import PackedExecution
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layout import PackedInputs
from brimful.levers.execution import COMPILE_S, has_own_parameters
from brimful.levers.facts import choose_kernels
from brimful.models.model_stats import embeddings_of, layers_of
from brimful.models.packed.equivalence import gradients_of, relative_error
from brimful.models.packed.layer_calls import compiled_modules, leave_uncompiled, remove_calls
from brimful.models.packed.training_check import without_dropout
from brimful.step.precision import Precision

#: Whether layers are compiled: at once, never, or when calls have taken as long as compiling is expected to.
Compiled = bool | Literal["auto"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CompiledLayers:
    """Compiled layers of one model, if it has or will have them.

    asked: as of `brimful.packed`. say: called with each reason that layers run uncompiled for.
    """

    def __init__(self, asked: Compiled, say: Callable[[str], None]) -> None:
        self.asked, self._say = asked, say
        self._spent_s = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin anew, with layers that are not compiled."""
        self._execution: PackedExecution | None = None
        self._refused = False
        self._equal: set[tuple[str, str]] = set()
        self._in_layers = self._in_embeddings = _Watch(())

    @property
    def compiled(self) -> bool:
        """True if training calls run compiled layers."""
        return self._execution is not None

    @property
    def counts(self) -> bool:
        """True while seconds of training calls decide when to compile."""
        return self.asked == "auto" and not self._refused and self._execution is None

    def spent(self, seconds: float) -> None:
        """Hear of the wall time of a packed training call on a GPU."""
        self._spent_s += seconds

    def outputs(
        self, plain: PackedExecution, row: PackedInputs, positions_T: Tensor | None, arguments: dict[str, Any],
        precision: Precision,
    ) -> Any:  # fmt: skip
        """Return what the model's own forward returns, by compiled layers where they are to be used.

        plain: the execution with layers as they are. row, positions_T, arguments: as of `PackedExecution.outputs`.
        """
        chosen = self._chosen(plain, row, positions_T, precision)
        if chosen is not None:
            try:
                return chosen.outputs(row, positions_T, arguments, precision.context())
            except TorchDynamoException as failure:  # a form of the layers that this call is the first to need
                self._refuse(plain.model, _said(failure))
        return plain.outputs(row, positions_T, arguments, ForwardContext(compiled=False))

    def _chosen(
        self, plain: PackedExecution, row: PackedInputs, positions_T: Tensor | None, precision: Precision
    ) -> PackedExecution | None:
        """The execution with compiled layers, if this call is for it."""
        if not self._wanted(plain.model, precision.device):
            return None
        key = (str(precision.device), precision.value)
        self._leave_hooked_embeddings(plain.model)
        if key not in self._equal:
            why, quiet = self._compared(plain, row, positions_T, precision)
            if why is not None:
                self._refuse(plain.model, why, quiet=quiet and self.asked == "auto")
                return None
            self._equal.add(key)
        found = self._execution
        if found is None or _whole(found) != _whole(plain) or self._in_layers.finds_any:
            return None
        return found

    def _wanted(self, model: Any, device: torch.device) -> bool:
        if self.asked is False or self._refused or not (model.training and torch.is_grad_enabled()):
            return False
        if self._execution is not None or self.asked is True:
            return True
        # Masks of compiled layers are others, and it is wall time that says when they begin.
        waits = self._spent_s < COMPILE_S or torch.are_deterministic_algorithms_enabled()
        return device.type == "cuda" and not waits

    def _compared(
        self, plain: PackedExecution, row: PackedInputs, positions_T: Tensor | None, precision: Precision
    ) -> tuple[str | None, bool]:
        """Compile what is not yet, and hold it to the layers as they are. Return the reason against it, if there is
        one, and whether layers like these are never compiled: then nothing went wrong."""
        unfused: list[str] = []
        try:
            if self._execution is None:
                if (why := _why_not(plain.model, precision, row.segments.typical_length)) is not None:
                    return why, True
                plain.attend(None)  # what a new one finds is the model's own
                with plain.model._as_it_was():
                    found = PackedExecution(plain.model, plain.form)
                found.compile(note=unfused.append, otherwise=partial(_as_it_is, unfused))
                self._execution = found
                embeddings = embeddings_of(found.model)
                self._in_layers = _Watch(layers_of(found.model) or ())
                self._in_embeddings = _Watch(() if embeddings is None else (embeddings,))
                self._leave_hooked_embeddings(found.model)
            if self._in_layers.finds_any:
                return "modules in its layers have hooks or another forward, which fused kernels would pass over", True
            why = _difference(plain, self._execution, row, positions_T, precision)
        except Exception as failure:  # whatever the compiler or the comparison cannot do, the layers run without it
            if is_out_of_memory(failure):
                release_unused(precision.device)
            return _said(failure), False
        return (unfused[0], True) if unfused else (why, False)

    def _leave_hooked_embeddings(self, model: Any) -> None:
        """Have embeddings run as they are from now on if they have hooks, as checkpointing by transformers sets."""
        if self._in_embeddings.finds_any:
            self._in_embeddings = _Watch(())
            self._equal.clear()
            leave_uncompiled(embeddings_of(model))

    def _refuse(self, model: Any, reason: str, *, quiet: bool = False) -> None:
        remove_calls(model)
        self.forget()
        self._refused = True
        if not quiet:
            self._say(reason)


class _Watch:
    """Places where code of others would be that is to run within modules: compilers do not look for it again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = [module for each in modules for module in each.modules()]
        self._names = [vars(module) for module in inner]
        self._hooks = [getattr(module, name) for module in inner for name in _HOOKS]

    @property
    def finds_any(self) -> bool:
        """True if there is a hook, or another forward than the class's."""
        return any(self._hooks) or any("forward" in names for names in self._names)


def _whole(execution: PackedExecution) -> Any:
    return replace(execution.form, short=False)


def _said(failure: Exception) -> str:
    return f"compiling layers ended in {type(failure).__name__}: {printable(failure)}"


def _as_it_is(unfused: list[str], graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Backend of torch.compile for layers that fused kernels do not cover. It outlives the model, and knows nothing of
    it."""
    unfused.append("fused kernels do not cover its layers")
    return graph


def _why_not(model: Any, precision: Precision, typical_length: int | None) -> str | None:
    """The reason that layers of this model are not tried; None if they are."""
    layers = layers_of(model)
    if not choose_kernels(model.config, precision, typical_length or 1).fused:
        if precision.device.type != "cuda":
            return f"fused kernels are for GPUs, and this runs on {precision.device.type}"
        return "its attention is by a kernel that layers cannot be fused around"
    if layers is None or not has_own_parameters(layers):
        return "it has no list of layers with parameters of their own"
    if compiled_modules(model):
        return "its modules are compiled already"
    if any("FSDP" in type(module).__name__ or "FullySharded" in type(module).__name__ for module in model.modules()):
        return "its weights are in parts of several processes"
    if any(parameter._backward_hooks for parameter in model.parameters()):
        return "its parameters have hooks, which the comparison would call"
    return None


def _difference(
    plain: PackedExecution, compiled: PackedExecution, row: PackedInputs, positions_T: Tensor | None,
    precision: Precision,
) -> str | None:  # fmt: skip
    """Difference of compiled layers to the layers as they are, in words; None if it is within the tolerance."""
    model, device, tolerance = plain.model, precision.device, TOLERANCES[precision.value]

    def passed(execution: PackedExecution, context: ForwardContext, but: Sequence[nn.Module]) -> Any:
        with unchanged_random_streams([device] if device.type == "cuda" else []), without_dropout(model, but=but):
            logits = execution.outputs(row, positions_T, {}, context).logits
            return logits.detach(), gradients_of(model, logits)

    expected, wanted = passed(plain, ForwardContext(compiled=False), ())
    found, gradient = passed(compiled, replace(precision.context(), keeps_all=True), compiled_modules(model))
    if not (error := relative_error(found, expected)) <= tolerance.logits:
        return f"compiled layers gave logits that are off by {error:.1e}"
    if not (error := _error_of_all(gradient, wanted)) <= tolerance.gradient:
        return f"compiled layers gave a gradient that is off by {error:.1e}"
    return None


def _error_of_all(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """`relative_error` of all parameters together, one at a time in memory."""
    off = torch.stack([(one - other).norm() for one, other in zip(found, expected, strict=True)])
    return float(off.norm() / torch.stack([each.norm() for each in expected]).norm().clamp_min(1e-30))
