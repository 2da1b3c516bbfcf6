"""Sweeps of settings: trials in processes of their own, one row after the other or several rows by turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import turns
from resumable import Session, say

Settings = dict[str, Any]
Row = TypeVar("Row")
#: Seconds that a trial is expected to take by mode of compilation, and the most that it may.
EXPECTED_S = {None: 8.0, "default": 45.0, "reduce-overhead": 60.0, "max-autotune": 100.0}
MOST_S = {None: 60.0, "default": 180.0, "reduce-overhead": 240.0, "max-autotune": 400.0}
#: How much longer those of large models take, and may take on a CPU and where others compile beside it.
LARGE_FACTOR, CPU_FACTOR, SHARED_FACTOR = {"large": 2.0, "modernbert": 2.0}, 10.0, 2.0


def spent_s(tried: Iterable[dict[str, Any]]) -> float:
    """Seconds that trials took, waiting for turns left out but in those that ended their process."""
    return sum(each.get("wall_s", 0.0) for each in tried)


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


def attempt(
    session: Session, wanted: list[Settings], plan: Settings, about: Settings, *, size: str,
    noted: Callable[[Settings], Settings] = lambda found: {},
) -> bool:  # fmt: skip
    """Try settings in one process, into the raw log as trials; False if there was no time for all.

    One that ends its process, or takes too long, is recorded as failed, and the rest goes on without it. plan: of the
    process, but for its settings. about, noted: what each trial's line says, and what more of what was found. size: of
    the model.
    """
    kind = wanted[0]["compile"]
    most_s = MOST_S[kind] * LARGE_FACTOR.get(size, 1.0)
    most_s *= (SHARED_FACTOR if turns.shared() else 1.0) * (CPU_FACTOR if session.nvml.gpu == "CPU" else 1.0)
    while wanted:
        if not session.fits(EXPECTED_S[kind] * LARGE_FACTOR.get(size, 1.0) * len(wanted)):
            return False
        say(f"{plan['work']}, {plan['side']}: {len(wanted)} settings, compile {kind}")
        result = session.child(plan | {"settings": wanted}, len(wanted) * most_s)
        lines = [{**each, **noted(each)} for each in result["found"]]
        for each in lines:
            session.add(kind="trial", **about, **each)
        wanted = wanted[len(result["found"]) :]
        if wanted and not result["ok"] and not session.fits(0):
            return False  # cut by the budget, which says nothing of the setting
        if wanted:
            failed, *wanted = wanted
            why = {"error": result["error"] or "no result", "timed_out": result["timed_out"]}
            say(f"{plan['work']}, {plan['side']}, {json.dumps(failed)}: {why['error']}")
            # Of a process that ended, only the limit of a trial tells what was no waiting for a turn.
            wall_s = min(result["wall_s"] - spent_s(lines), most_s)
            session.add(kind="trial", **about, settings=failed, ok=False, wall_s=round(wall_s, 1), **why)
    return True


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
