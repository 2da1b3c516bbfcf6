"""Bootstrap of metrics that are functions of sums over rows, with memory that does not grow with the rows.

Rows are dealt at random into at most `MOST_GROUPS` groups, and what each metric needs is summed in each group. A
resample draws as many groups as there are, with replacement; the sums of all resamples are one matrix product. Up to
MOST_GROUPS rows each row is a group, and this is the ordinary bootstrap of rows (Efron 1979). Beyond, it is the
bootstrap of groups of exchangeable rows: sums have the same variance, and are closer to normal.

Legend: N rows, G groups, K sums, B resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MOST_GROUPS, _FEWEST_GROUPS = 4096, 128
#: Most numbers of all groups together, and of the sums of some resamples.
_MOST_SUMS, _MOST_RESAMPLED = 1 << 22, 1 << 23
#: Shares of resamples below the interval, and up to its end.
_TAILS = (0.025, 0.975)

METHOD = (
    "percentile bootstrap over rows, beyond 4,096 rows over random groups of rows; where no resample can differ,"
    " exact bounds; AUC by DeLong, Spearman's correlation by Bonett and Wright; none for the calibration error,"
    " whose resamples lie too high"
)

Metrics = Mapping[str, Floats]
#: Value, low and high end.
Ends = tuple[Floats, Floats, Floats]


def num_groups(num_rows: int, num_sums: int) -> int:
    """Groups for so many rows, with `num_sums` sums each."""
    most = min(MOST_GROUPS, max(_FEWEST_GROUPS, _MOST_SUMS // max(1, num_sums)))
    return max(1, min(num_rows, most))


def dealt_groups(num_rows: int, groups: int, seed: int) -> Integers:
    """(N,) the group of each row: all as large as one another, but for one row."""
    if groups >= num_rows:
        return np.arange(num_rows)
    dealt: Integers = np.random.default_rng([seed, 1]).permutation(num_rows) % groups
    return dealt


def intervals(sums_GK: Floats, metrics: Callable[[Floats], Metrics], *, resamples: int, seed: int) -> dict[str, Ends]:
    """Value, low and high end of each metric; NaN where it is not defined.

    metrics: function of sums (R, K) to metrics (R, ...) of R sets of rows. An interval is of the resamples in which the
    metric is defined, and unknown where it is not in half of them.
    """
    groups, num_sums = sums_GK.shape
    found = metrics(sums_GK.sum(0, keepdims=True))
    if not resamples:
        return {name: (value[0], *(np.full_like(value[0], np.nan),) * 2) for name, value in found.items()}
    draw = np.random.default_rng([seed, 2])
    step = max(1, min(resamples, _MOST_RESAMPLED // max(1, num_sums, groups)))
    parts: dict[str, list[Floats]] = {name: [] for name in found}
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        weights_BG = draw.multinomial(groups, np.full(groups, 1 / groups), size=size).astype(np.float64)
        for name, values in metrics(weights_BG @ sums_GK).items():
            parts[name].append(values)
    return {name: (value[0], *_ends(np.concatenate(parts[name]))) for name, value in found.items()}


def _ends(values_B: Floats) -> tuple[Floats, Floats]:
    """Ends of the interval of each metric (B, ...)."""
    defined = np.isfinite(values_B)
    few = defined.sum(0) * 2 < len(values_B)
    shown = np.where(defined | few, values_B, np.nan)
    shown = np.where(few, 0.0, shown)  # of these nothing is shown
    low, high = np.nanquantile(shown, _TAILS, axis=0)
    return np.where(few, np.nan, low), np.where(few, np.nan, high)


def perfect_bound(num_rows: float) -> float:
    """Least share of right answers with which `num_rows` right ones of as many are still likely (Clopper-Pearson)."""
    return float(_TAILS[0] ** (1 / num_rows)) if num_rows > 0 else 0.0


def least_sum(num_rows_K: Floats) -> float:
    """Least sum of K shares of right answers with which all rows are still likely to be right, `num_rows_K` of each.

    It is `K * perfect_bound(sum)` where each has as many rows. A share p of n rows makes these right with p^n, and the
    product of all is at least a tail: the sum is least where shares are in proportion to their rows, none above 1.
    """
    rows_K = np.sort(num_rows_K[num_rows_K > 0])
    shares_K = np.ones(len(rows_K))
    for lowered in range(1, len(rows_K) + 1):
        few = rows_K[:lowered]
        scale = np.exp((np.log(_TAILS[0]) - (few * np.log(few)).sum()) / few.sum())
        if lowered == len(rows_K) or scale * rows_K[lowered] >= 1:
            shares_K[:lowered] = scale * few
            break
    return float(shares_K.sum())
