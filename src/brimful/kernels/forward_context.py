"""The context of one forward pass of one model: what its kernels need besides the arguments that layers hand on.

A compiled layer is one trace for all layers and token budgets, so nothing of a single pass may enter its graph. The
functions in it are called from Python at run time, and read the context of the call that they are part of:

    context = ForwardContext(half_residuals=True)
    with context.layer(3).active():        # scoped to this call and thread
        layer(...)                         # its functions: current().dropout_site(...)

An autograd function keeps its context for its backward pass, which runs in threads of autograd's own. A layer that is
recomputed there is called in its context again (`models.packed.layer_calls`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from brimful.kernels.float8 import Plan
from brimful.kernels.layout import PackedInputs
from brimful.kernels.rng import DropoutSites, RowsOfLayer
from brimful.kernels.side_stream import SideStream

T = TypeVar("T")

#: Probability at which kernels compiled with dropout drop one number of four billion.
LEAST_DROPOUT = 2.0**-32


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardContext:
    """State of one forward pass and of its backward pass.

    half_residuals: sums between post-norm layers are kept in the dtype of products, as Hugging Face's models in half
    precision keep them, and not in fp32 as under autocast; norms compute in fp32 either way
    (docs/concepts/exactness.md). float8: the products that are taken in fp8. side_stream: where gradients of weights
    may be computed. compiled: False to run compiled layers as they were. seeded_dropout: whether dropout of a model's
    own code is drawn by sites too: in layers that are recomputed. keeps_all: True where dropout of our kernels keeps
    all, in the same compiled code. inputs: the packed row, where it is one. outside: within it compiled layers are
    called, outside of modes that look on. attention: what attention is told, for layers that do not hand it on.
    told: within it modules of the model that must know the row, or the length of rows, do. both_calls: makes what both
    calls of one layer run within that is recomputed.
    cut: what of the last layer is given pooled tokens alone (`models.packed.after_attention`), None for nothing.
    seed: () int64 on the device, of the step that the pass is part of. places_X: (X,) int64, of the tokens that layers
    are given in the effective batch. Without both, masks are drawn by a seed of torch's generator.
    sites: of dropout. layer, places: the layer that runs, and the numbers of its uses of dropout. rows: of that layer.
    """

    half_residuals: bool = False
    float8: Plan | None = None
    side_stream: SideStream | None = None
    compiled: bool = True
    seeded_dropout: bool = False
    keeps_all: bool = False
    inputs: PackedInputs | None = None
    outside: Callable[[], AbstractContextManager[None]] = nullcontext
    attention: Any = None
    told: Callable[[], AbstractContextManager[None]] = nullcontext
    both_calls: Callable[[], Callable[[], AbstractContextManager[None]]] = lambda: nullcontext
    cut: Any = None
    seed: Tensor | None = None
    places_X: Tensor | None = None
    sites: DropoutSites = field(default_factory=DropoutSites)
    layer_number: int | None = None
    places: Iterator[int] = field(default_factory=itertools.count)
    rows: RowsOfLayer = field(default_factory=RowsOfLayer)
    _casts: Any = field(default_factory=WeakTensorKeyDictionary)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, functions that this thread calls run in this context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def layer(self, number: int) -> ForwardContext:
        """The context of one layer, whose sites of dropout are the same each time it is run."""
        return replace(self, layer_number=number, places=itertools.count(), rows=RowsOfLayer())

    def probability(self, dropout: float) -> float:
        """The probability of dropout at work. Where all is kept, the least that there is: zero would be other code."""
        return min(dropout, LEAST_DROPOUT) if self.keeps_all else dropout

    def dropout_site(self, like: Tensor, num_rows: int, dropout: float) -> tuple[Tensor, int]:
        """Seeds of a mask's rows, (1 + rows,) on the device of `like`, and number of a site of its own.

        Without dropout `like` itself: no kernel reads it, and filling a constant would be a launch at every site.
        """
        if not dropout:
            return like, 0
        return self._seeds(like.device, num_rows), self.sites.number(self.layer_number, next(self.places))

    def _seeds(self, device: torch.device, num_rows: int) -> Tensor:
        """By places where rows are tokens that have them. Others have a seed that differs by micro-batch."""
        if self.seed is not None and self.places_X is not None:
            seeds = self.rows.seeds(self.sites.of_tokens(self.seed, self.places_X))
            if len(seeds) == 1 + num_rows:
                return seeds
        return self.sites.of_rows(num_rows, device, self.layer_number, self.rows)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in `dtype`; the copy that was made along with it, where that is still what it was made of."""
        copy, version = self._casts.get(x, (None, 0))
        return copy if copy is not None and copy.dtype == dtype and version == _version(x) else x.to(dtype)

    def with_cast(self, x: Tensor, copy: Tensor) -> Tensor:
        """`x`, whose `copy` in another dtype `cast` will find for as long as both live."""
        self._casts[x] = (copy, _version(x))
        return x

    def beside(self, work: Callable[[], T], *inputs: Tensor, leaf: bool) -> T:
        """Run `work`, on the side stream if it is active. inputs: all that it reads and that may be freed meanwhile.

        leaf: whether its results are gradients of leaves, which nothing reads before the end of the backward pass.
        """
        side = self.side_stream
        return side.run(work, inputs) if leaf and side is not None and side.is_active else work()


_current: ContextVar[ForwardContext | None] = ContextVar("brimful_forward_context", default=None)


def active_context() -> ForwardContext | None:
    """The context of the call that this is part of; None outside of any."""
    return _current.get()


def current() -> ForwardContext:
    """The same; a new context outside of any."""
    return _current.get() or ForwardContext()


def _version(x: Tensor) -> int:
    """In-place version of `x`; inference tensors have none."""
    return 0 if x.is_inference() else x._version
