"""Layers whose activations are computed again in the backward pass instead of being kept (gradient checkpointing).

A layer that is recomputed is called in the context of its forward pass (`layer_calls`), so that it draws the same
masks. Hugging Face's own switch on a layer is what turns it on, so that layers of padded rows are recomputed too.

torch's own checkpoint is not used: its recomputation leaves out the compiled form of a layer. Here both calls of a
layer are the same call, with gradients on, and the first one's graph is dropped at once. The second call of a fused
layer leaves out its last product (`kernels.remade`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from brimful.kernels.remade import Ending

#: Stands for a tensor among results.
_TENSOR = object()


def recompute(layers: Sequence[nn.Module], numbers: Collection[int]) -> None:
    """Have the layers of these numbers recomputed, and no others."""
    for number, layer in enumerate(layers):
        chosen: Any = layer
        chosen.gradient_checkpointing = number in numbers
        chosen._gradient_checkpointing_func = call_recomputed


@contextmanager
def all_kept_in(model: nn.Module) -> Iterator[None]:
    """Within, no module is recomputed, and none knows by what."""
    switches = {"gradient_checkpointing": False, "_gradient_checkpointing_func": None}
    were = [(vars(module), {n: vars(module)[n] for n in switches if n in vars(module)}) for module in model.modules()]
    for attributes, switched in were:
        attributes.update({name: switches[name] for name in switched})
    try:
        yield
    finally:
        for attributes, switched in were:
            attributes.update(switched)


def keep_all(layers: Sequence[nn.Module]) -> None:
    """Undo `recompute`."""
    for layer in layers:
        for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
            vars(layer).pop(name, None)


def call_recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose activations are computed again in the backward pass, and not kept until then.

    Gradients flow into parameters that it uses, and into tensors among its arguments, those of a `partial` too.
    torch's random streams are set back for it, but within a CUDA graph, where they cannot be: what draws numbers there
    must draw them by its place in the pass.
    """
    return _call(nullcontext, function, *arguments, keeps=True)


def call_emptied(function: Callable[..., Any], *arguments: Any) -> Any:
    """`call_recomputed`, of a function that keeps nothing but its arguments."""
    return _call(nullcontext, function, *arguments, keeps=False)


def call_recomputed_within(
    around: Callable[[], AbstractContextManager[None]], function: Callable[..., Any], *arguments: Any
) -> Any:
    """`call_emptied`, with what is computed again and its backward pass within a context of its own."""
    return _call(around, function, *arguments, keeps=False)


def _call(
    around: Callable[[], AbstractContextManager[None]], function: Callable[..., Any], *arguments: Any, keeps: bool
) -> Any:
    named: dict[str, Any] = {}
    while isinstance(function, partial):
        arguments, named = (*function.args, *arguments), {**function.keywords, **named}
        function = function.func
    leaves, tree = pytree.tree_flatten((arguments, named))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    given = [leaves[place] for place in places]
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    call = _Call(
        function, [None if place in places else leaf for place, leaf in enumerate(leaves)], tree, places, device,
        around, Ending(keeps=keeps),
    )  # fmt: skip
    # Parameters get their gradients through an input that asks for one, where no other does.
    found = _Recomputed.apply(call, torch.empty(0, requires_grad=True), *given)  # type: ignore[no-untyped-call]
    return call.outputs(found)


class _Call:
    """A call that can be made again.

    leaves: its arguments one after another, None at the places of tensors that gradients flow into. around: makes the
    context of the second call and of its backward pass. ending: what is known of its last function by then.
    """

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], tree: Any, places: list[int], device: torch.device,
        around: Callable[[], AbstractContextManager[None]], ending: Ending,
    ) -> None:  # fmt: skip
        self.around, self.ending = around, ending
        self._function, self._leaves, self._tree, self._places = function, leaves, tree, places
        self._device = device
        self._dtype = torch.get_autocast_dtype(device.type)
        self._autocast = torch.is_autocast_enabled(device.type)
        self._random = self._random_state()
        self._rest: list[Any] = []
        self._output_tree: Any = None

    def make(self, given: Sequence[Tensor], *, again: bool) -> list[Tensor]:
        """Make the call; the tensors among its results, with their graph."""
        leaves = list(self._leaves)
        autocast = torch.autocast(self._device.type, self._dtype, self._autocast)
        with torch.enable_grad(), autocast, self.ending.active(again=again):
            for place, tensor in zip(self._places, given, strict=True):
                leaves[place] = tensor.view_as(tensor)  # autocast would keep the cast of a leaf for all who read it
            arguments, named = pytree.tree_unflatten(leaves, self._tree)
            results = self._function(*arguments, **named)
        flat, self._output_tree = pytree.tree_flatten(results)
        self._rest = [_TENSOR if isinstance(each, Tensor) else each for each in flat]
        found = [each for each in flat if isinstance(each, Tensor)]
        if not again:
            self.ending.settle(found)
        return found

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Results as the function gave them, of these tensors."""
        remaining = iter(tensors)
        flat = [next(remaining) if each is _TENSOR else each for each in self._rest]
        return pytree.tree_unflatten(flat, self._output_tree)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, torch's random streams are where they were before the first call; they are given back afterwards."""
        if self._random is None:
            yield
            return
        now = self._random_state()
        self._set_random_state(self._random)
        try:
            yield
        finally:
            self._set_random_state(now)

    def _random_state(self) -> tuple[Tensor, Tensor | None] | None:
        on_gpu = self._device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if on_gpu else None

    def _set_random_state(self, state: tuple[Tensor, Tensor | None] | None) -> None:
        if state is not None:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], self._device)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, _: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        found = call.make([_leaf(x) for x in given], again=False)
        kept, call.ending.kept = call.ending.kept, ()
        ctx.call, ctx.num_given = call, len(given)
        ctx.set_materialize_grads(False)  # what no gradient reaches has none, where zeros would let it decay
        ctx.save_for_backward(*given, *kept)
        outputs = tuple(y.detach() for y in found)
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        given = [_leaf(x) for x in saved[: ctx.num_given]]
        with call.around():
            call.ending.kept = saved[ctx.num_given :]
            with call.again():
                found = call.make(given, again=True)
            call.ending.kept = ()
            pairs = [(y, dy) for y, dy in zip(found, gradients, strict=True) if y.requires_grad and dy is not None]
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        return None, None, *(x.grad for x in given)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
