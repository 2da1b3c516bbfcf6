"""A pass that autograd runs through, as two CUDA graphs: the forward pass, and the backward pass that belongs to it.

For loops that call a model and `backward()` themselves. What the forward graph keeps for the backward one lies in
memory that all graphs of the pool share, so between the two no other pass of the pool may run.

Both are recorded with stand-ins for the weights, of the same memory: autograd's own nodes of the weights belong to the
stream that the loop works on, and cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from brimful.step.graphs.cache import Graph, GraphCache

#: Numbers that the place of each gradient is a multiple of.
_ALIGNMENT = 64
#: Computes outputs from numbers on the device.
Compute = Callable[[Tensor], tuple[Tensor, ...]]


class Weights:
    """Weights of a model that get gradients, and memory for these, which graphs of all shapes write.

    placed: where each weight is held, by module and name. A weight that two modules share is one.
    num_passes: forward passes that were replayed, of all shapes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.placed = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self.parameters = list({id(parameter): parameter for _, _, parameter in self.placed}.values())
        self._flat = {dtype: self._memory(dtype) for dtype in {parameter.dtype for parameter in self.parameters}}
        self.gradients = self._views(self._flat)
        self.num_passes = 0

    def _sizes(self, dtype: torch.dtype) -> list[int]:
        """Numbers of each weight in flat memory. Each begins where kernels of optimizers load several at once."""
        each = (parameter.numel() for parameter in self.parameters if parameter.dtype == dtype)
        return [-(-numel // _ALIGNMENT) * _ALIGNMENT for numel in each]

    def _memory(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(sum(self._sizes(dtype)), dtype=dtype, device=self.parameters[0].device)

    def _views(self, flat: dict[torch.dtype, Tensor]) -> list[Tensor]:
        """A view of flat memory for each weight."""
        parts = {dtype: iter(memory.split(self._sizes(dtype))) for dtype, memory in flat.items()}
        return [next(parts[p.dtype])[: p.numel()].view_as(p) for p in self.parameters]

    def copies(self) -> list[Tensor]:
        """Gradients in memory of their own: the loop adds to what it is given, and keeps it."""
        return self._views({dtype: memory.clone() for dtype, memory in self._flat.items()})

    @contextmanager
    def stand_ins(self) -> Iterator[list[Tensor]]:
        """Within, the model computes with stand-ins for these weights, in their order."""
        by_id = {id(parameter): parameter.detach().requires_grad_() for parameter in self.parameters}
        try:
            for module, name, parameter in self.placed:
                module._parameters[name] = by_id[id(parameter)]  # type: ignore[assignment]
            yield [by_id[id(parameter)] for parameter in self.parameters]
        finally:
            for module, name, parameter in self.placed:
                module._parameters[name] = parameter  # type: ignore[assignment]


class RecordedPass:
    """Two graphs of one shape. outputs_used: which outputs have a gradient. weights_used: which weights get one."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.outputs_used: list[bool] = []
        self.weights_used: list[bool] = []
        self.forward_graph: Graph[tuple[Tensor, ...]] | None = None
        self.backward_graph: Graph[tuple[()]] | None = None
        self._stand_ins: list[Tensor] = []
        self._live: tuple[Tensor, ...] = ()
        self._given: list[Tensor] = []

    @classmethod
    def find(cls, cache: GraphCache, key: Hashable, weights: Weights, compute: Compute, inputs: Tensor) -> Any:
        """Record a shape; None where that is refused. inputs: such as `compute` is given.

        Raises: CaptureMemoryError, with nothing computed.
        """
        made, kind = cls(weights), weights.parameters[0].device.type

        def forward(static: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad(), weights.stand_ins() as made._stand_ins:
                made._live = compute(static)
            made.outputs_used = [output.requires_grad for output in made._live]
            return tuple(output.detach() for output in made._live)

        def backward(_: Any) -> tuple[()]:
            live, made._live = made._live, ()
            used = [output for output in live if output.requires_grad]
            with torch.autocast(kind, enabled=False):  # as where a loop calls backward()
                found = torch.autograd.grad(used, made._stand_ins, made._given, allow_unused=True)
            made._stand_ins = []
            made.weights_used = [gradient is not None for gradient in found]
            pairs = [(into, of) for into, of in zip(weights.gradients, found, strict=True) if of is not None]
            torch._foreach_copy_([into for into, _ in pairs], [of for _, of in pairs])
            return ()

        made.forward_graph = cache.find((key, "forward"), forward, inputs)
        if made.forward_graph is None:
            return None
        made._given = [torch.zeros_like(output) for output in made._live if output.requires_grad]
        made.backward_graph = cache.find((key, "backward"), backward)
        return None if made.backward_graph is None else made

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward pass. Outputs are in memory of their own."""
        assert self.forward_graph is not None
        self.weights.num_passes += 1
        return tuple(output.clone() for output in self.forward_graph.replay(inputs))

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the backward pass of the last forward one. gradients: of the outputs that have one."""
        assert self.backward_graph is not None
        torch._foreach_copy_(self._given, list(gradients))
        self.backward_graph.replay()
        copies = self.weights.copies()
        return [copy if used else None for copy, used in zip(copies, self.weights_used, strict=True)]


class Flight:
    """One forward pass whose backward pass has not run. done: whether it has."""

    def __init__(self, recorded: RecordedPass) -> None:
        self.recorded, self.done = recorded, False
        self.number = recorded.weights.num_passes + 1

    def run(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the pass, through which autograd reaches the weights."""
        apply: Callable[..., tuple[Tensor, ...]] = _Differentiable.apply
        return apply(self, inputs, *self.recorded.weights.parameters)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the weights. Raises: RuntimeError for a second backward pass, and where another pass has run
        since: the memory that it reads has other numbers then."""
        if self.done or self.recorded.weights.num_passes != self.number:
            why = "has had its backward pass" if self.done else "lies in memory where another one has run since"
            hint = "brimful.packed(model, graphs=False) allows several backward passes of a call"
            raise RuntimeError(f"this call of the model {why}; hint: {hint}")
        found = self.recorded.backward(gradients)
        self.done = True  # after the launch: another thread may call meanwhile
        return found


class _Differentiable(torch.autograd.Function):
    """A replayed pass. While its graph of autograd lives, so does its flight."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, inputs: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        outputs = flight.recorded.forward(inputs)
        used = flight.recorded.outputs_used
        ctx.mark_non_differentiable(*(output for output, has in zip(outputs, used, strict=True) if not has))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flight: Flight = ctx.flight
        given = [each for each, has in zip(gradients, flight.recorded.outputs_used, strict=True) if has]
        return None, None, *flight.backward(given)
