"""Metrics of ranks, with intervals of their own: AUC by DeLong, Spearman's correlation by Bonett and Wright.

Legend: N rows, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brimful.tasks.average_ranks import average_ranks
from brimful.tasks.scoring.resampling import perfect_bound

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: Standard deviations from the middle of a normal distribution to the end of 95 % of it.
_Z = 1.959963984540054

Ends = tuple[float, float, float]
UNKNOWN: Ends = (float("nan"),) * 3


@dataclass(frozen=True, kw_only=True)
class Aucs:
    """One-vs-rest AUC of each label and their mean, each with its interval. NaN for a label that no row, or each, has.

    by_label: (C, 3) value, low, high; of a label whose rows are not in the sample there is no interval. macro: of the
    labels that have a value, without an interval where one of these has none.
    """

    by_label: Floats
    macro: Ends


def one_vs_rest_aucs(
    scores_NC: npt.NDArray[np.float32], is_label_NC: Flags, *, values_C: Floats | None, num_rows: int
) -> Aucs:
    """Areas under the ROC curve with the intervals of DeLong, DeLong and Clarke-Pearson (1988), on the logit scale.

    The mean's interval counts that labels share rows: each row's influence is added over the labels.
    values_C: the areas of all `num_rows` rows, where these are a sample: it then gives the intervals only.
    """
    num_labels, smaller = scores_NC.shape[1], np.sqrt(len(scores_NC) / max(1, num_rows))
    by_label = np.full((num_labels, 3), np.nan)
    influence_N, num_defined = np.zeros(len(scores_NC)), 0
    for label in range(num_labels):
        found = _auc(scores_NC[:, label], is_label_NC[:, label])
        if found is None:
            by_label[label, 0] = np.nan if values_C is None else values_C[label]
            continue
        auc, of_rows_N = found
        auc = auc if values_C is None else float(values_C[label])
        by_label[label] = _on_logit_scale(auc, smaller * _error(of_rows_N), int(is_label_NC[:, label].sum()))
        influence_N += of_rows_N
        num_defined += 1
    if not np.isfinite(by_label[:, 0]).any():
        return Aucs(by_label=by_label, macro=UNKNOWN)
    mean = float(np.nanmean(by_label[:, 0]))
    if num_defined < np.isfinite(by_label[:, 0]).sum():
        return Aucs(by_label=by_label, macro=(mean, np.nan, np.nan))
    return Aucs(by_label=by_label, macro=_on_logit_scale(mean, smaller * _error(influence_N / num_defined), num_rows))


def _auc(scores_N: npt.NDArray[np.float32], is_label_N: Flags) -> tuple[float, Floats] | None:
    """The area, and each row's influence on it: its part of the first-order change when rows are drawn anew."""
    positives, negatives = int(is_label_N.sum()), int((~is_label_N).sum())
    if not positives or not negatives:
        return None
    ranks_N = average_ranks(scores_N)
    own_N = np.empty(len(scores_N))  # the share of the other kind that each row is on the right side of
    own_N[is_label_N] = (ranks_N[is_label_N] - average_ranks(scores_N[is_label_N])) / negatives
    own_N[~is_label_N] = 1 - (ranks_N[~is_label_N] - average_ranks(scores_N[~is_label_N])) / positives
    auc = float(own_N[is_label_N].mean())
    influence_N = np.empty(len(scores_N))
    for of_kind_N, square in ((is_label_N, auc / (2 - auc)), (~is_label_N, 2 * auc**2 / (1 + auc))):
        influence_N[of_kind_N] = len(scores_N) * _deviations(own_N[of_kind_N], auc, square)
    return auc, influence_N


def _deviations(own_K: Floats, auc: float, square: float) -> Floats:
    """(K,) parts of rows of one kind in the error of the area: their mean square is DeLong's variance over K.

    square: expected square of `own_K` by Hanley and McNeil (1982), for a single row, which shows no variance.
    """
    count = len(own_K)
    if count == 1:
        return np.array([np.sqrt(max(0.0, square - auc**2))])
    return np.sqrt(count / (count - 1)) / count * (own_K - auc)  # type: ignore[no-any-return]


def _error(influence_N: Floats) -> float:
    return float(np.sqrt(np.mean(influence_N**2) / len(influence_N)))


def _on_logit_scale(auc: float, error: float, num_rows: int) -> Ends:
    """An interval that stays between 0 and 1. Of a perfect area, whose error shows nothing, the binomial bound."""
    if auc >= 1:
        return auc, perfect_bound(num_rows), 1.0
    if auc <= 0:
        return auc, 0.0, 1 - perfect_bound(num_rows)
    logit, spread = np.log(auc / (1 - auc)), _Z * error / (auc * (1 - auc))
    return auc, float(1 / (1 + np.exp(spread - logit))), float(1 / (1 + np.exp(-spread - logit)))


def spearman(left_N: Floats, right_N: Floats) -> Ends:
    """Spearman's rank correlation, with the interval of Bonett and Wright (2000). NaN where one does not vary."""
    if len(left_N) < 3 or np.ptp(left_N) == 0 or np.ptp(right_N) == 0:
        return UNKNOWN
    value = float(np.corrcoef(average_ranks(left_N), average_ranks(right_N))[0, 1])
    if len(left_N) <= 3 or abs(value) >= 1:
        return value, float("nan"), float("nan")
    spread = _Z * np.sqrt((1 + value**2 / 2) / (len(left_N) - 3))
    return value, float(np.tanh(np.arctanh(value) - spread)), float(np.tanh(np.arctanh(value) + spread))
