"""The forward pass over windows of tokenised texts, for classification: the same few shapes again and again, as graphs.

A window is put in order of length and cut into pieces of a few fixed shapes (`data.packing.cut_window`). What a piece
needs goes to the device as one array; positions and segments are worked out there. A shape runs eagerly when it is
first met, which warms up what capture must not, and as a CUDA graph from then on. Nothing waits for the device before a
window's result is asked for, so the next window is packed and launched while the device works on this one.

Shapes depend on the window alone, and so do its results: not on what came before, and not on where a run was resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.packing import Piece, cut_window
from brimful.data.tokens.encoder import Tokens
from brimful.hardware.capture import capture
from brimful.kernels.layout import PackedInputs, PackedShape, Segments
from brimful.kernels.precompile import precompiled
from brimful.models.packed.packed_forward import Execution
from brimful.step.precision import Precision

#: Shapes kept as graphs; there are a handful of length classes and of budgets in each.
_MOST_GRAPHS = 64

Shape = tuple[int, int, int]


class Pending:
    """Logits on their way to the host. busy_s: seconds of the device between the two events, known with the result."""

    def __init__(
        self, rows: list[np.ndarray], logits: Tensor | None, num_rows: int, num_outputs: int, began: Any
    ) -> None:
        self._rows, self._num_rows, self._num_outputs, self._began = rows, num_rows, num_outputs, began
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True)
        self._logits: Tensor | None = None
        self.busy_s = 0.0
        if logits is not None:
            self._logits = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
            self._logits.copy_(logits, non_blocking=True)
        self._ended.record()

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the window's rows, NaN for texts without tokens. Waits for the device."""
        self._ended.synchronize()
        self.busy_s = self._began.elapsed_time(self._ended) / 1e3
        logits_NC = np.full((self._num_rows, self._num_outputs), np.nan, dtype=np.float32)
        if self._logits is not None:
            logits_NC[np.concatenate(self._rows)] = self._logits.numpy()
        return logits_NC


@dataclass(frozen=True, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    staged: Tensor
    logits_SC: Tensor


class PackedForward:
    """Logits of windows by a packed execution on a GPU.

    budget: most tokens of a piece. longest: longest sequence in tokens. typical_length: mean length to come, by which
    kernels are chosen. captured: False to launch one kernel after another. fused: whether layers are compiled, around
    our attention: their kernels are compiled together before the first pass. note: called once with the reason if
    capture turns out to be impossible.
    """

    def __init__(
        self,
        execution: Execution,
        precision: Precision,
        *,
        budget: int,
        longest: int,
        padding_id: int,
        typical_length: int | None,
        captured: bool,
        fused: bool,
        note: Callable[[str], None],
    ) -> None:
        self.execution, self.precision = execution, precision
        self._budget, self._longest, self._padding_id = budget, longest, padding_id
        self._typical_length, self._note = typical_length, note
        self._num_outputs = int(execution.model.config.num_labels)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, _Graph] = {}
        self._met: set[Shape] = set()
        self._possible, self._fused = captured, fused

    @torch.inference_mode()
    def submit(self, tokens: Tokens) -> Pending:
        """Launches the pass over all of a window's texts."""
        pieces = cut_window(tokens.lengths, self._budget, self._longest)
        began = torch.cuda.Event(enable_timing=True)
        began.record()
        with self.precision.autocast():
            found = [self._run(piece, tokens) for piece in pieces]
        logits = torch.cat(found) if found else None
        return Pending([piece.rows for piece in pieces], logits, len(tokens), self._num_outputs, began)

    def _run(self, piece: Piece, tokens: Tokens) -> Tensor:
        shape = (piece.num_tokens, piece.num_slots, piece.max_length)
        device = self.precision.device
        staged = stage(piece, tokens, self._padding_id, pinned=True)
        graph = self._graphs.get(shape)
        if graph is None and shape in self._met and self._possible and len(self._graphs) < _MOST_GRAPHS:
            graph = self._capture(shape, tokens.types is not None, len(staged))
        if graph is None:
            arrived, with_types = staged.to(device, non_blocking=True), tokens.types is not None
            if self._fused and not self._met:
                with precompiled():
                    self._compute(arrived, shape, with_types)
                self.precision.after_update()  # copies of the weights that were made within
            self._met.add(shape)
            logits_SC = self._compute(arrived, shape, with_types)
            return logits_SC[: len(piece.rows)]
        graph.staged.copy_(staged, non_blocking=True)
        graph.graph.replay()
        return graph.logits_SC[: len(piece.rows)].clone()

    def _compute(self, staged: Tensor, shape: Shape, with_types: bool) -> Tensor:
        logits: Tensor = self.execution(unstage(staged, shape, with_types, self._typical_length)).float()
        return logits

    def _capture(self, shape: Shape, with_types: bool, size: int) -> _Graph | None:
        static = torch.zeros(size, dtype=torch.int32, device=self.precision.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph, self._pool):
                logits_SC = self._compute(static, shape, with_types)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, torch.AcceleratorError) as refusal:
            self._possible = False
            self._note(f"the pass runs without graphs: {str(refusal).splitlines()[0][:200]}")
            return None
        self._graphs[shape] = _Graph(graph=graph, staged=static, logits_SC=logits_SC)
        return self._graphs[shape]


