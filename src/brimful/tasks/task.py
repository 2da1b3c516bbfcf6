"""Tasks: the loss as a sum over rows, its denominator, and the metrics.

The plain Hugging Face loss is a mean. Here it is `loss_rows_S(...).sum() / denominator`, with the denominator of the
whole effective batch: whatever the split into micro-batches, the gradients add up to the one of the plain batch. Where
rows have weights of their own, each addend is times its row's weight, and the denominator sums these in place of rows.

    task           row's addend to the sum               denominator              targets
    single_label   cross entropy x weight of its class   sum of those weights     (S,)   int64
    multi_label    sum over outputs of cross entropies   rows x outputs           (S, C) float32; all rows: LabelRows
    regression     sum over outputs of squared errors    rows x outputs           (S, C) float32

Legend: S rows (slots of a micro-batch), N all rows, C outputs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.core.errors import OptionError, printable
from brimful.core.records import LabelSpace, TargetScale
from brimful.tasks.label_rows import Targets, dense, label_counts
from brimful.tasks.metrics.accumulators import Accumulator, ClassMetrics, Metrics, NumberMetrics, SetMetrics


class Task(ABC):
    """One kind of classification. Instances hold no state that changes."""

    def __init__(self, space: LabelSpace) -> None:
        self.space = space

    @abstractmethod
    def loss_rows_S(self, logits_SC: Tensor, targets_S: Tensor) -> Tensor:
        """Each row's addend to the loss sum, in the dtype of the logits."""

    def denominator(self, targets_N: np.ndarray, weights_N: np.ndarray | None = None) -> float:
        """Denominator of the loss of an effective batch with these targets. weights_N: of its rows; None: 1 each."""
        rows = len(targets_N) if weights_N is None else weights_N.sum(dtype=np.float64)
        return float(rows * self.space.num_outputs)

    def answers(self, logits_MC: np.ndarray) -> np.ndarray:
        """(M, C) outputs as the saved model gives them, of those that the model in training gives."""
        return logits_MC

    @abstractmethod
    def accumulator(self) -> Accumulator:
        """A new accumulator of this task's metrics, for rows that come in parts."""

    def metrics(self, logits_NC: np.ndarray, targets_N: np.ndarray) -> Metrics:
        """Metrics of rows that are all there, by name, without the loss."""
        accumulator = self.accumulator()
        accumulator.add(self.answers(logits_NC), targets_N)
        return accumulator.result()

    def loss(self, logits_NC: np.ndarray, targets_N: np.ndarray) -> float:
        """Mean loss over these rows as the plain batch has it, in fp64."""
        rows = self.loss_rows_S(torch.from_numpy(logits_NC).double(), torch.from_numpy(targets_N))
        return float(rows.sum()) / self.denominator(targets_N)

    def empty_targets(self, num_rows: int) -> np.ndarray:
        """Targets for slots that hold no row: any valid value."""
        return np.zeros((num_rows, self.space.num_outputs), dtype=np.float32)


#: Metrics that are better when lower; of all others more is better.
LOWER_IS_BETTER = frozenset({"loss", "mse", "rmse", "mae"})


class SingleLabel(Task):
    """One of C classes. Same arithmetic as torch's CrossEntropyLoss with weights and label smoothing."""

    def __init__(self, space: LabelSpace, class_weights_C: np.ndarray | None = None, smoothing: float = 0.0) -> None:
        super().__init__(space)
        self.class_weights_C, self.smoothing = class_weights_C, smoothing

    def loss_rows_S(self, logits_SC: Tensor, targets_S: Tensor) -> Tensor:
        weights_C = _like(self.class_weights_C, logits_SC)
        return F.cross_entropy(logits_SC, targets_S, weights_C, reduction="none", label_smoothing=self.smoothing)

    def denominator(self, targets_N: np.ndarray, weights_N: np.ndarray | None = None) -> float:
        class_weights_C = np.ones(self.space.num_outputs) if self.class_weights_C is None else self.class_weights_C
        of_class_N = class_weights_C[targets_N].astype(np.float64)
        return float(of_class_N.sum() if weights_N is None else (of_class_N * weights_N).sum())

    def empty_targets(self, num_rows: int) -> np.ndarray:
        return np.zeros(num_rows, dtype=np.int64)

    def accumulator(self) -> ClassMetrics:
        return ClassMetrics(self.space.num_outputs)


class MultiLabel(Task):
    """Any number of C labels. Same arithmetic as torch's BCEWithLogitsLoss; class weights are its pos_weight."""

    def __init__(self, space: LabelSpace, class_weights_C: np.ndarray | None = None, smoothing: float = 0.0) -> None:
        super().__init__(space)
        self.class_weights_C, self.smoothing = class_weights_C, smoothing

    def loss_rows_S(self, logits_SC: Tensor, targets_S: Tensor) -> Tensor:
        targets_SC = targets_S.to(logits_SC.dtype) * (1 - self.smoothing) + self.smoothing / 2
        pos_weight_C = _like(self.class_weights_C, logits_SC)
        rows_SC = F.binary_cross_entropy_with_logits(logits_SC, targets_SC, reduction="none", pos_weight=pos_weight_C)
        return rows_SC.sum(-1)

    def accumulator(self) -> SetMetrics:
        return SetMetrics(self.space.num_outputs)


