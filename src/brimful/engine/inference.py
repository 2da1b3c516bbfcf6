"""Logits of a whole data set, by the forward pass that classification runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import nn

from brimful.data.batches.batch import PackedLayout
from brimful.data.tokens.encoder import Tokens
from brimful.engine.assemble import Assembled
from brimful.step.forward import Forward, LayoutForward, PendingLogits
from brimful.step.graphs.captured_forward import PackedForward
from brimful.step.graphs.captured_step import CapturedStep

#: Tokens of padded rows that are laid out at once.
_PADDED_TOKENS = 4096


def evaluation_forward(built: Assembled, *, most_rows: int, note: Callable[[str], None]) -> Forward:
    """The forward pass of a model in training, as large as its largest micro-batch.

    Captured where its steps are, in the memory of their graphs. Layers compiled for training run as they are: compiling
    them for evaluation too would cost more than it saves. most_rows: sequences of an effective batch.
    """
    layout, step = built.layout, built.step
    if isinstance(layout, PackedLayout) and built.precision.device.type == "cuda" and not layout.groups:
        forward: Forward = PackedForward(
            built.execution,
            built.precision,
            budget=layout.most_tokens,
            longest=layout.max_length,
            padding_id=layout.padding_id,
            typical_length=layout.typical_length,
            attention=layout.attention,
            recorder=step.pool if isinstance(step, CapturedStep) else None,
            fused=False,
            note=note,
        )
    else:
        tokens = layout.most_tokens if isinstance(layout, PackedLayout) else _PADDED_TOKENS
        forward = LayoutForward(built.execution, layout, built.precision, batch_tokens=tokens, most_rows=most_rows)
    forward.compiled = False
    return forward


def keep_modes(model: nn.Module) -> Callable[[], None]:
    """Return a function that puts each module back in train or eval mode, as it is now."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, a model in training is only read."""
    restore_modes = keep_modes(model)
    model.eval()
    try:
        yield
    finally:
        restore_modes()


def predict_logits(forward: Forward, tokens: Tokens, *, progress: Callable[[int], None] | None = None) -> np.ndarray:
    """(N, C) fp32 logits of all rows, in their order. NaN for no tokens.

    progress: called with the number of rows launched.
    """
    logits_NC = np.full((len(tokens), forward.num_outputs), np.nan, dtype=np.float32)
    pending: tuple[np.ndarray, PendingLogits] | None = None
    num_rows = 0
    for rows in forward.windows(tokens.lengths):
        before, pending = pending, (rows, forward.submit(tokens.take(rows)))  # the device has it while this one waits
        if before is not None:
            logits_NC[before[0]] = before[1].result()
        num_rows += len(rows)
        if progress:
            progress(num_rows)
    if pending is not None:
        logits_NC[pending[0]] = pending[1].result()
    return logits_NC


@dataclass(frozen=True)
class Done:
    """Logits that are there. busy_s: seconds that they took."""

    logits_NC: np.ndarray
    busy_s: float

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the texts."""
        return self.logits_NC
