"""Shares of an effective batch: which of its rows each of several processes takes, so that all finish together.

Functions of the lengths alone, which every process computes for itself.
"""

from __future__ import annotations

import heapq

import numpy as np


def shares_of(lengths_N: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the rows that each of `count` processes takes of rows of these lengths, in their order.

    The longest row left goes to the process with the fewest tokens so far.
    Source: Graham 1969, Bounds on multiprocessing timing anomalies.
    """
    loads = [(0, each) for each in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-lengths_N, kind="stable").tolist():
        tokens, to = loads[0]
        heapq.heapreplace(loads, (tokens + int(lengths_N[row]), to))
        shares[to].append(row)
    return [np.sort(np.array(rows, dtype=np.int64)) for rows in shares]


def starts_of(lengths_N: np.ndarray) -> np.ndarray:
    """Return the place of each row's first token in an effective batch of these lengths, all rows end to end."""
    starts_N: np.ndarray = np.cumsum(lengths_N) - lengths_N
    return starts_N
