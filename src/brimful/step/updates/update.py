"""From gradients to weights: clipping, the optimizer where all is finite, the schedule and the loss scale.

Everything that is decided by lives on the device: the host launches an update without knowing what comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from brimful.hardware.capture import is_capturing
from brimful.hardware.ranks import Ranks
from brimful.kernels.side_stream import SideStream
from brimful.measurement.memory import Kept
from brimful.step.reduce.buckets import GradientArena
from brimful.step.reduce.reduction import Reduction
from brimful.step.state import Counters, ParameterState, StepState

#: torch.amp.GradScaler's own constants.
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


class Graphs(Protocol):
    """Computations by key, recorded once and replayed from then on, as `step.graphs.cache.GraphCache` keeps them."""

    def meet(self, shapes: Iterable[Hashable]) -> bool:
        """Remember shapes, or other keys; return whether all were met before."""
        ...

    def find(self, key: Hashable, compute: Callable[[Any], Any]) -> Any:
        """Return the graph of a key, which has `replay`, recorded if there is none yet; None if there can be none."""
        ...

    def clear(self) -> None:
        """Drop all graphs: what they read is replaced."""
        ...

    def stop(self, because: str | None = None) -> None:
        """Record nothing from now on, and note why."""
        ...


class Update:
    """An optimizer over a model's trained parameters, with all that a step does around it.

    schedule: (steps + 1,) fp32 learning rate by applied steps; the last one holds for any step beyond. max_grad_norm:
    0 for no clipping. scaled: whether gradients are of the loss times a scale that follows overflows. device: that
    updates are made on, where not all parameters are there.
    loss: () addends of the effective batch's loss so far. applied, scale, growth: () counters that training keeps.
    committed: set by `apply` once all memory that it needs is its own, before it changes what training keeps, until the
    step is under way: one that fails before that may be taken again. An update within the backward pass sets it then.
    """

    #: Whether a step that is not finite is skipped on the device. Where the host waits to see, no graph can hold it.
    on_device = True
    committed = False
    #: Whether the next backward pass is a whole batch's: then weights may be updated within it.
    whole = False
    #: Whether the batch is one micro-batch, in each process: then sums over processes are of gradients as they are.
    single = False
    #: Whether other processes take part in the next update.
    together = False
    #: Whether each process has a part of the state, which all ask for together.
    gathers_state = False
    #: Whether weights are put together in each pass, in which all processes take part.
    gathers_weights = False
    #: Whether all processes must take part where it is collected, or released, at the end.
    releases_together = False
    #: Most tokens of a pass, where passes of all processes have the same shapes, as packed ones have; else 0.
    pass_tokens = 0
    #: Sums over processes, where several take each step together.
    reduction: Reduction | None = None
    _shared_arena: GradientArena | None = None

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, max_grad_norm: float, scaled: bool,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.model, self.max_grad_norm, self.scaled = model, max_grad_norm, scaled
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.device = device = device or self.parameters[0].device
        double = self.parameters[0].dtype == torch.float64
        self.schedule = schedule.to(device=device, dtype=torch.float32)
        self.loss = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        self.scale = torch.full((), _FIRST_SCALE if scaled else 1.0, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self._used_so_far = set[int]()  # parameters that some process had a gradient of, by number
        for parameter in self.parameters:
            parameter.grad = None  # made by the first backward: what a model does not use is never decayed

    #: Whether a weight may be cast once for all its uses in a pass: not where it is put together for each.
    casts_once = True

    def share(self, ranks: Ranks, *, half: bool = False, overlap: bool = True) -> None:
        """Sum gradients over these processes from now on. half: in bf16 on the way. overlap: within backward passes."""
        arena = self._shared_arena = GradientArena(self.parameters, ranks.count)
        self.reduction = Reduction(
            ranks, self.parameters, arena.buckets, arena.memory, arena.fill, half=half, overlap=overlap,
            gives_back=True,
        )  # fmt: skip

    def put_states_aside(self) -> None:
        """Give back the memory of states that were never used, until they are restored. Unless overridden they stay."""

    def restore_states(self) -> None:
        """Have states that were put aside again, as zeros. Where memory runs out, what is missing can be restored
        later."""

    def meet(self) -> str:
        """Do what all processes do together before the first step; return what users are to be warned of, or "".
        Unless overridden, nothing."""
        return ""

    @property
    def how_sent(self) -> str:
        """Words that a recipe adds on how weights are sent, once processes have met. Unless overridden, none."""
        return ""

    def begin(self) -> None:
        """Prepare for a step, on the host, before anything of it is launched. Unless overridden, nothing."""

    def record_with(self, graphs: Graphs | None) -> None:
        """Keep steps of an optimizer that the host decides on as graphs, where that can be. Unless overridden, none."""

    #: Whether batches of several micro-batches can be captured, and not only those of one.
    captures_several = True

    def graph_kind(self) -> Hashable:
        """Return what a graph of a whole step depends on beside its shapes. Called before each is found."""
        return None

    def recording(self, key: Hashable) -> AbstractContextManager[None]:
        """Within, the graph of `key` may be recorded: what the host takes note of meanwhile was not computed."""
        return nullcontext()

    def replayed(self, key: Hashable) -> None:
        """Take note of what the host does when the graph of `key` is computed."""

    def before(self) -> None:
        """Prepare for a backward pass. Unless overridden, gradients are kept, and added to."""

    side_stream: SideStream | None = None

    def around_backward(self) -> AbstractContextManager[None]:
        """The context of a backward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of a micro-batch's loss, times the scale."""
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]

    def prepare_gathering(self) -> None:
        """Allocate what `gather` needs: memory of a capture is not the update's own."""

    def gather(self) -> None:
        """Take in the gradients of one micro-batch of several, after its backward pass."""

    def reduce(self) -> None:
        """Sum the loss, and the gradients of all micro-batches, over processes; what was not sent yet is.

        What one of them has a gradient of, all have then.
        """
        assert self.reduction is not None
        assert self._shared_arena is not None
        self.reduction.finish()
        ranks = self.reduction.ranks
        used = used_by_all(ranks, [parameter.grad is not None for parameter in self.parameters], self._used_so_far)
        for parameter, view, is_used in zip(self.parameters, self._shared_arena.views, used, strict=True):
            parameter.grad = view if is_used else None
        ranks.sum([self.loss])

    def compile_kernels(self, *, gathered: bool) -> None:
        """Compile the kernels of ours that `apply` and `gather` launch, on the gradients that there are."""

    def apply(self, *, gathered: bool) -> Tensor:
        """Update the weights. Return readings, (5,) fp64: loss, gradient norm, learning rate, scale, skipped.

        gathered: whether gradients were gathered from several micro-batches.
        """
        raise NotImplementedError

    def _rescale(self, skipped: Tensor) -> None:
        if self.scaled:
            torch._amp_update_scale_(self.scale, self.growth, skipped, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within, there are no gradients at first, and any may be made; afterwards all is as it was.

        Updates must be held back.
        """
        counters = [(tensor, tensor.clone()) for tensor in self._counters()]
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in counters:
                    tensor.copy_(value)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    def hold_back(self) -> None:
        """Have the next update skipped, on the device: its loss is not a number."""
        self.loss.fill_(math.nan)

    def gradients(self, *, gathered: bool) -> list[Tensor]:
        """Copies of the gradients that there are, times the scale, in the order of the parameters."""
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self.parameters]

    def gradients_later(self) -> Callable[[], list[Tensor]]:
        """Return what gives `gradients` of one micro-batch once the device has computed them: within a capture."""
        found = self.gradients(gathered=False)
        return lambda: found

    def _counters(self) -> tuple[Tensor, ...]:
        """Small tensors that a step changes even where its update is skipped."""
        return (self.loss, self.scale, self.growth, self.applied)

    @property
    def num_updated(self) -> int:
        """Parameters that this process updates."""
        return sum(parameter.numel() for parameter in self.parameters)

    def num_idle(self) -> int:
        """Of `num_updated`, those that were left alone so far, never having had a gradient. Waits for the device."""
        return 0

    def abandon(self) -> None:
        """Drop the gradients and the loss of a batch that is not updated from, and all that graphs were given."""
        self.loss.zero_()

    def captured(self) -> Any:
        """Tensors to keep alive with the graph that was just captured."""

    def collect(self) -> None:
        """Have all that `release` leaves as it is in other processes, which do so at once. Unless overridden, it is."""

    def release(self) -> None:
        """End training: the model's parameters are plain fp32 ones again, and nothing may be updated."""

    def state(self) -> StepState:
        """Everything an exact continuation needs, of the tensors as they are: no copies, and no weight that is frozen.
        Waits for the device."""
        weights = self.named | self._masters()
        return StepState(
            weights={name: tensor.detach() for name, tensor in weights.items()},
            buffers=dict(self.model.named_buffers()),
            optimizer=self._optimizer_state(),
            groups=self._groups(),
            counters=self._saved_counters(),
        )

    def _saved_counters(self) -> Counters:
        return Counters(
            applied=int(self.applied), scale=float(self.scale), growth=int(self.growth), used=self._used_names()
        )

    def load_state(self, state: StepState) -> None:
        """Take up where `state` was taken."""
        if state.parts:
            raise ValueError(f"a whole state is needed, and this is part of one: {next(iter(state.parts))}")
        with torch.no_grad():
            for name, weight in (self.named | self._masters()).items():
                weight.copy_(state.weights[name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state.buffers[name])
            for name in ("applied", "scale", "growth"):
                getattr(self, name).fill_(getattr(state.counters, name))
        self._load_optimizer_state(state.optimizer, set(state.counters.used))
        self._load_groups(state.groups)

    def kept(self) -> Kept:
        """Count bytes on the device that outlive a step. Waits for nothing."""
        weights = [*self.model.parameters(), *self.model.buffers(), *self._masters().values()]
        return Kept.of(self.device, weights, self._gradient_tensors(), self._state_tensors())

    def _gradient_tensors(self) -> Iterator[Tensor]:
        """Gradients, and their sums."""
        own = [p.grad for p in self.parameters if p.grad is not None]
        if self._shared_arena is None:
            return iter(own)
        views = {view.data_ptr() for view in self._shared_arena.views}
        return iter([self._shared_arena.memory, *(gradient for gradient in own if gradient.data_ptr() not in views)])

    def _state_tensors(self) -> Iterator[Tensor]:
        """The optimizer's states of all parameters."""
        raise NotImplementedError

    def reading(self) -> AbstractContextManager[None]:
        """The context in which weights are what the model is to be judged by: evaluated, and saved at the end."""
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights that are trained, by name in the model."""
        return {**self.named, **self._masters()}

    def halves(self) -> list[str]:
        """Names of parameters that are kept in half precision alone."""
        masters = self._masters()
        return [name for name, p in self.named.items() if p.dtype.itemsize == 2 and name not in masters]

    def alike(self) -> Collection[Tensor]:
        """Weights that processes which make the same updates have alike between steps."""
        return self.weights().values()

    def weight(self, name: str) -> Tensor:
        """One of `weights`."""
        found: Tensor = self._masters().get(name, self.named[name])
        return found

    def _masters(self) -> dict[str, Tensor]:
        """fp32 weights that are not the model's own parameters, by name."""
        return {}

    def _used_names(self) -> tuple[str, ...]:
        """Parameters that some batch has used: one that none has used yet has no update, not even decay."""
        raise NotImplementedError

    def _optimizer_state(self) -> dict[str, ParameterState]:
        raise NotImplementedError

    def _load_optimizer_state(self, state: Mapping[str, ParameterState], used: set[str]) -> None:
        raise NotImplementedError

    def _groups(self) -> tuple[Mapping[str, Any], ...]:
        """Values that the optimizer keeps of groups of parameters."""
        return ()

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `_groups` gave."""


def used_by_all(ranks: Ranks, used: Sequence[bool], so_far: set[int]) -> list[bool]:
    """Return which parameters have a gradient in some process. so_far: those that had one, which are added to.

    In a capture no process waits for another, which may be refused: what steps so far have used is taken, as each shape
    ran before. Raises: RuntimeError if it is not all.
    """
    if not is_capturing():
        found = ranks.any(used)
        so_far |= {index for index, is_used in enumerate(found) if is_used}
        return found
    if any(is_used and index not in so_far for index, is_used in enumerate(used)):
        raise RuntimeError("a parameter is used that no step before has used")
    return [index in so_far for index in range(len(used))]
