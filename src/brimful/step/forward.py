"""The forward pass over windows of tokenised texts, which evaluation and classification share.

Nothing waits for the device before a window's logits are asked for, so the next window is prepared and launched while
the device works on this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from brimful.core.errors import RowsRefusedError
from brimful.core.records import OutOfMemory, Work
from brimful.data.batches.batch import Layout, PaddedLayout
from brimful.data.tokens.encoder import Tokens
from brimful.hardware.read_back import ReadBack
from brimful.kernels.layout import Inputs, PaddedInputs, map_tensors
from brimful.models.end_tokens import count_ends, end_token_of
from brimful.models.packed.packed_forward import LayoutModel, PaddedModel
from brimful.step.precision import Precision
from brimful.step.recovery import HintOf, until_it_fits

#: Given numbers of a window's rows, their logits (M, C) computed in another way.
Again = Callable[[np.ndarray], np.ndarray]


class PendingLogits:
    """Logits of a window on their way to the host.

    again: computes rows whose logits are all NaN in another way; None where these are what the model gives.
    """

    def __init__(
        self, read_back: ReadBack, rows: list[np.ndarray], num_rows: int, host_s: float, again: Again | None = None
    ) -> None:
        self._read_back, self._rows, self._num_rows, self._host_s = read_back, rows, num_rows, host_s
        self._again = again

    @property
    def busy_s(self) -> float:
        """Seconds that they took, once they are there: the device's, or where it is the CPU the host's."""
        return self._read_back.seconds or self._host_s

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the window's rows, NaN for texts without tokens. Waits for the device."""
        found = self._read_back.wait().numpy()
        logits_NC = np.full((self._num_rows, found.shape[1]), np.nan, dtype=np.float32)
        if self._rows:
            rows = np.concatenate(self._rows)
            logits_NC[rows] = found
            if self._again is not None and len(without := np.sort(rows[np.isnan(found).all(axis=1)])):
                logits_NC[without] = self._again(without)
        return logits_NC


