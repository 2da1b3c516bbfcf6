"""Logits of tokenised rows: the forward pass that evaluation and classification share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.batch import Layout
from brimful.data.tokens.encoder import Tokens
from brimful.kernels.layout import Inputs, map_tensors
from brimful.models.packed.packed_forward import Execution
from brimful.step.precision import Precision


def predict_logits(
    execution: Execution,
    tokens: Tokens,
    layout: Layout,
    precision: Precision,
    *,
    batch_tokens: int,
    most_rows: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """(N, C) fp32 logits of all rows, in their order; computed in eval mode, in order of length. NaN for no tokens.

    batch_tokens, most_rows: as many are laid out at once. progress: called with the number of rows done.
    """
    device = next(execution.model.parameters()).device
    was_training = execution.model.training
    execution.model.eval()
    places: list[np.ndarray] = []
    found: list[Tensor] = []
    done = 0
    try:
        # Layers compiled for training run as they are: compiling them for evaluation too would cost more than it saves.
        with torch.inference_mode(), precision.autocast(), torch.compiler.set_stance("force_eager"):
            for rows in chunks(tokens.lengths, batch_tokens, most_rows):
                for inputs, members, _ in layout.arrange(*tokens.sequences(rows)):
                    logits_SC = execution(_to(inputs, device))[: len(members)]
                    found.append(logits_SC.float())
                    places.append(rows[members])
                done += len(rows)
                if progress:
                    progress(done)
    finally:
        execution.model.train(was_training)
    num_outputs = int(execution.model.config.num_labels)
    together = torch.cat([*found, torch.zeros(0, num_outputs, device=device)]).cpu().numpy()
    logits_NC = np.full((len(tokens), together.shape[1]), np.nan, dtype=np.float32)
    logits_NC[np.concatenate([*places, np.zeros(0, dtype=np.int64)])] = together
    return logits_NC


@dataclass(frozen=True)
class Done:
    """Logits that are there. busy_s: seconds that they took."""

    logits_NC: np.ndarray
    busy_s: float

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the texts."""
        return self.logits_NC


class LayoutForward:
    """The forward pass over windows of texts laid out as in training: on the CPU, and on padded rows."""

    def __init__(
        self, execution: Execution, layout: Layout, precision: Precision, *, batch_tokens: int, most_rows: int
    ) -> None:
        self._execution, self._layout, self._precision = execution, layout, precision
        self._batch_tokens, self._most_rows = batch_tokens, most_rows

    def submit(self, tokens: Tokens) -> Done:
        """Runs the window to its end."""
        began = time.perf_counter()
        logits_NC = predict_logits(
            self._execution,
            tokens,
            self._layout,
            self._precision,
            batch_tokens=self._batch_tokens,
            most_rows=self._most_rows,
        )
        return Done(logits_NC, time.perf_counter() - began)


def chunks(lengths: np.ndarray, batch_tokens: int, most_rows: int) -> Iterator[np.ndarray]:
    """Numbers of the rows that have tokens, the longest first, cut where `batch_tokens` or `most_rows` are reached."""
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    ends = np.cumsum(lengths[order])
    start = 0
    while start < len(order):
        base = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, base + batch_tokens, side="right"))
        stop = min(max(stop, start + 1), start + most_rows)
        yield order[start:stop]
        start = stop


def _to(inputs: Inputs, device: torch.device) -> Inputs:
    if device.type == "cpu":
        return inputs
    return map_tensors(inputs, lambda tensor: _pinned(tensor).to(device, non_blocking=True))


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, by numpy: torch would wake a thread a core for it, as `step.forward.stage` says."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.numpy()[...] = tensor.numpy()
    return copy
