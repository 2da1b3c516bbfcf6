"""The rows that a model is surest of and wrong about by their labels, and those whose label is likelier wrong.

A row's label is likelier wrong than the answer where the model is as sure of its own as it is, on average, of the rows
that have that label: confident learning (Northcutt et al. 2021, arXiv 1911.00068).

Legend: N rows, M rows of a window, C outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.core.records import LabelSpace
from brimful.core.units import target_text
from brimful.tasks.label_rows import Targets

#: Rows that are kept.
MOST = 40


@dataclass(frozen=True, kw_only=True)
class WrongRow:
    """One row. index: of the N. truth, label: as they are shown. score: of label; truth_score: of the truth."""

    index: int
    truth: str
    label: str
    score: float | None
    truth_score: float | None
    mislabelled: bool = False


class MistakeFinder:
    """Collects rows window by window, in any order; memory does not grow with them."""

    def __init__(self, space: LabelSpace, targets_N: Targets, *, most: int = MOST) -> None:
        self._space, self._targets_N, self._most = space, targets_N, most
        self._found: list[tuple[float, int, tuple[Any, ...]]] = []  # how wrong, index, what it is made of
        self._sure_C = np.zeros(space.num_outputs)  # sums of the probability of each true label
        self._rows_C = np.zeros(space.num_outputs)

    def add(self, rows_M: npt.NDArray[np.int64], logits_MC: npt.NDArray[np.float32]) -> None:
        """Take the logits of some rows. Rows without finite ones are left out."""
        finite_M = np.isfinite(logits_MC).all(axis=1)
        rows_M, logits_MC = rows_M[finite_M], logits_MC[finite_M].astype(np.float64)
        targets_M = self._targets_N[rows_M]
        if self._space.task == "single_label":
            self._classes(rows_M, logits_MC, targets_M)
        elif self._space.task == "multi_label":
            self._sets(rows_M, logits_MC, targets_M)
        else:
            self._numbers(rows_M, logits_MC, targets_M)
        self._found.sort(key=lambda each: (-each[0], each[1]))
        del self._found[self._most :]

    def result(self) -> tuple[WrongRow, ...]:
        """The rows, the most wrong first."""
        return tuple(self._shown(index, *parts) for _, index, parts in self._found)

    def _shown(self, index: int, *parts: Any) -> WrongRow:
        least_C = self._sure_C / np.maximum(self._rows_C, 1)
        if self._space.task == "single_label":
            return self._class(index, *parts, least_C=least_C)
        return (
            self._set(index, *parts, least_C=least_C)
            if self._space.task == "multi_label"
            else self._number(index, *parts)
        )

    def _keep(self, wrong_M: npt.NDArray[Any], rows_M: npt.NDArray[np.int64], *parts: npt.NDArray[Any]) -> None:
        """Of a window the most wrong. wrong_M: how much; 0 and less is right."""
        for place in np.argsort(-wrong_M, kind="stable")[: self._most]:
            if wrong_M[place] > 0:
                self._found.append((float(wrong_M[place]), int(rows_M[place]), tuple(p[place].item() for p in parts)))

    def _classes(self, rows_M: Any, logits_MC: Any, targets_M: Any) -> None:
        from scipy.special import softmax  # a tenth of a second, of a start that may need none of it

        scores_MC, places = softmax(logits_MC, axis=1), np.arange(len(rows_M))
        of_truth_M, given_M = scores_MC[places, targets_M], scores_MC.argmax(axis=1)
        np.add.at(self._sure_C, targets_M, of_truth_M)
        np.add.at(self._rows_C, targets_M, 1)
        of_given_M = scores_MC[places, given_M]
        wrong_M = np.where(given_M == targets_M, 0.0, of_given_M)
        self._keep(wrong_M, rows_M, targets_M, given_M, of_given_M, of_truth_M)

    def _class(self, index: int, truth: int, given: int, score: float, of_truth: float, *, least_C: Any) -> WrongRow:
        names = self._space.names
        is_likelier = bool(self._rows_C[given] and score >= least_C[given])
        return WrongRow(
            index=index, truth=names[truth], label=names[given], score=score, truth_score=of_truth,
            mislabelled=is_likelier,
        )  # fmt: skip

    def _sets(self, rows_M: Any, logits_MC: Any, targets_MC: Any) -> None:
        from scipy.special import expit

        scores_MC = expit(logits_MC)
        is_true_MC = targets_MC > 0.5
        self._sure_C += np.where(is_true_MC, scores_MC, 0.0).sum(axis=0)
        self._rows_C += is_true_MC.sum(axis=0)
        off_MC = np.abs(scores_MC - is_true_MC)
        places, worst_M = np.arange(len(rows_M)), off_MC.argmax(axis=1)
        wrong_M = off_MC[places, worst_M] - 0.5
        self._keep(wrong_M, rows_M, worst_M, is_true_MC[places, worst_M], scores_MC[places, worst_M])

    def _set(self, index: int, output: int, is_true: bool, score: float, *, least_C: Any) -> WrongRow:
        name, missing = self._space.names[output], f"not {self._space.names[output]}"
        likelier = bool(not is_true and self._rows_C[output] and score >= least_C[output])
        return WrongRow(
            index=index,
            truth=name if is_true else missing,
            label=missing if is_true else name,
            score=1 - score if is_true else score,
            truth_score=score if is_true else 1 - score,
            mislabelled=likelier,
        )

    def _numbers(self, rows_M: Any, logits_MC: Any, targets_MC: Any) -> None:
        targets_MC = targets_MC.reshape(-1, self._space.num_outputs).astype(np.float64)
        off_MC = np.abs(logits_MC - targets_MC)
        places, worst_M = np.arange(len(rows_M)), off_MC.argmax(axis=1)
        self._keep(off_MC[places, worst_M], rows_M, worst_M, targets_MC[places, worst_M], logits_MC[places, worst_M])

    def _number(self, index: int, output: int, target: float, given: float) -> WrongRow:
        named = f"{self._space.names[output]} " if self._space.num_outputs > 1 else ""
        truth, label = (f"{named}{target_text(number)}" for number in (target, given))
        return WrongRow(index=index, truth=truth, label=label, score=None, truth_score=None)