class Forward:
    """A forward pass over windows of texts. The model is in eval mode.

    A window that memory runs out in is computed again, in smaller pieces; so are all that follow.

    compiled: False to run layers as they were before they were compiled. where: what the pass is part of. hear: called
    with each time that memory ran out, once the window is under way. after_pass: called after each micro-batch; it may
    raise, to leave a window undone. remedy: says what to do where one text does not fit. refused: called with the
    first rows that the model's own code cannot take: their logits, and those of later ones, are NaN. Where none were
    answered before them, or without it, they are an error. is_shared: whether other processes take part in each pass:
    then none is computed again by one alone.
    """

    compiled, is_shared = True, False
    where: Work = "classification"
    after_pass: Callable[[], None] | None = None
    remedy: HintOf | None = None
    refused: Callable[[RowsRefusedError], None] | None = None

    def __init__(self, execution: LayoutModel, precision: Precision) -> None:
        self.execution, self.precision = execution, precision
        self.num_outputs = int(execution.model.config.num_labels)
        self._end_id = end_token_of(execution.model) if isinstance(execution, PaddedModel) else None
        self._has_answered = self._has_refused = False
        self.hear: Callable[[OutOfMemory], None] = lambda found: None

    def windows(self, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of a whole data set a window at a time, the longest first; those without tokens are in none."""
        raise NotImplementedError

    def submit(self, tokens: Tokens) -> PendingLogits:
        """Launch the pass over all of a window's texts. Raises: MemoryFullError."""
        budget = _WindowBudget(self, int(tokens.lengths.max(initial=1)))
        device = self.precision.device
        work = partial(self._submit, tokens)
        return until_it_fits(work, budget, device, self.hear, where=self.where, remedy=self.remedy)

    @property
    def most_tokens(self) -> int:
        """Of a piece of a window."""
        raise NotImplementedError

    def limit_to(self, num_tokens: int) -> bool:
        """Cut windows into pieces of at most so many tokens, or of one text; False if texts must not be parted."""
        raise NotImplementedError

    @property
    def captures(self) -> bool:
        """True while passes whose shapes come again are captured."""
        return False

    def stop_capturing(self) -> None:
        """Launch one kernel after another from now on."""

    def abandon(self) -> None:
        """Drop all graphs."""

    def _submit(self, tokens: Tokens) -> PendingLogits:
        device, since = self.precision.device, None
        if device.type == "cuda":
            since = torch.cuda.Event(enable_timing=True)
            since.record()
        began, rows, found = time.perf_counter(), [], []
        with torch.inference_mode():
            for part in _of_alike_ends(tokens, self._end_id):
                for members, logits_SC in self._passes(part):
                    if self.after_pass is not None:
                        self.after_pass()
                    rows.append(members)
                    found.append(logits_SC[: len(members)])
            logits_MC = (
                torch.cat(found) if found else torch.zeros(0, self.num_outputs, dtype=torch.float32, device=device)
            )
            read_back = ReadBack(logits_MC, since=since, blocking=True)
        host_s = 0.0 if device.type == "cuda" else time.perf_counter() - began
        return PendingLogits(read_back, rows, len(tokens), host_s, self._again(tokens))

    def _again(self, tokens: Tokens) -> Again | None:
        """Computes rows of a window in another way, where NaN may say that they must be."""
        return None

    def _passes(self, tokens: Tokens) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Rows of each micro-batch, and its logits (S, C): those of rows come first."""
        raise NotImplementedError

    def _logits_SC(self, inputs: Inputs) -> Tensor:
        """One pass. Casts of weights are its own: a graph must not read those of another pass."""
        context = replace(self.precision.context(), compiled=self.compiled)
        try:
            with self.precision.autocast():
                logits_SC: Tensor = self.execution(inputs, context).logits.float()
        except RowsRefusedError as error:
            if self.refused is None or not self._has_answered or not isinstance(inputs, PaddedInputs):
                raise
            if not self._has_refused:
                self.refused(error)
            self._has_refused = True
            return torch.full((len(inputs.ids_RL), self.num_outputs), torch.nan, device=self.precision.device)
        self._has_answered = True
        return logits_SC


class _WindowBudget:
    """The token budget of one window. longest: tokens of its longest text."""

    def __init__(self, forward: Forward, longest: int) -> None:
        self._forward, self._longest = forward, longest
        self._began = forward.most_tokens

    @property
    def most_tokens(self) -> int:
        return self._forward.most_tokens

    @property
    def has_fitted(self) -> bool:
        return False  # windows are alike

    @property
    def captures(self) -> bool:
        return self._forward.captures

    def abandon(self) -> bool:
        self._forward.abandon()
        return not self._forward.is_shared

    def halve(self, *, in_capture: bool) -> bool:
        if self.most_tokens > self._longest and self._forward.limit_to(max(self.most_tokens // 2, self._longest)):
            return True
        if not in_capture:
            return False
        self._forward.stop_capturing()
        return self._forward.limit_to(self._began)


class LayoutForward(Forward):
    """The pass over texts laid out as in training: on the CPU, and on padded rows.

    batch_tokens, most_rows: as many are laid out at once. alike: only texts of one length are.
    """

    def __init__(
        self, execution: LayoutModel, layout: Layout, precision: Precision, *, batch_tokens: int, most_rows: int,
        alike: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(execution, precision)
        self._alike = alike
        self._layout, self._batch_tokens, self._most_rows = layout, batch_tokens, most_rows

    def windows(self, lengths_N: np.ndarray) -> Iterator[np.ndarray]:
        """As many rows as are laid out at once."""
        found = chunks(lengths_N, self._batch_tokens, self._most_rows)
        return (part for rows in found for part in _of_one_length(rows, lengths_N)) if self._alike else found

    @property
    def most_tokens(self) -> int:
        """As many as are laid out at once, or fewer in one micro-batch."""
        return min(self._batch_tokens, self._layout.most_tokens)

    def limit_to(self, num_tokens: int) -> bool:
        """As `Forward` has it."""
        layout = self._layout
        if isinstance(layout, PaddedLayout) and not layout.split:
            self._batch_tokens = num_tokens if self._alike else self._batch_tokens
            return self._alike
        self._layout, self._batch_tokens = layout.limited(num_tokens, layout.max_length), num_tokens
        return True

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


def _of_alike_ends(tokens: Tokens, end_id: int | None) -> list[Tokens]:
    """The same window once for each number of end tokens, without the rows that have another: a head that looks for
    them takes no others together. end_id: the end token, None where the head looks for none."""
    if end_id is None:
        return [tokens]
    ends_N = count_ends([tokens.sequence(row) for row in range(len(tokens))], end_id)
    asked_N = tokens.lengths > 0
    numbers = np.unique(ends_N[asked_N])
    if len(numbers) < 2:
        return [tokens]
    return [tokens.without(np.flatnonzero(ends_N != number).tolist()) for number in numbers]


def _of_one_length(rows: np.ndarray, lengths_N: np.ndarray) -> list[np.ndarray]:
    """The same rows, which come the longest first, cut where the length changes."""
    return np.split(rows, np.flatnonzero(np.diff(lengths_N[rows])) + 1)


def _to(inputs: Inputs, device: torch.device) -> Inputs:
    def send(tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.numpy()[...] = tensor.numpy()  # torch would wake a thread a core for it, as `pack_numbers` says
        return pinned.to(device, non_blocking=True)

    return inputs if device.type == "cpu" else map_tensors(inputs, send)
