"""Labels of many rows with their scores, each row's likeliest first, and the columns that they become.

Nothing here makes a Python object per row.

Legend: N rows, P labels of all rows together, N1 is N + 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Labels of N rows, one row's behind the other's.

    names: text of each label, large_string. indices_P: label, as its place in `names`. scores_P: its score, with the
    digits of fp32 and no more. offsets_N1: where each row's labels begin, and the end of the last one's.
    answered_N: False for a row without an answer; it has no labels.
    """

    names: pa.Array
    indices_P: Integers
    scores_P: Floats
    offsets_N1: Integers
    answered_N: Flags

    def top(self, k: int) -> Ranking:
        """The first k labels of each row."""
        lengths_N = np.diff(self.offsets_N1)
        if not len(lengths_N) or lengths_N.max() <= k:
            return self
        places_P = np.arange(len(self.indices_P)) - np.repeat(self.offsets_N1[:-1], lengths_N)
        return self._only(places_P < k)

    def at_least(self, threshold: float) -> Ranking:
        """The labels with this score or a higher one; a row may be left without any."""
        return self._only(self.scores_P >= threshold)

    def _only(self, kept_P: Flags) -> Ranking:
        return replace(
            self,
            indices_P=self.indices_P[kept_P],
            scores_P=self.scores_P[kept_P],
            offsets_N1=offsets_within(kept_P, self.offsets_N1),
        )

    def counts(self) -> dict[str, int]:
        """Count of each label that occurs."""
        found: Counter[str] = Counter()
        times = np.bincount(self.indices_P, minlength=len(self.names))
        present = np.flatnonzero(times)
        for name, number in zip(self.names.take(pa.array(present)).to_pylist(), times[present].tolist(), strict=True):
            found[name] += number  # two outputs may have one name
        return dict(found)

    def first_labels(self) -> pa.Array:
        """(N,) large_string: each row's first label, null where it has none."""
        return self.names.take(self._first(self.indices_P))

    def first_scores(self) -> pa.Array:
        """(N,) double: each row's first score, null where it has none."""
        return self._first(self.scores_P)

    def _first(self, values_P: Integers | Floats) -> pa.Array:
        empty_N = np.diff(self.offsets_N1) == 0
        return pa.array(values_P).take(pa.array(self.offsets_N1[:-1], mask=empty_N))

    def labels(self) -> pa.Array:
        """(N,) lists of labels, null where there is no answer."""
        return self._lists(self.names.take(pa.array(self.indices_P)))

    def scores(self) -> pa.Array:
        """(N,) lists of scores, null where there is no answer."""
        return self._lists(pa.array(self.scores_P))

    def pairs(self) -> pa.Array:
        """(N,) lists of {label, score}, null where there is no answer."""
        labels = self.names.take(pa.array(self.indices_P))
        return self._lists(pa.StructArray.from_arrays([labels, pa.array(self.scores_P)], names=["label", "score"]))

    def _lists(self, values: pa.Array) -> pa.Array:
        return as_lists(values, self.offsets_N1, self.answered_N)

    def firsts(self) -> list[dict[str, Any]]:
        """{"label", "score"} of each row's first label, both None where it has none."""
        names, ends = self.names.to_pylist(), self.offsets_N1
        found = [
            {"label": names[index], "score": score}
            for index, score in zip(self.indices_P.tolist(), self.scores_P.tolist(), strict=True)
        ]
        if len(found) == len(ends) - 1 and self.answered_N.all():
            return found
        return [found[a] if a < b else {"label": None, "score": None} for a, b in pairwise(ends.tolist())]

    def objects(self) -> list[tuple[list[str], list[float]]]:
        """Labels and scores of each row as Python lists, both empty where there is no answer."""
        labels, scores = self.names.take(pa.array(self.indices_P)).to_pylist(), self.scores_P.tolist()
        ends = self.offsets_N1.tolist()
        return [(labels[a:b], scores[a:b]) for a, b in pairwise(ends)]


def ranked(
    scores_NC: Singles, answered_N: Flags, names: pa.Array, *, most: int | None, in_order: bool = False
) -> Ranking:
    """The `most` likeliest of C labels of each row, None for all; of equal scores the first label comes first.

    scores_NC: read in the rows of answered_N only, where all of them must be numbers. in_order: for all outputs in
    their own order, as numbers are not more or less likely.
    """
    scores_AC = scores_NC if answered_N.all() else scores_NC[answered_N]
    if in_order:
        order_AK = np.broadcast_to(np.arange(scores_AC.shape[1]), scores_AC.shape)
    elif most == 1:
        order_AK = scores_AC.argmax(axis=1)[:, None]
    else:
        order_AK = np.argsort(-scores_AC, axis=1, kind="stable")[:, :most]
    return Ranking(
        names=names,
        indices_P=order_AK.ravel(),
        scores_P=shortest(np.take_along_axis(scores_AC, order_AK, axis=1).ravel()),
        offsets_N1=offsets_of(answered_N * order_AK.shape[1]),
        answered_N=answered_N,
    )


def finite_rows(numbers_NC: Singles) -> Flags:
    """(N,): rows of which every number is finite."""
    return np.asarray(np.isfinite(numbers_NC).all(axis=1))


def offsets_of(lengths_N: npt.NDArray[Any]) -> Integers:
    """(N1,): where runs of these lengths begin, one behind the other, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)])


def offsets_within(kept_P: Flags, offsets_N1: Integers) -> Integers:
    """(N1,): where the runs begin once only the elements in kept_P are left."""
    return offsets_of(kept_P)[offsets_N1]


def as_lists(values_P: pa.Array, offsets_N1: Integers, answered_N: Flags) -> pa.Array:
    """(N,) lists of consecutive values, null where there is no answer."""
    return pa.ListArray.from_arrays(pa.array(offsets_N1, pa.int32()), values_P, mask=pa.array(~answered_N))


#: 10^0 ... 10^22: the powers of ten that are doubles without rounding.
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(23)])
#: Decimal exponents of the numbers that `shortest` can round by one exact power of ten, whatever their digits.
_LOWEST, _HIGHEST = -13, 5


def shortest(numbers_P: Singles) -> Floats:
    """Each number with only the digits that tell it from its neighbours in fp32: 0.98765 for 0.98765002.

    What float(str(number)) is, without text: rounded to 6 digits, or as many more as lead back to the same number in
    fp32; 9 always do. An integer over an exact power of ten is the double nearest to that decimal.
    """
    numbers_P = np.asarray(numbers_P, dtype=np.float32)
    exact_P = numbers_P.astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents_P = np.floor(np.log10(np.abs(exact_P)))
    usual_P = (exponents_P >= _LOWEST) & (exponents_P <= _HIGHEST)
    found_P = exact_P.copy()
    left = np.flatnonzero(usual_P)
    for digits in (6, 7, 8, 9):
        powers = _POWERS[(digits - 1 - exponents_P[left]).astype(np.int64)]
        rounded = np.rint(exact_P[left] * powers) / powers
        same = rounded.astype(np.float32) == numbers_P[left]
        found_P[left[same]] = rounded[same]
        left = left[~same]
    rare_P = ~usual_P & np.isfinite(exact_P) & (exact_P != 0)
    found_P[rare_P] = numbers_P[rare_P].astype(np.str_).astype(np.float64)
    return found_P