def stage(piece: Piece, tokens: Tokens, padding_id: int, *, pinned: bool) -> Tensor:
    """What a piece is made of in one int32 tensor: ids (T), offsets (N + 1), last places (S), and token types (T).

    numpy writes it: for so many numbers torch would wake a thread a core, and these spin where workers tokenise.
    """
    lengths = tokens.lengths[piece.rows]
    used, count = int(lengths.sum()), len(piece.rows)
    shape = PackedShape(num_tokens=piece.num_tokens, num_slots=piece.num_slots, max_length=piece.max_length)
    size, slots, segments = shape.num_tokens, shape.num_slots, shape.num_segments
    num_numbers = size + segments + 1 + slots + (0 if tokens.types is None else size)
    memory = torch.empty(num_numbers, dtype=torch.int32, pin_memory=pinned)
    staged = memory.numpy()
    staged.fill(0)
    ends = np.cumsum(lengths)
    place_T = np.repeat(tokens.offsets[piece.rows] - (ends - lengths), lengths) + np.arange(used)
    ids_T = tokens.ids[place_T]
    staged[:used], staged[used:size] = ids_T, padding_id
    offsets, last_S = staged[size : size + segments + 1], staged[size + segments + 1 :][:slots]
    offsets[1 : count + 1], offsets[count + 1 : slots + 1] = ends, used
    # The tail that no sequence uses, cut as long as the longest of them may be: kernels are made for no longer ones.
    offsets[slots + 1 :] = np.minimum(used + np.arange(1, segments - slots + 1) * shape.max_length, size)
    last_S[:count] = _last_read(ids_T, ends, lengths, padding_id)
    if tokens.types is not None:
        staged[size + segments + 1 + slots :][:used] = tokens.types[place_T]
    return memory


def _last_read(ids_T: np.ndarray, ends: np.ndarray, lengths: np.ndarray, padding_id: int) -> np.ndarray:
    """Place of each sequence's last token that is not padding, of its first one if all are."""
    last = ends - 1
    wrong = np.flatnonzero(ids_T[last] == padding_id)
    for row in wrong:
        sequence = ids_T[ends[row] - lengths[row] : ends[row]]
        last[row] = ends[row] - lengths[row] + np.flatnonzero(sequence != padding_id).max(initial=0)
    return last


def unstage(staged: Tensor, shape: Shape, with_types: bool, typical_length: int | None) -> PackedInputs:
    """The inputs that `stage` wrote, made on the device."""
    num_tokens, num_slots, max_length = shape
    num_segments = PackedShape(num_tokens=num_tokens, num_slots=num_slots, max_length=max_length).num_segments
    sizes = [num_tokens, num_segments + 1, num_slots, num_tokens if with_types else 0]
    ids_T, cu_seqlens_N, last_S, types_T = staged.split(sizes)
    places_T = torch.arange(num_tokens, dtype=torch.int32, device=staged.device)
    segment_T = torch.searchsorted(cu_seqlens_N[1:].contiguous(), places_T, right=True)
    positions_T = places_T - cu_seqlens_N[segment_T]
    return PackedInputs(
        ids_T=ids_T.long(),
        positions_T=positions_T.long(),
        types_T=types_T.long() if with_types else None,
        segments=Segments(
            cu_seqlens_N=cu_seqlens_N.contiguous(),
            segment_T=segment_T,
            max_length=max_length,
            typical_length=typical_length,
        ),
        first_S=cu_seqlens_N[:num_slots].clamp(max=num_tokens - 1).long(),
        last_S=last_S.long(),
    )
