"""Loss and metrics of a whole data set whose logits come in parts."""

from __future__ import annotations

import numpy as np
import torch

from brimful.tasks.metrics.accumulators import Accumulator, Metrics, blocks
from brimful.tasks.task import Task


class Evaluation:
    """The mean loss that the plain batch of all rows has, in fp64, and the task's metrics.

    One million rows x 1,000 labels take the memory of a few thousand rows: no logits are kept.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._loss, self._denominator = task, 0.0, 0.0
        self.accumulator: Accumulator = task.accumulator()

    def add(self, logits_MC: np.ndarray, targets_M: np.ndarray) -> None:
        """Take the fp32 logits of some rows with their targets."""
        for rows in blocks(*logits_MC.shape):
            logits = torch.from_numpy(np.ascontiguousarray(logits_MC[rows])).double()
            targets = np.ascontiguousarray(targets_M[rows])
            self._loss += float(self._task.loss_rows_S(logits, torch.from_numpy(targets)).sum())
            self._denominator += self._task.denominator(targets)
        self.accumulator.add(self._task.answers(logits_MC), targets_M)

    def result(self) -> Metrics:
        """The loss and all metrics, by name."""
        return {"loss": self._loss / self._denominator if self._denominator else float("nan")} | (
            self.accumulator.result()
        )