class Regression(Task):
    """C numbers. Same arithmetic as torch's MSELoss, of targets in the units of `scale`."""

    def __init__(self, space: LabelSpace, scale: TargetScale | None = None) -> None:
        super().__init__(space)
        self.scale = scale

    def loss_rows_S(self, logits_SC: Tensor, targets_S: Tensor) -> Tensor:
        targets_SC = targets_S.to(logits_SC.dtype)
        if self.scale is not None:
            centers_C = _on_device(self.scale.centers, logits_SC.device, logits_SC.dtype)
            targets_SC = (targets_SC - centers_C) / self.scale.spread
        return (logits_SC - targets_SC).square().sum(-1)

    def answers(self, logits_MC: np.ndarray) -> np.ndarray:
        if self.scale is None:
            return logits_MC
        found: np.ndarray = logits_MC.astype(np.float64) * self.scale.spread + np.asarray(self.scale.centers)
        return found.astype(np.float32)

    def accumulator(self) -> NumberMetrics:
        return NumberMetrics(self.space.num_outputs)


def make_task(
    space: LabelSpace, targets_N: Targets, class_weights: str | np.ndarray | None = None, smoothing: float = 0.0,
    weights_N: np.ndarray | None = None, scale: TargetScale | None = None,
) -> Task:  # fmt: skip
    """The task of a label space. `targets_N`, the training targets, are what `balanced` weights are counted on.

    class_weights: as of TrainOptions, or (C,) fp32 in the order of the labels. weights_N: of the training rows, which
    count as so many rows each; None: as one. scale: of targets of a regression.
    Raises: OptionError for class weights or label smoothing that the task does not have.
    """
    if space.task == "regression":
        if class_weights is not None or smoothing:
            given = "--class-weights" if class_weights is not None else "--label-smoothing-factor"
            raise OptionError(f"{given} is for labels, and the task is regression", hint=f"leave {given} out")
        return Regression(space, scale)
    kind = SingleLabel if space.task == "single_label" else MultiLabel
    if isinstance(class_weights, np.ndarray):
        return kind(space, class_weights, smoothing)
    return kind(space, _class_weights_C(class_weights, space, targets_N, weights_N), smoothing)


def _class_weights_C(
    text: str | None, space: LabelSpace, targets_N: Targets, weights_N: np.ndarray | None
) -> np.ndarray | None:
    if text is None:
        return None
    if text == "balanced":
        return _balanced_weights_C(space, targets_N, np.ones(len(targets_N)) if weights_N is None else weights_N)
    weights = np.ones(space.num_outputs, dtype=np.float32)
    names: Mapping[str, int] = {name: i for i, name in enumerate(space.names)} | dict(space.values)
    for name, weight in _weights_in(text, names):
        index = names[name]
        if not 0 < weight < float("inf"):
            raise OptionError(
                f"--class-weights: the weight of {printable(name)!r} is {weight}: it must be above 0",
                hint="leave the label out for a weight of 1",
            )
        weights[index] = weight
    return weights


def _weights_in(text: str, names: Collection[str]) -> Iterator[tuple[str, float]]:
    """Label and weight of each part of `a=3,b=1`, or of a JSON object. Labels may have commas, and quotation marks
    around them. Raises: OptionError."""
    if text.lstrip().startswith("{"):
        parts = _weights_in_json(text)
    else:
        parts, begun = [], None
        for piece in text.split(","):
            begun = piece if begun is None else f"{begun},{piece}"
            name, _, number = begun.rpartition("=")
            if (bare := name.strip().strip('"')) in names:
                parts.append((bare, number))
                begun = None
        parts += [] if begun is None else [(begun, "")]
    for name, number in parts:
        try:
            if name not in names:
                raise ValueError
            yield name, float(number)
        except (ValueError, TypeError):
            shown = f"{name}={number}" if number != "" else name
            raise OptionError(
                f"--class-weights: {printable(shown)!r} is not a label of the data with a number",
                hint="write balanced, or label=weight for each label, e.g. spam=3,ham=1; the labels are "
                + ", ".join(printable(n, 40) for n in list(names)[:20]),
            ) from None


def _weights_in_json(text: str) -> list[tuple[str, Any]]:
    try:
        return list(json.loads(text).items())
    except ValueError as error:
        said = f"--class-weights is no JSON object: {printable(error)}"
        raise OptionError(said, hint='as in {"sports, games": 3, "other": 1}') from error


def _balanced_weights_C(space: LabelSpace, targets_N: Targets, weights_N: np.ndarray) -> np.ndarray:
    """Single label: rows / (classes x rows of the class). Multi-label: negatives / positives. 1 for one not seen.

    weights_N: rows that each row counts as.
    """
    num_rows = weights_N.sum(dtype=np.float64)
    if space.task == "single_label":
        counts_C = np.bincount(dense(targets_N), weights=weights_N, minlength=space.num_outputs).astype(np.float64)
        seen_C = np.where(counts_C > 0, counts_C, 1.0)
        weights_C = num_rows / (max(1, np.count_nonzero(counts_C)) * seen_C)
    else:
        counts_C = label_counts(targets_N, weights_N)
        seen_C, least = np.where(counts_C > 0, counts_C, 1.0), num_rows / max(1, len(targets_N))
        weights_C = np.maximum(num_rows - counts_C, least) / seen_C
    return np.where(counts_C > 0, weights_C, 1.0).astype(np.float32)


@lru_cache(maxsize=8)
def _on_device(values_C: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Class weights where the logits are: copied once, so that a captured step finds them there."""
    return torch.tensor(values_C, device=device, dtype=dtype)


def _like(values_C: np.ndarray | None, logits_SC: Tensor) -> Tensor | None:
    if values_C is None:
        return None
    return _on_device(tuple(values_C.tolist()), logits_SC.device, logits_SC.dtype)
