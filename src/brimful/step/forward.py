"""The forward pass over windows of tokenised texts, which evaluation and classification share.

Nothing waits for the device before a window's logits are asked for, so the next window is prepared and launched while
the device works on this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.batch import Layout
from brimful.data.tokens.encoder import Tokens
from brimful.hardware.read_back import ReadBack
from brimful.kernels.layout import Inputs, map_tensors
from brimful.models.packed.packed_forward import LayoutModel
from brimful.step.precision import Precision


class PendingLogits:
    """Logits of a window on their way to the host."""

    def __init__(self, read_back: ReadBack, rows: list[np.ndarray], num_rows: int, host_s: float) -> None:
        self._read_back, self._rows, self._num_rows, self._host_s = read_back, rows, num_rows, host_s

    @property
    def busy_s(self) -> float:
        """Seconds that they took, once they are there: the device's, or where it is the CPU the host's."""
        return self._read_back.seconds or self._host_s

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the window's rows, NaN for texts without tokens. Waits for the device."""
        found = self._read_back.wait().numpy()
        logits_NC = np.full((self._num_rows, found.shape[1]), np.nan, dtype=np.float32)
        if self._rows:
            logits_NC[np.concatenate(self._rows)] = found
        return logits_NC


class Forward:
    """A forward pass over windows of texts. The model is in eval mode.

    compiled: False to run layers as they were before they were compiled.
    """

    compiled = True

    def __init__(self, execution: LayoutModel, precision: Precision) -> None:
        self.execution, self.precision = execution, precision
        self.num_outputs = int(execution.model.config.num_labels)

    def windows(self, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of a whole data set a window at a time, the longest first; those without tokens are in none."""
        raise NotImplementedError

    def submit(self, tokens: Tokens) -> PendingLogits:
        """Launches the pass over all of a window's texts."""
        device, since = self.precision.device, None
        if device.type == "cuda":
            since = torch.cuda.Event(enable_timing=True)
            since.record()
        began, rows, found = time.perf_counter(), [], []
        with torch.inference_mode():
            for members, logits_SC in self._passes(tokens):
                rows.append(members)
                found.append(logits_SC[: len(members)])
            logits_MC = torch.cat(found) if found else torch.zeros(0, self.num_outputs, device=device)
            read_back = ReadBack(logits_MC, since=since, blocking=True)
        host_s = 0.0 if device.type == "cuda" else time.perf_counter() - began
        return PendingLogits(read_back, rows, len(tokens), host_s)

    def _passes(self, tokens: Tokens) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Rows of each micro-batch, and its logits (S, C): those of rows come first."""
        raise NotImplementedError

    def _logits_SC(self, inputs: Inputs) -> Tensor:
        """One pass. Casts of weights are its own: a graph must not read those of another pass."""
        context = replace(self.precision.context(), compiled=self.compiled)
        with self.precision.autocast():
            return self.execution(inputs, context).logits.float()


class LayoutForward(Forward):
    """The pass over texts laid out as in training: on the CPU, and on padded rows.

    batch_tokens, most_rows: as many are laid out at once.
    """

    def __init__(
        self, execution: LayoutModel, layout: Layout, precision: Precision, *, batch_tokens: int, most_rows: int
    ) -> None:
        super().__init__(execution, precision)
        self._layout, self._batch_tokens, self._most_rows = layout, batch_tokens, most_rows

    def windows(self, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """As many rows as are laid out at once."""
        return chunks(lengths_N, self._batch_tokens, self._most_rows)

    def _passes(self, tokens: Tokens) -> Iterator[tuple[np.ndarray, Tensor]]:
        for rows in self.windows(tokens.lengths):
            for inputs, members in self._layout.arrange(*tokens.sequences(rows)):
                yield rows[members], self._logits_SC(_to(inputs, self.precision.device))


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
    def send(tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.numpy()[...] = tensor.numpy()  # torch would wake a thread a core for it, as `pack_numbers` says
        return pinned.to(device, non_blocking=True)

    return inputs if device.type == "cpu" else map_tensors(inputs, send)
