"""Comparison of a fast path's answers with those of the plain fp32 model, on rows that both have classified.

    equivalence = compare_answers(form, form.score_blocks(fast_NC), form.score_blocks(plain_NC), precision="bf16")

Legend: G rows with M labels (or outputs) each, K of them with an answer from any of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brimful.core.classification import AnswerEquivalence
from brimful.core.tolerances import TOLERANCES
from brimful.tasks.answers import Form
from brimful.tasks.ranking import Flags, Floats, Singles, finite_rows

#: Difference of a row that only one of the two has an answer for: the largest that two probabilities can have.
_MISSING = 1.0
#: Rows from which on the spread of their outputs is known, times that spread, and least share of their size.
_FEW, _SPREADS, _LEAST = 10, 4.0, 1e-3
#: Least shares in fp32, which rounds to 6e-8: of an output's own size, and of the largest one's, as all are made of the
#: same numbers, but no more than so many times its spread. With them a tolerance of 1e-5 is some roundings of either.
_ROUNDED, _ROUNDED_BESIDE, _MOST_BESIDE = 5e-2, 5e-3, 100.0


def compare_answers(
    form: Form, fast: Sequence[Singles], plain: Sequence[Singles], *, precision: str
) -> AnswerEquivalence:
    """Compare scores of the fast path with those of the plain model, each as `form.score_blocks` gives them.

    A label is a near-tie where the plain model's score is closer than the tolerance to where the decision turns: the
    threshold, or the best of the other labels. A row is one where any of its labels is. A row that has an answer from
    one of the two only is an unexplained flip; one that has none from both is not counted.
    """
    tolerance = TOLERANCES[precision].answers
    rounds = precision == "fp32"
    blocks = [_rows(form, *pair, tolerance, rounds) for pair in zip(fast, plain, strict=True)] or [(np.zeros(0),) * 4]
    differences_K, near_ties_K, flips_K, unexplained_K = map(np.concatenate, zip(*blocks, strict=True))
    difference, num_rows = float(differences_K.max(initial=0)), len(differences_K)
    num_flips, num_unexplained = int(flips_K.sum()), int(unexplained_K.sum())
    return AnswerEquivalence(
        num_rows=num_rows,
        precision=precision,
        tolerance=tolerance,
        agreement=1 - num_flips / max(1, num_rows),
        largest_difference=difference,
        num_near_ties=int(near_ties_K.sum()),
        num_flips=num_flips,
        num_unexplained=num_unexplained,
        passed=difference <= tolerance and not num_unexplained,
    )


def _rows(form: Form, fast_GM: Singles, plain_GM: Singles, tolerance: float, rounds: bool) -> tuple[np.ndarray, ...]:
    """(K,) each: the largest difference, and flags of near-ties, of other labels, and of those that are unexplained.

    rounds: whether the tolerance is so small that the rounding of fp32 must have room in it.
    """
    by_fast_G, by_plain_G = finite_rows(fast_GM), finite_rows(plain_GM)
    known_G = by_fast_G | by_plain_G
    missing_K = np.not_equal(by_fast_G, by_plain_G)[known_G]
    scale_M = _scale(plain_GM[by_plain_G], rounds) if form.numeric else np.ones(plain_GM.shape[1])
    fast_KM, plain_KM = (np.nan_to_num(scores_GM[known_G].astype(np.float64)) for scores_GM in (fast_GM, plain_GM))
    differences_K = (np.abs(fast_KM - plain_KM) / scale_M).max(axis=1, initial=0)
    flips_KM = near_KM = np.zeros(plain_KM.shape, dtype=bool)
    if not form.numeric:
        flips_KM = _given(form, fast_KM) != _given(form, plain_KM)
        near_KM = np.abs(plain_KM - _turning_points(form, plain_KM)) < tolerance
    return (
        np.where(missing_K, _MISSING, differences_K),
        near_KM.any(axis=1) & ~missing_K,
        flips_KM.any(axis=1) | missing_K,
        (flips_KM & ~near_KM).any(axis=1) | missing_K,
    )


def _scale(plain_GM: Singles, rounds: bool) -> Floats:
    """(M,): what a difference of each output is measured by, 1 where it is 0.

    Its root mean square, or a few times its spread over rows where that is less: answers around 2003 that differ by 2
    from one another must not be off by 8. A few rows say little of a spread. rounds: as of `_rows`.
    """
    if not len(plain_GM):
        return np.ones(plain_GM.shape[1])
    size_M = scale_M = spread_M = np.sqrt(np.square(plain_GM, dtype=np.float64).mean(axis=0))
    if len(plain_GM) >= _FEW:
        spread_M = plain_GM.std(axis=0, dtype=np.float64)
        scale_M = np.clip(_SPREADS * spread_M, _LEAST * scale_M, scale_M)
    if rounds:
        beside_M = np.minimum(_ROUNDED_BESIDE * size_M.max(initial=0.0), _MOST_BESIDE * spread_M)
        scale_M = np.maximum(scale_M, np.maximum(_ROUNDED * size_M, beside_M))
    return np.where(scale_M > 0, scale_M, 1.0)


def _given(form: Form, scores_GM: Floats) -> Flags:
    """(G, M): True for each label that a row is given."""
    given_GM = np.ones(scores_GM.shape, dtype=bool)
    if not form.listed:
        given_GM = np.arange(scores_GM.shape[1]) == scores_GM.argmax(axis=1)[:, None]
    return given_GM if form.least is None else given_GM & (scores_GM >= np.float32(form.least))


def _turning_points(form: Form, scores_GM: Floats) -> Floats:
    """(G, M): score from which each label would be given, all others unchanged; -inf for one that always is."""
    points_GM = np.full(scores_GM.shape, -np.inf)
    if not form.listed and scores_GM.shape[1] > 1:
        second_G, best_G = np.partition(scores_GM, -2, axis=1)[:, -2:].T
        is_best_GM = np.arange(scores_GM.shape[1]) == scores_GM.argmax(axis=1)[:, None]
        points_GM = np.where(is_best_GM, second_G[:, None], best_G[:, None])
    return points_GM if form.least is None else np.maximum(points_GM, form.least)
