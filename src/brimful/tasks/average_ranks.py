"""Ranks with ties at their mean, as of `scipy.stats.rankdata`, whose import takes half a second of a small job."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def average_ranks(numbers_N: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(N,) place of each number, from 1 on; equal ones have the mean of their places. NaN throughout if one is NaN."""
    if np.issubdtype(numbers_N.dtype, np.floating) and np.isnan(numbers_N).any():
        return np.full(len(numbers_N), np.nan)
    order_N = np.argsort(numbers_N, kind="stable")
    ordered_N = numbers_N[order_N]
    begins_N = np.concatenate([[True], ordered_N[1:] != ordered_N[:-1]])[: len(order_N)]
    edges = np.append(np.flatnonzero(begins_N), len(order_N))
    group_N = np.cumsum(begins_N)
    ranks_N = np.empty(len(order_N))
    ranks_N[order_N] = (edges[group_N - 1] + 1 + edges[group_N]) / 2
    return ranks_N
