"""Length of measurements: settings in short runs, round by round, then the fastest two, or each that has a row, in
repeats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from floor import read_pool
from settings import fastest, next_trials
from sides import SIDES, Answered, Run, Settings
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


def measure(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """Measure each setting of the plan in `repeats`; `error` if it failed.

    With a sweep, its trials come first: what begins, then its `texts_per_s` or `error`. known: trials of before.
    """
    work, pace = Work.parse(plan["work"]), Pace(**plan["pace"])
    side = SIDES[plan["side"]](work, inputs, plan["device"], smoke=plan["smoke"])
    pool = read_pool(inputs, work)
    chosen: list[Settings] = plan["settings"]
    rates: dict[str, float] = {}
    if plan["sweep"]:
        tried = list(plan["known"])
        about = {"flash": find_spec("flash_attn") is not None, "fixed": not work.candidates, "smoke": plan["smoke"]}
        while wanted := next_trials(tried, plan["side"], plan["device"], **about):
            for each in wanted:
                yield {"begins": each}
                found = _tried(lambda each=each: {"texts_per_s": _rate(side.prepare(each), pool, pace, each)})
                tried.append({"settings": each, **found})
                yield {"trial": True, **tried[-1]}
        chosen = fastest(tried)
        rates = {json.dumps(each["settings"]): each["texts_per_s"] for each in tried if "texts_per_s" in each}
    whole = work.files and plan["side"] == "brimful"
    for place, each in enumerate(chosen):
        if whole and not place:  # what is compiled is kept for all that come
            _tried(lambda each=each: {"seconds": side.prepare(each)(pool.sample(pace.file_texts)).seconds})
        rate = rates.get(json.dumps(each))
        measured = partial(_repeated, pool=pool, pace=pace, settings=each, rate=rate, whole=whole)
        found = _tried(lambda each=each, measured=measured: measured(side.prepare(each)))
        yield {"settings": each, **found}


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
    while True:
        seconds = run(pool.sample(number)).seconds
        if seconds >= pace.sweep_s or number == pace.most:
            return number / seconds
        number = min(pace.most, math.ceil(number * min(_GROWTH, 1.5 * pace.sweep_s / seconds)))


def _repeated(
    run: Run, pool: Pool, pace: Pace, settings: Settings, *, rate: float | None, whole: bool
) -> dict[str, Any]:
    """Repeats of one sample. rate: texts a second of the sweep, after which nothing is cold any more; None without one.

    whole: always `file_texts`, as each run begins with loading the model, and none that does not count.
    """
    number = pace.file_texts
    if not whole:
        swept = rate or _rate(run, pool, pace, settings)
        number = min(pace.most, max(pace.first, math.ceil(swept * pace.repeat_s)))
        # No text twice, unless all of them are done too soon to be timed.
        number = min(number, max(pool.distinct, math.ceil(swept * _SHORTEST_S)))
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
