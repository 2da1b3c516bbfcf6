"""A table of words of which each process has rows, for what a micro-batch needs of it.

    forward pass     rows of the micro-batch's words are read where they are, in the memory of the process that has them
    backward pass    gradients of these rows are put where all processes read them; each sums those of rows that it has

FSDP2 puts the whole table together, and sends a gradient of all of its rows. Here as many rows move as a micro-batch
has tokens: of 128,256 words and 5,700 tokens 4 %.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from brimful.hardware.capture import is_capturing
from brimful.hardware.peers import PeerMemory, Peers
from brimful.hardware.ranks import Ranks
from brimful.models.tensor_plan import local

#: Least bytes of a table that rows are read of. Others have hardly more rows than a pass has tokens.
_LEAST_BYTES = 64 << 20


def reads_rows(module: nn.Module, kind: type) -> bool:
    """Return whether a module is a large table, and a plain one: a row is the same wherever it is looked up. kind: its
    class before FSDP2 changed it."""
    if kind is not nn.Embedding or not isinstance(module, nn.Embedding):
        return False
    plain = module.max_norm is None and not (module.sparse or module.scale_grad_by_freq)
    return plain and module.weight.numel() * module.weight.element_size() >= _LEAST_BYTES


class TableRows:
    """Looks words up in a table whose weight is cut by rows, as FSDP2 cuts it: call it with their numbers.

    Made by all processes at once, whose calls have the same shapes in the same order. Its part of the weight moves to
    memory that all of them reach. What this process writes there is what the others have read: each call begins as all
    of them have come to it, and weights change between a backward pass and the next call alone.
    """

    def __init__(self, table: nn.Embedding, peers: Peers, ranks: Ranks) -> None:
        self._weight, self._ignored = table.weight, table.padding_idx
        self._peers, self._rank, self._width = peers, ranks.rank, table.embedding_dim
        own = local(table.weight)
        self._num_rows, self._num_own = -(-table.num_embeddings // ranks.count), len(own)
        self._weights = peers.zeros(self._num_rows * self._width, own.dtype)
        part = self._weights.own[: own.numel()].view(own.shape)
        part.copy_(own)
        self._weight._local_tensor = part  # type: ignore[attr-defined]
        self._words: PeerMemory | None = None
        self._gradients: PeerMemory | None = None

    def __call__(self, words: Tensor) -> Tensor:
        """(..., H) rows of (...) words. Raises: RuntimeError where a capture comes before its shape did."""
        if torch.is_grad_enabled() and self._weight.requires_grad:
            self._make_room(words.numel())
        rows: Tensor = _Looked.apply(self._weight.to_local(), words, self)  # type: ignore[attr-defined, no-untyped-call]
        return rows

    @property
    def own(self) -> Tensor:
        """This process's rows, in memory that torch's allocator does not count."""
        return self._weights.own

    def read(self, words: Tensor) -> Tensor:
        """(..., H) rows, each of the process that has it."""
        flat_T = words.flatten()
        owner_T = flat_T.div(self._num_rows, rounding_mode="floor")
        place_T = flat_T - owner_T * self._num_rows
        self._weights.meet()
        found_TH = None
        for rank, theirs in enumerate(self._weights.all_R):
            has_T = owner_T == rank
            rows_TH = theirs.view(self._num_rows, self._width).index_select(0, place_T.where(has_T, 0))
            found_TH = rows_TH if found_TH is None else rows_TH.where(has_T[:, None], found_TH)
        assert found_TH is not None
        return found_TH.view(*words.shape, self._width)

    def sum(self, words: Tensor, gradient: Tensor) -> Tensor:
        """(own rows, H) sum of all processes' gradients of the rows that this one has. gradient: (..., H)."""
        assert self._words is not None
        assert self._gradients is not None
        count, flat_T = words.numel(), words.flatten()
        self._words.own[:count].copy_(flat_T if self._ignored is None else flat_T.where(flat_T != self._ignored, -1))
        self._gradients.own[: gradient.numel()].copy_(gradient.flatten())
        self._words.meet()
        words_T = torch.cat([theirs[:count] for theirs in self._words.all_R])
        sums_TH = gradient.new_empty(len(words_T), self._width)
        for part, theirs in zip(sums_TH.chunk(len(self._words.all_R)), self._gradients.all_R, strict=True):
            part.copy_(theirs[: part.numel()].view(part.shape))
        place_T = words_T - self._rank * self._num_rows
        place_T = place_T.where((place_T >= 0) & (place_T < self._num_own), self._num_own)  # a row behind, for others'
        given: Any = (sums_TH, place_T, self._num_own + 1, self._num_own, False)
        summed: Tensor = torch.ops.aten.embedding_dense_backward(*given)[: self._num_own]
        return summed

    def _make_room(self, count: int) -> None:
        """Have memory for gradients of so many words. Graphs keep what they were captured with."""
        if self._words is not None and len(self._words.own) >= count:
            return
        if is_capturing():
            raise RuntimeError("a pass is captured that has more words than any before")
        self._words = self._peers.zeros(count, torch.int64)
        self._gradients = self._peers.zeros(math.prod((count, self._width)), self._weights.own.dtype)


class _Looked(torch.autograd.Function):
    """Rows of words, with a gradient of this process's rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, words: Tensor, rows: TableRows) -> Tensor:
        ctx.save_for_backward(words)
        ctx.rows = rows
        return rows.read(words)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.rows.sum(*ctx.saved_tensors, *gradients), None, None
