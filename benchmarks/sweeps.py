"""Sweeps of settings: which of them share a process, and sweeps of several rows that share a GPU by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import turns
from resumable import Session

Settings = dict[str, Any]
Row = TypeVar("Row")


def alike(wanted: Sequence[Settings]) -> list[list[Settings]]:
    """Return settings as processes try them, in order: those not compiled share one, others have their own."""
    groups: list[list[Settings]] = []
    plain: list[Settings] = []
    for each in wanted:
        if each["compile"] is not None:
            groups.append([each])
            continue
        if not plain:
            groups.append(plain)
        plain.append(each)
    return groups


def at_once(
    session: Session,
    rows: Iterable[Row],
    wanted: Callable[[Row], list[Settings]],
    attempt: Callable[[Row, list[Settings]], bool],
) -> None:
    """Sweep rows by processes that share the GPU by turns: all rows' first rounds, then their second ones.

    wanted: what a row tries next, likeliest winners first, which every row tries before its others. attempt: tries
    settings in one process; False if there is no time.
    """
    turns.begin(session.arguments.output.resolve())
    try:
        with session.lanes(session.arguments.at_once) as lanes:
            while groups := [(row, each) for row in rows if (each := alike(wanted(row)))]:
                by_rank = zip_longest(*([(row, settings) for settings in of_row] for row, of_row in groups))
                jobs = [job for rank in by_rank for job in rank if job is not None]
                submitted = [lanes.submit(attempt, *job) for job in jobs]
                done = [each.result() for each in submitted]
                if not any(done):
                    return
    finally:
        turns.end()
