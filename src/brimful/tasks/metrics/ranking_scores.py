"""Area under the ROC curve of each label: exact for as many scores as are kept, by histogram beyond, error stated."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from brimful.tasks.average_ranks import average_ranks

#: Scores that are kept as they are: 64 MB, and as many bytes of truths.
_MOST_KEPT = 1 << 24
#: Bins of all histograms together, twice (true and false): 64 MB.
_MOST_BINS = 1 << 22
#: Bins of one label's histogram.
_FEWEST_BINS, _BINS = 64, 4096

Numbers = npt.NDArray[np.float64]


class RankingScores:
    """Area under the ROC curve of each of C labels against all others, over rows that come in parts.

    Up to 16 million scores (rows x labels) it is exact. Beyond, scores are counted in bins between the lowest and the
    highest of those 16 million. Two rows in one bin count as half in order, which is off by half at the most: the error
    is at most half of the share of pairs (a row with the label, a row without) that share a bin.
    """

    def __init__(self, num_labels: int, *, most_kept: int = _MOST_KEPT) -> None:
        self._num_labels, self._most_kept = num_labels, most_kept
        self._num_bins = min(_BINS, max(_FEWEST_BINS, _MOST_BINS // max(1, num_labels)))
        self._scores: list[npt.NDArray[np.float32]] = []
        self._truths: list[npt.NDArray[np.bool_]] = []
        self._num_kept = 0
        self._lowest_C, self._width_C = np.zeros(0), np.zeros(0)
        self._counts = np.zeros((0, 0, 0), np.int64)

    @property
    def exact(self) -> bool:
        """True while every score is kept."""
        return not self._counts.size

    def add(self, scores_MC: npt.ArrayLike, true_MC: npt.NDArray[np.bool_]) -> None:
        """Take rows by scores of which only the order counts, such as logits or `log_odds`."""
        scores_MC = np.asarray(scores_MC, np.float32)
        if not self.exact:
            self._count(scores_MC, true_MC)
            return
        self._scores.append(scores_MC)
        self._truths.append(true_MC)
        self._num_kept += scores_MC.size
        if self._num_kept > self._most_kept:
            self._begin_to_count()

    def _begin_to_count(self) -> None:
        every = [np.where(np.isfinite(scores), scores, 0.0) for scores in self._scores]
        self._lowest_C = np.min([part.min(0) for part in every], axis=0).astype(np.float64)
        highest_C = np.max([part.max(0) for part in every], axis=0).astype(np.float64)
        self._width_C = np.maximum(highest_C - self._lowest_C, 1e-30) / self._num_bins
        self._counts = np.zeros((2, self._num_labels, self._num_bins), np.int64)
        kept, self._scores = zip(self._scores, self._truths, strict=True), []
        for scores_MC, true_MC in kept:
            self._count(scores_MC, true_MC)
        self._truths = []

    def _count(self, scores_MC: npt.NDArray[np.float32], true_MC: npt.NDArray[np.bool_]) -> None:
        place_MC = np.nan_to_num((scores_MC - self._lowest_C) / self._width_C, nan=0.0)
        bins_MC = np.clip(place_MC, 0, self._num_bins - 1).astype(np.int64)
        bins_MC += np.arange(self._num_labels) * self._num_bins
        for side, chosen in enumerate((~true_MC, true_MC)):
            found = np.bincount(bins_MC[chosen], minlength=self._num_labels * self._num_bins)
            self._counts[side] += found.reshape(self._num_labels, self._num_bins)

    def areas(self) -> tuple[Numbers, Numbers]:
        """(C,) the area of each label, NaN where all rows have it or none has; and (C,) the most it can be off by."""
        if self.exact:
            return self._exact_areas(), np.zeros(self._num_labels)
        without_CB, with_CB = self._counts.astype(np.float64)
        below_CB = np.cumsum(without_CB, axis=1) - without_CB
        pairs_C = with_CB.sum(1) * without_CB.sum(1)
        ordered_C, tied_C = (with_CB * below_CB).sum(1), (with_CB * without_CB).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (ordered_C + tied_C / 2) / pairs_C, tied_C / 2 / pairs_C

    def _exact_areas(self) -> Numbers:
        areas_C = np.full(self._num_labels, np.nan)
        if not self._scores:
            return areas_C
        scores_NC, true_NC = np.concatenate(self._scores), np.concatenate(self._truths)
        for label in range(self._num_labels):
            true_N = true_NC[:, label]
            num_true, num_false = int(true_N.sum()), int((~true_N).sum())
            if num_true and num_false:
                ranks = float(average_ranks(scores_NC[:, label])[true_N].sum())
                areas_C[label] = (ranks - num_true * (num_true + 1) / 2) / (num_true * num_false)
        return areas_C


def log_odds(logits_MC: npt.ArrayLike) -> Numbers:
    """(M, C) log of p / (1 - p), with p of the softmax: as many digits near 1 as near 0."""
    logits = np.asarray(logits_MC, np.float64)
    best_M = logits.argmax(-1)
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    rows = np.arange(len(logits))
    others = shifted.sum(-1, keepdims=True) - shifted
    shifted[rows, best_M] = 0.0
    others[rows, best_M] = shifted.sum(-1)  # without what would cancel
    with np.errstate(divide="ignore"):
        found: Numbers = logits - logits.max(-1, keepdims=True) - np.log(others)
    return found
