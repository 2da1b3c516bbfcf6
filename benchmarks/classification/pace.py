"""Length of measurements: settings in short runs, round by round, then the fastest two, or each that has a row, in
repeats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import turns
from floor import read_pool
from sides import SIDES, Answered, Run, Settings, Side
from works import Pool, Work

#: Runs grow at most this much from one to the next: a first one says little.
_GROWTH = 8
#: brimful chooses how to run by the size of its first call, so that begins with so much of the most.
_FIRST_SHARE = 16
_LONGEST_ERROR = 300
#: Seconds that one repeat takes at least, where texts must be given twice for it.
_SHORTEST_S = 0.4


@dataclass(frozen=True, kw_only=True)
class Pace:
    """sweep_s, repeat_s: seconds of one run, about. repeats: runs of what is measured; `fewest` of them are enough once
    they took within_s together. first, most: texts of the first run, and of any. file_texts: of brimful's files, whose
    every run loads the model anew. compared: texts on which the labels of the sides are compared.
    """

    sweep_s: float
    repeat_s: float
    repeats: int
    fewest: int
    within_s: float
    first: int
    most: int
    file_texts: int
    compared: int


def pace_of(work: Work, device: str, repeat_s: float, *, smoke: bool) -> Pace:
    """For one row on one device."""
    if smoke:
        return Pace(
            sweep_s=0.01, repeat_s=0.02, repeats=2, fewest=2, within_s=5.0, first=8, most=32, file_texts=32, compared=16
        )
    short = work.corpus == "tweets"
    if device == "cpu":
        most = 20_000 if short else 1_000
        return Pace(
            sweep_s=2.0, repeat_s=repeat_s, repeats=5, fewest=3, within_s=60.0, first=16, most=most,
            file_texts=most // 5, compared=200,
        )  # fmt: skip
    most = (400_000 if short else 20_000) // (len(work.candidates) or 1)
    return Pace(
        sweep_s=0.7, repeat_s=repeat_s, repeats=5, fewest=3, within_s=40.0, first=64, most=most,
        file_texts=most if work.size == "minilm" else most // 2, compared=1_000,
    )  # fmt: skip


def try_settings(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """Try each setting of the plan in a short run, timed in this process's turn: its `texts_per_s`, or `error`, and
    `wall_s`, the seconds that it took without waiting for the turn."""
    side, pool, pace = _begun(plan, inputs)
    for each in plan["settings"]:
        began, waited_s = time.perf_counter(), turns.waited_s()
        found = _tried(lambda each=each: {"texts_per_s": _rate(side.prepare(each), pool, pace, each)})
        wall_s = time.perf_counter() - began - (turns.waited_s() - waited_s)
        yield {"settings": each, **found, "wall_s": round(wall_s, 1)}


def measure(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """Measure each setting of the plan in `repeats`; `error` if it failed."""
    side, pool, pace = _begun(plan, inputs)
    whole = Work.parse(plan["work"]).files and plan["side"] == "brimful"
    for place, each in enumerate(plan["settings"]):
        if whole and not place:  # what is compiled is kept for all that come
            _tried(lambda each=each: {"seconds": side.prepare(each)(pool.sample(pace.file_texts)).seconds})
        measured = partial(_repeated, pool=pool, pace=pace, settings=each, whole=whole)
        yield {"settings": each, **_tried(lambda each=each, measured=measured: measured(side.prepare(each)))}


def _begun(plan: dict[str, Any], inputs: Path) -> tuple[Side, Pool, Pace]:
    work = Work.parse(plan["work"])
    side = SIDES[plan["side"]](work, inputs, plan["device"], smoke=plan["smoke"])
    return side, read_pool(inputs, work), Pace(**plan["pace"])


def _tried(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measured()
    except Exception as failure:  # out of memory at a large batch, for one: the others are still worth knowing
        return {"error": f"{type(failure).__name__}: {failure}"[:_LONGEST_ERROR]}


def _rate(run: Run, pool: Pool, pace: Pace, settings: Settings) -> float:
    """Texts a second in a run of sweep_s or more, where `most` allows. The first run, which is cold, does not count."""
    first = 2 * settings["batch_size"] if "batch_size" in settings else pace.most // _FIRST_SHARE
    number = min(max(pace.first, first), pace.most)
    run(pool.sample(number))
    turns.take()
    try:
        while True:
            seconds = run(pool.sample(number)).seconds
            grown = whole_batches(math.ceil(number * min(_GROWTH, 1.5 * pace.sweep_s / seconds)), settings)
            if seconds >= pace.sweep_s or min(grown, pace.most) <= number:
                return number / seconds
            number = min(grown, pace.most)
    finally:
        turns.give()


def whole_batches(number: int, settings: Settings) -> int:
    """Return this many texts, or fewer that fill whole batches where a smaller last one would be compiled anew."""
    if not settings.get("compile"):
        return number
    batch_size: int = settings["batch_size"]
    return max(1, number // batch_size) * batch_size


def _repeated(run: Run, pool: Pool, pace: Pace, settings: Settings, *, whole: bool) -> dict[str, Any]:
    """Repeats of one sample, of about `repeat_s` each.

    whole: always `file_texts`, as each run begins with loading the model, and none that does not count.
    """
    number = pace.file_texts
    if not whole:
        swept = _rate(run, pool, pace, settings)
        number = min(pace.most, max(pace.first, math.ceil(swept * pace.repeat_s)))
        # No text twice, unless all of them are done too soon to be timed.
        number = whole_batches(min(number, max(pool.distinct, math.ceil(swept * _SHORTEST_S))), settings)
    sample = pool.sample(number)
    if not whole:
        run(sample)
    found: list[Answered] = []
    spent_s = 0.0
    while len(found) < pace.repeats and (len(found) < pace.fewest or spent_s < pace.within_s):
        found.append(run(sample))
        spent_s += found[-1].seconds + found[-1].facts.get("start_s", 0.0)
    last = found[-1]
    compared = run(pool.sample(pace.compared)) if last.labels is not None else last
    cuda = torch.cuda.is_available()
    return {
        "repeats": [{"seconds": each.seconds} for each in found],
        "texts": number,
        "distinct": min(number, pool.distinct),
        "tokens": sample.tokens,
        "operations": sample.operations,
        "needed_operations": sample.needed_operations,
        "labels": compared.labels,
        "scores": compared.scores and [round(score, 5) for score in compared.scores],
        "start_s": [each.facts["start_s"] for each in found] if "start_s" in last.facts else None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "facts": {key: value for key, value in last.facts.items() if key != "start_s"},
    }
