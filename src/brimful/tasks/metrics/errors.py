"""Errors of numbers, and how they go together with the targets, over rows that come in parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from brimful.tasks.average_ranks import average_ranks

#: Numbers that are kept for rank correlations, of predictions and of targets each: 32 MB.
_MOST_KEPT = 1 << 22

Numbers = npt.NDArray[np.float64]


class NumberErrors:
    """Errors and correlations of each of C outputs, in fp64 (Chan's merge of means and squares).

    Rank correlations need all rows at once: 8 bytes a row and output are kept, up to 4 million rows (of one output).
    Beyond, they are those of a uniform random sample of that many; `num_ranked` says of how many.
    """

    def __init__(self, num_outputs: int, *, most_kept: int = _MOST_KEPT) -> None:
        self.num_rows, self.finite = 0, True
        self._squares_C, self._absolutes_C = np.zeros(num_outputs), np.zeros(num_outputs)
        self._means_2C, self._spreads_2C = np.zeros((2, num_outputs)), np.zeros((2, num_outputs))
        self._products_C = np.zeros(num_outputs)
        self._lowest_2C, self._highest_2C = np.full((2, num_outputs), np.inf), np.full((2, num_outputs), -np.inf)
        self._most_ranked = max(2, most_kept // num_outputs)
        self._ranked: list[npt.NDArray[np.float32]] = []
        self._keys: list[Numbers] = []
        self._random = np.random.default_rng(0)

    def add(self, found_MC: npt.ArrayLike, targets_MC: npt.ArrayLike) -> None:
        """Take rows by prediction and target."""
        found, targets = np.asarray(found_MC, np.float64), np.asarray(targets_MC, np.float64)
        if not len(found):
            return
        errors_MC = found - targets
        self.finite &= bool(np.isfinite(errors_MC).all())
        self._squares_C += (errors_MC**2).sum(0)
        self._absolutes_C += np.abs(errors_MC).sum(0)
        if self.finite:
            self._merge(np.stack([found, targets]))
        self.num_rows += len(found)
        self._keep(np.stack([found, targets]).astype(np.float32))

    def _merge(self, both_2MC: Numbers) -> None:
        before, new = self.num_rows, both_2MC.shape[1]
        means_2C = both_2MC.mean(1)
        self._lowest_2C = np.minimum(self._lowest_2C, both_2MC.min(1))
        self._highest_2C = np.maximum(self._highest_2C, both_2MC.max(1))
        apart_2MC, shift_2C = both_2MC - means_2C[:, None], means_2C - self._means_2C
        weight = before * new / (before + new)
        self._spreads_2C += (apart_2MC**2).sum(1) + weight * shift_2C**2
        self._products_C += apart_2MC.prod(0).sum(0) + weight * shift_2C.prod(0)
        self._means_2C += shift_2C * (new / (before + new))

    def _keep(self, both_2MC: npt.NDArray[np.float32]) -> None:
        """Keep the rows with the smallest random keys: a uniform sample of all."""
        self._ranked.append(both_2MC)
        self._keys.append(np.asarray(self._random.random(both_2MC.shape[1])))
        if sum(map(len, self._keys)) > 2 * self._most_ranked:
            self._thin()

    def _thin(self) -> None:
        keys, both = np.concatenate(self._keys), np.concatenate(self._ranked, axis=1)
        if len(keys) > self._most_ranked:
            chosen = np.sort(np.argpartition(keys, self._most_ranked)[: self._most_ranked])
            keys, both = keys[chosen], both[:, chosen]
        self._keys, self._ranked = [keys], [both]

    @property
    def mean_square(self) -> float:
        """Mean of all squared errors."""
        return float(self._squares_C.mean() / self.num_rows) if self.num_rows else float("nan")

    @property
    def mean_absolute(self) -> float:
        """Mean of all absolute errors."""
        return float(self._absolutes_C.mean() / self.num_rows) if self.num_rows else float("nan")

    @property
    def varied(self) -> bool:
        """True if all numbers are finite, and predictions and targets of every output differ from row to row."""
        return self.finite and self.num_rows > 1 and bool((self._highest_2C > self._lowest_2C).all())

    @property
    def num_ranked(self) -> int:
        """Rows whose ranks are correlated: all, or the sample."""
        return min(self.num_rows, self._most_ranked)

    def r2_C(self) -> Numbers:
        """(C,) coefficient of determination. Only where `varied`."""
        found: Numbers = 1 - self._squares_C / self._spreads_2C[1]
        return found

    def pearson_C(self) -> Numbers:
        """(C,) linear correlation. Only where `varied`."""
        roots_2C = np.sqrt(self._spreads_2C)
        found: Numbers = np.clip(self._products_C / (roots_2C[0] * roots_2C[1]), -1, 1)
        return found

    def spearman_C(self) -> Numbers:
        """(C,) correlation of the ranks of `num_ranked` rows; NaN where the sample does not vary. Only where `varied`.

        Beside a sample of n rows stands a standard error of about 1 / sqrt(n): 0.0005 for 4 million.
        """
        self._thin()
        kept_2NC = self._ranked[0]
        ranks_2NC = np.empty(kept_2NC.shape)
        for side, label in np.ndindex(2, kept_2NC.shape[2]):
            ranks_2NC[side, :, label] = average_ranks(kept_2NC[side, :, label])
        ranks_2NC -= ranks_2NC.mean(1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            roots_2C = np.sqrt((ranks_2NC**2).sum(1))
            found: Numbers = ranks_2NC.prod(0).sum(0) / (roots_2C[0] * roots_2C[1])
        return found
