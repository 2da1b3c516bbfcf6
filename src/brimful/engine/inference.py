"""Logits and metrics of a whole data set, by the forward pass that classification runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import nn

from brimful.core.records import OutOfMemory
from brimful.data.batches.batch import PackedLayout, PaddedLayout
from brimful.data.tokens.encoder import Tokens
from brimful.engine.assemble import Assembled
from brimful.hardware.pulse import CAPTURE_S, FIRST_PIECE_S
from brimful.hardware.ranks import ALONE, Ranks
from brimful.step.forward import Forward, LayoutForward, PendingLogits
from brimful.step.graphs.captured_forward import PackedForward, PaddedForward
from brimful.step.graphs.captured_step import CapturedStep
from brimful.tasks.evaluation import Evaluation
from brimful.tasks.label_rows import Targets
from brimful.tasks.task import Task

#: Numbers of rows, and their logits.
Window: TypeAlias = tuple[np.ndarray, np.ndarray]
#: Tokens of a packed pass on a GPU that fill it, if its memory holds as many.
_PASS_TOKENS = 8192
#: Tokens of padded rows that are laid out at once.
_PADDED_TOKENS = 4096


def evaluation_forward(built: Assembled, *, most_rows: int, note: Callable[[str], None]) -> Forward:
    """The forward pass of a model in training.

    Captured where its steps are, in the memory of their graphs, and as large as has room there; not where weights are
    in parts of several processes, which would have to agree on each graph. Layers compiled for training run as they
    are: compiling them for evaluation too would cost more than it saves.

    most_rows: sequences of an effective batch.
    """
    layout, step = built.layout, built.step
    on_gpu = built.precision.device.type == "cuda"
    is_streamed = getattr(built.model, "streamed_layers", None) is not None  # updates that wait are made in it
    alone = not (is_streamed or step.update.gathers_weights)
    recorder = step.pool if isinstance(step, CapturedStep) and alone else None
    forward: Forward
    if isinstance(layout, PackedLayout) and on_gpu and not layout.groups:
        forward = PackedForward(
            built.execution,
            built.precision,
            budget=_most_tokens(built),
            longest=layout.max_length,
            padding_id=layout.padding_id,
            typical_length=layout.typical_length,
            attention=layout.attention,
            recorder=recorder,
            fused=False,
            note=note,
        )
    elif isinstance(layout, PaddedLayout) and on_gpu and layout.split:
        forward = PaddedForward(
            built.execution,
            built.precision,
            budget=layout.most_tokens,
            longest=layout.max_length,
            padding_id=layout.padding_id,
            recorder=recorder,
            note=note,
        )
    else:
        tokens = layout.most_tokens if isinstance(layout, PackedLayout) else _PADDED_TOKENS
        apart, alike = _company(built)
        forward = LayoutForward(
            built.execution,
            layout,
            built.precision,
            batch_tokens=tokens,
            most_rows=1 if apart else most_rows,
            alike=alike,
        )
    forward.compiled, forward.where, forward.is_shared = False, "evaluation", step.update.gathers_weights
    return forward


def _company(built: Assembled) -> tuple[bool, bool]:
    """Return whether rows are read one by one, and whether only rows of one length are read together.

    An answer is that of the row alone, whatever the model does in train mode.
    """
    found = built.packing.equivalence
    independent = found.independent or found.mixes_in_training
    return not (independent or found.alike_independent), not independent


def _most_tokens(built: Assembled) -> int:
    """Tokens of a pass that takes no more memory than a step, where steps are small: fewer passes, of fewer shapes.

    A step keeps 34 bytes a hidden unit and token in each layer (Korthikanti et al. 2022, arXiv 2205.05198); a pass has
    one layer at a time, its residual and fp32 casts besides: less than two of those.
    """
    depth = getattr(built.model.config.get_text_config(), "num_hidden_layers", None)
    most = built.layout.most_tokens
    return max(most, min(_PASS_TOKENS, most * (depth // 2))) if isinstance(depth, int) else most


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


def predict(forward: Forward, tokens: Tokens) -> Iterator[Window]:
    """Numbers of the rows of each window and their (M, C) fp32 logits, the longest rows first. Rows without tokens are
    in none. The device works on a window while the one before is read."""
    pending: tuple[np.ndarray, PendingLogits] | None = None
    for rows in forward.windows(tokens.lengths):
        before, pending = pending, (rows, forward.submit(tokens.take(rows)))
        if before is not None:
            yield before[0], before[1].result()
    if pending is not None:
        yield pending[0], pending[1].result()


def timed(windows: Iterator[Window], ranks: Ranks) -> Iterator[Window]:
    """Take windows of `predict` as pieces of work by which others see that this process gets on."""
    with ranks.pulse.pieces(first_s=FIRST_PIECE_S if ranks.pulse.step else CAPTURE_S):
        for window in windows:
            ranks.pulse.end_piece()
            yield window


def predict_logits(forward: Forward, tokens: Tokens) -> np.ndarray:
    """(N, C) fp32 logits of all rows, in their order. NaN for no tokens."""
    logits_NC = np.full((len(tokens), forward.num_outputs), np.nan, dtype=np.float32)
    for rows, logits_MC in predict(forward, tokens):
        logits_NC[rows] = logits_MC
    return logits_NC


def predict_together(forward: Forward, tokens: Tokens, ranks: Ranks) -> Iterator[Window]:
    """As `predict`, of rows that several processes share, of which this one leads: the others `send_part`."""
    if ranks.count == 1:
        yield from predict(forward, tokens)
        return
    mine = _part(tokens, ranks)
    for rows, logits_MC in timed(predict(forward, tokens.take(mine)), ranks):
        yield mine[rows], logits_MC
    for sender in range(1, ranks.count):
        while len(rows := ranks.receive(sender)):
            yield rows, ranks.receive(sender)


def send_part(forward: Forward, tokens: Tokens, ranks: Ranks) -> None:
    """Compute this process's part of the rows, and send it to the one that leads."""
    mine = _part(tokens, ranks)
    for rows, logits_MC in timed(predict(forward, tokens.take(mine)), ranks):
        ranks.send(mine[rows])
        ranks.send(logits_MC)
    ranks.send(mine[:0])


def _part(tokens: Tokens, ranks: Ranks) -> np.ndarray:
    """Rows of one process: of those sorted by length every so many, as few tokens apart as two neighbours are."""
    part: np.ndarray = np.argsort(-tokens.lengths, kind="stable")[ranks.rank :: ranks.count]
    return part


def evaluate_rows(
    forward: Forward, tokens: Tokens, targets_N: Targets, task: Task, *, progress: Callable[[], None],
    also: Callable[[np.ndarray, np.ndarray], None] | None = None, ranks: Ranks = ALONE,
) -> Evaluation:  # fmt: skip
    """Loss and metrics of all rows, each of which has tokens, a window at a time: no logits are kept.

    progress: called after each window. also: given the numbers of its rows and what the model answers. ranks: as of
    `predict_together`.
    """
    evaluation = Evaluation(task)
    for rows, logits_MC in predict_together(forward, tokens, ranks):
        evaluation.add(logits_MC, targets_N[rows])
        if also is not None:
            also(rows, task.answers(logits_MC))
        progress()
    return evaluation


@dataclass(frozen=True)
class Done:
    """Logits that are there. busy_s: seconds that they took. out_of_memory: each time that memory ran out meanwhile."""

    logits_NC: np.ndarray
    busy_s: float
    out_of_memory: tuple[OutOfMemory, ...] = ()

    def result(self) -> np.ndarray:
        """(N, C) fp32 in the order of the texts."""
        return self.logits_NC
