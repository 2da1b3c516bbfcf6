"""The end of the last layer, on the tokens alone that the head reads: what follows attention works on each by itself.

Where the residual goes through the same module (BERT and related models) the rest of the layer works on as many tokens
as that is given. Elsewhere the layer adds it itself, to a feed-forward part (Llama and other decoders, ModernBERT): the
layer is told that this part is zero, and what it made of the tokens is added to theirs once the layer is done. Whether
a model is either is found out by its results (`equivalence`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from brimful.kernels.rng import RowsOfLayer
from brimful.models.model_stats import layers_of, matmul_parameters
from brimful.models.packed.training_check import drops_numbers

#: Names of a feed-forward part in a layer, and of a norm between it and the residual.
_FEED_FORWARD = ("mlp", "feed_forward", "ffn")
_NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")
#: Most matrices of such a part. One with experts has more; its router's loss is over all tokens.
_MOST_MATRICES = 3


class AfterAttention:
    """The modules of the last layer that are given the chosen tokens alone.

    layer: the last one. first: the module that takes what attention made. last: where the layer adds the residual to
    what was made, the module that made it; None where `first` is given the residual. parameters: of matrices that
    tokens are multiplied with from `first` on. Modules are held weakly: the model holds what refers to this.
    """

    def __init__(self, layer: nn.Module, first: nn.Module, last: nn.Module | None, parameters: int) -> None:
        self.parameters = parameters
        self._layer, self._first = weakref.ref(layer), weakref.ref(first)
        self._last = None if last is None else weakref.ref(last)

    def is_of(self, module: nn.Module) -> bool:
        """True for the last layer."""
        return self._layer() is module

    @property
    def modules(self) -> tuple[Any, Any, Any] | None:
        """The layer, `first` and `last`; None where another module was put in the place of one of them."""
        layer, first = self._layer(), self._first()
        last = None if self._last is None else self._last()
        held = set() if layer is None else set(layer.modules())
        return (layer, first, last) if {first, first if self._last is None else last} <= held else None

    def may_be_cut(self) -> bool:
        """False where dropout may be drawn, behind `last`, of what it made of all tokens, where somebody else looks at
        what the layer makes, and where its modules are others."""
        if (found := self.modules) is None:
            return False
        layer, _, last = found
        return last is None or not (_is_watched(layer) or drops_numbers(layer))


class Cut:
    """The end of the last layer in one pass, for the tokens at chosen_S. is_done: whether the layer's result is theirs
    alone."""

    def __init__(self, after: AfterAttention, chosen_S: Tensor) -> None:
        self._after, self._chosen_S = after, chosen_S
        self.is_done = False

    @contextmanager
    def within(self, module: nn.Module, rows: RowsOfLayer) -> Iterator[Callable[[Any], Any] | None]:
        """Within, a layer is called. What it returns is handed to what this gives where it is the last one: then it is
        (1, S, H).

        rows: of the call, for its dropout.
        """
        found = self._after.modules if self._after.is_of(module) else None
        if found is None:
            yield None
            return
        _, first, last = found
        num_tokens, made = list[int](), list[Tensor]()

        def choose(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            num_tokens.append(given[0].shape[1])
            rows.choose(self._chosen_S)
            return tuple(x_1TH.index_select(1, self._chosen_S) for x_1TH in given)

        def keep(_: nn.Module, __: Any, made_1SH: Tensor) -> Tensor:
            made.append(made_1SH)
            return made_1SH.new_zeros(()).expand(1, num_tokens[0], made_1SH.shape[2])

        def finish(output: Any) -> Any:
            self.is_done = bool(num_tokens)
            if not made:
                return output
            states_1TH, *others = output if isinstance(output, tuple) else (output,)
            states_1SH = states_1TH.index_select(1, self._chosen_S) + made[0]
            return (states_1SH, *others) if isinstance(output, tuple) else states_1SH

        hooks = [first.register_forward_pre_hook(choose)]
        hooks += [] if last is None else [last.register_forward_hook(keep)]
        try:
            yield finish
        finally:
            for hook in hooks:
                hook.remove()


def after_attention(model: Any) -> AfterAttention | None:
    """Return what follows attention in a model's last layer; None where no module is known to."""
    layers = layers_of(model)
    if layers is None:
        return None
    layer = layers[-1]
    output = getattr(getattr(layer, "attention", None), "output", None)
    if isinstance(output, nn.Module):
        attention: Any = layer.attention
        before = matmul_parameters(attention) - matmul_parameters(output)
        return AfterAttention(layer, output, None, matmul_parameters(layer) - before)
    part = next((getattr(layer, name) for name in _FEED_FORWARD if hasattr(layer, name)), None)
    if not isinstance(part, nn.Module) or not _is_plain(part):
        return None
    norms = (getattr(layer, name, None) for name in _NORMS_AFTER)
    last = next((norm for norm in norms if isinstance(norm, nn.Module)), part)
    return AfterAttention(layer, part, last, matmul_parameters(part))


def _is_plain(part: nn.Module) -> bool:
    """Return whether all parameters of a feed-forward part are of a few matrices, or of norms."""
    matrices = [each for each in part.modules() if isinstance(each, nn.Linear | Conv1D)]
    held = {id(p) for each in matrices for p in each.parameters(recurse=False)}
    others = [p for p in part.parameters() if id(p) not in held]
    return 0 < len(matrices) <= _MOST_MATRICES and all(p.ndim == 1 for p in others)


def _is_watched(layer: nn.Module) -> bool:
    """Return whether a module of the layer has a hook, which would be given other tokens, or zeros."""
    named = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name, None) for module in layer.modules() for name in named)
