"""A table of words of which each process has rows, for what a micro-batch needs of it.

    forward pass     rows of the micro-batch's words are read where they are, in the memory of the process that has them
    backward pass    gradients of these rows are put where all processes read them; each sums those of rows that it has

FSDP2 puts the whole table together, and sends a gradient of all of its rows. Here each process reads as many rows of
every other one as its micro-batch has tokens: of 128,256 words and 5,700 tokens 4 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brimful.core.errors import DeviceError, first_line
from brimful.hardware.capture import is_capturing
from brimful.hardware.memory import release_unused
from brimful.hardware.peers import PeerMemory, Peers
from brimful.hardware.ranks import Ranks
from brimful.models.tensor_plan import local

#: Tokens that room is made for, as times those of the micro-batch that needs it: sizes of one run differ by less.
_ROOM = 2
#: Least bytes of a table that rows are read of: others are put together in less time than processes take to meet.
_LEAST_BYTES = 64 << 20
#: Least rows of a table for each token of all processes' passes. A token takes 8 bytes a number to read and to sum in
#: fp32, in each process; a table that is put together in half precision 6 for each row, there and back.
_ROWS_A_TOKEN = 2


def reads_rows(module: nn.Module, kind: type, num_tokens: int) -> bool:
    """Return whether a module is a large table, and a plain one: a row is the same wherever it is looked up.

    kind: its class before FSDP2 changed it. num_tokens: most of all processes' passes together, 0 where their shapes
    differ, and rows cannot be read.
    """
    if not num_tokens or kind is not nn.Embedding or not isinstance(module, nn.Embedding):
        return False
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return False
    is_large = module.weight.numel() * module.weight.element_size() >= _LEAST_BYTES
    return is_large and module.num_embeddings >= _ROWS_A_TOKEN * num_tokens


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Memory of what processes tell one another of a backward pass: words, how many they are behind them; gradients."""

    words: PeerMemory
    gradients: PeerMemory


class TableRows:
    """Looks words up in a table whose weight is cut by rows, as FSDP2 cuts it: call it with their numbers.

    Made by all processes at once, whose calls have the same shapes in the same order. Its part of the weight moves to
    memory that all of them reach. Weights change between a backward pass and the next call alone, which begins as all
    processes have come to it. Raises: DeviceError in all processes where one has no such memory; nothing is changed.
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
        self._rooms: list[_Room] = []  # the last one is used; graphs use those that they were captured with

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
        room, count, flat_T = self._rooms[-1], words.numel(), words.flatten()
        room.words.own[:count].copy_(flat_T if self._ignored is None else flat_T.where(flat_T != self._ignored, -1))
        room.words.own[-1:].fill_(count)  # what is assigned to a place comes from the host, in no graph
        room.gradients.own[: gradient.numel()].copy_(gradient.flatten())
        room.words.meet()
        words_T = torch.cat([theirs[:count] for theirs in room.words.all_R])
        sums_TH = gradient.new_empty(len(words_T), self._width)
        for part, theirs, told in zip(
            sums_TH.chunk(len(room.words.all_R)), room.gradients.all_R, room.words.all_R, strict=True
        ):
            part.copy_(theirs[: part.numel()].view(part.shape))
            part.masked_fill_(told[-1] != count, torch.nan)  # passes that differ: the step is left out, and said
        room.words.meet()  # all have read
        place_T = words_T - self._rank * self._num_rows
        place_T = place_T.where((place_T >= 0) & (place_T < self._num_own), self._num_own)  # a row behind, for others'
        given: Any = (sums_TH, place_T, self._num_own + 1, self._num_own, False)
        summed: Tensor = torch.ops.aten.embedding_dense_backward(*given)[: self._num_own]
        return summed

    def _make_room(self, count: int) -> None:
        """Have memory for gradients of so many words. Raises: torch.OutOfMemoryError in all processes."""
        if self._rooms and len(self._rooms[-1].words.own) > count:
            return
        if is_capturing():
            raise RuntimeError("a pass is captured that has more words than any before")
        release_unused(self._weights.own.device)
        try:
            words = self._peers.zeros(_ROOM * count + 1, torch.int64)
            gradients = self._peers.zeros(_ROOM * count * self._width, self._weights.own.dtype)
        except DeviceError as error:  # in all processes: here there was memory that GPUs reach, and it is gone
            raise torch.OutOfMemoryError(f"CUDA out of memory: {first_line(error)}") from error
        self._rooms.append(_Room(words=words, gradients=gradients))


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
