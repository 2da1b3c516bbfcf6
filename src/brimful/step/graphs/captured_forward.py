"""The forward pass over the same few shapes again and again, as graphs: packed, or on padded rows.

A window is put in order of length and cut into pieces of a few fixed shapes (`data.batches.packing.cut_window`). What a
piece needs goes to the device as one array; positions and segments are worked out there. Training sends them ready
made: its graphs would have more kernels, and its batches are made ahead.

Shapes depend on the window alone, and so do its results: not on what came before, and not on where a run was resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.packing import Piece, cut_window
from brimful.data.batches.padding import cut_padded_window
from brimful.data.tokens.encoder import Tokens, ranges
from brimful.kernels.layout import PackedShape, pack_numbers, pad_numbers, unpack_numbers, unpad_numbers
from brimful.kernels.precompile import precompiled
from brimful.models.packed.packed_forward import LayoutModel, PaddedModel
from brimful.step.forward import Again, Forward, PendingLogits, chunks
from brimful.step.graphs.cache import GraphCache, Recorder
from brimful.step.precision import Precision

#: Budgets of a data set's windows: what is left over of one is computed in pieces that are smaller.
_BUDGETS = 16
#: Logits of such a window: 64 MB, of which the device holds a few.
_MOST_LOGITS = 1 << 24


class _GraphForward(Forward):
    """Passes over pieces of a few shapes. budget: most tokens of a piece."""

    def __init__(
        self, execution: LayoutModel, precision: Precision, budget: int, recorder: Recorder | None,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(execution, precision)
        self._budget = budget
        self._graphs = GraphCache(recorder, what="forward passes", note=note)

    @property
    def most_tokens(self) -> int:
        """Of a piece, if no text has more."""
        return self._budget

    def limit_to(self, num_tokens: int) -> bool:
        """As `Forward` has it."""
        self._budget = num_tokens
        return True

    @property
    def captures(self) -> bool:
        """As `Forward` has it."""
        return self._graphs.enabled

    def stop_capturing(self) -> None:
        """As `Forward` has it."""
        self._graphs.stop()

    def abandon(self) -> None:
        """As `Forward` has it."""
        self._graphs.free()


class PackedForward(_GraphForward):
    """Logits of windows by a packed execution, on a GPU.

    budget: most tokens of a piece. longest: longest sequence in tokens. typical_length, attention: see `Segments`.
    recorder: None to launch one kernel after another. fused: whether layers are compiled, around our attention: their
    kernels are compiled together before the first pass. note: called once with the reason if capture turns out to be
    impossible.
    """

    def __init__(
        self,
        execution: LayoutModel,
        precision: Precision,
        *,
        budget: int,
        longest: int,
        padding_id: int,
        typical_length: int | None,
        attention: str | None = None,
        recorder: Recorder | None,
        fused: bool,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(execution, precision, budget, recorder, note)
        self._longest, self._padding_id = longest, padding_id
        self._typical_length, self._attention, self._kernels_wait = typical_length, attention, fused

    def windows(self, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """As `Forward` has it."""
        most_rows = max(1, _MOST_LOGITS // self.num_outputs)
        return chunks(lengths_N, _BUDGETS * max(self._budget, self._longest), most_rows)

    def _passes(self, tokens: Tokens) -> Iterator[tuple[np.ndarray, Tensor]]:
        lengths_N = tokens.lengths
        for piece in cut_window(
            lengths_N,
            self._budget,
            self._longest,
            typical_length=self._typical_length,
            attention=self._attention,
        ):
            yield piece.rows, self._run(piece, tokens, lengths_N[piece.rows])

    def _run(self, piece: Piece, tokens: Tokens, lengths: np.ndarray) -> Tensor:
        shape, device = piece.shape, self.precision.device
        taken = ranges(tokens.offsets[piece.rows], lengths)
        numbers = pack_numbers(
            tokens.ids[taken],
            lengths,
            shape,
            padding_id=self._padding_id,
            types=None if tokens.types is None else tokens.types[taken],
            pinned=device.type == "cuda",
        )
        key = (shape, len(numbers))
        graph = None
        if self._graphs.meet([key]):
            graph = self._graphs.find(key, lambda static: self._compute(static, shape), numbers)
        if graph is not None:
            return graph.replay(numbers)[: len(lengths)].clone()
        arrived = numbers.to(device, non_blocking=True)
        if self._kernels_wait:
            self._kernels_wait = False
            with precompiled():
                self._compute(arrived, shape)
            self.precision.after_update()  # copies of the weights that were made within
        return self._compute(arrived, shape)

    def _compute(self, numbers: Tensor, shape: PackedShape) -> Tensor:
        return self._logits_SC(unpack_numbers(numbers, shape))


class PaddedForward(_GraphForward):
    """Logits of windows on padded rows, on a GPU, by a model whose rows do not influence one another.

    budget: most tokens of a piece, padding counted. longest: longest sequence in tokens. recorder: None to launch one
    kernel after another. note: as `PackedForward` has it.
    """

    def __init__(
        self,
        execution: LayoutModel,
        precision: Precision,
        *,
        budget: int,
        longest: int,
        padding_id: int,
        recorder: Recorder | None,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(execution, precision, max(budget, longest), recorder, note)
        self._longest, self._padding_id, self._eager = longest, padding_id, False
        self._lock = threading.RLock()  # rows that are computed again are, where they are waited for

    def windows(self, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """As `Forward` has it."""
        return chunks(lengths_N, _BUDGETS * self._budget, len(lengths_N))

    def submit(self, tokens: Tokens) -> PendingLogits:
        """As `Forward` has it."""
        with self._lock:
            return super().submit(tokens)

    def _again(self, tokens: Tokens) -> Again | None:
        """An eager pass, where what a graph takes for granted may not be true of some rows."""
        decisions = self.execution.decisions if isinstance(self.execution, PaddedModel) else None
        decides = decisions is not None and decisions.grants
        return partial(self._eagerly, tokens) if decides and self._graphs.enabled and not self._eager else None

    def _eagerly(self, tokens: Tokens, rows: np.ndarray) -> np.ndarray:
        device = self.precision.device
        with self._lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._eager = True
            try:
                found_MC = self.submit(tokens.take(rows)).result()
            finally:
                self._eager = False
            if not np.isnan(found_MC).all():
                self._graphs.stop("what the model's code decides on the host is not the same for all rows of one shape")
        return found_MC

    def _passes(self, tokens: Tokens) -> Iterator[tuple[np.ndarray, Tensor]]:
        for num_rows, length, rows in cut_padded_window(tokens.lengths, self._budget, self._longest):
            yield rows, self._run(tokens, rows, num_rows, length)

    def _run(self, tokens: Tokens, rows: np.ndarray, num_rows: int, length: int) -> Tensor:
        device, lengths = self.precision.device, tokens.lengths[rows]
        taken, pinned = ranges(tokens.offsets[rows], lengths), device.type == "cuda"
        types = None if tokens.types is None else tokens.types[taken]
        numbers = pad_numbers(
            *(tokens.ids[taken], lengths, num_rows, length),
            padding_id=self._padding_id,
            types=types,
            pinned=pinned,
        )

        def compute(given: Tensor) -> Tensor:
            return self._logits_SC(unpad_numbers(given, num_rows, length))

        key, graph = (num_rows, length, len(numbers)), None
        if not self._eager and self._graphs.meet([key]):
            graph = self._graphs.find(key, compute, numbers)
        if graph is not None:
            return graph.replay(numbers)[: len(rows)].clone()
        return compute(numbers.to(device, non_blocking=True))
