"""Choices from measured rows: which is recommended, which measurement counts, and the share of the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from brimful.benchmarking.process import KILLED
from brimful.benchmarking.rows import LEARNED
from brimful.core.bench import RECOMMENDED, BenchRow, Measured, Row, Workload
from brimful.core.units import parse_bytes


def recommended(found: Sequence[BenchRow], memory_limit: str | None, *, on_gpu: bool) -> Row | None:
    """Row of the fastest recipe of ours that fits, has the same optimizer and clipping, and changes no arithmetic. None
    if there is none. Products in the precision that train chooses by itself are allowed: on a GPU bf16, and tf32."""
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    rounding = ("bf16", "tf32") if on_gpu else ()

    def fits(figures: Measured) -> bool:
        return limit is None or figures.memory_bytes is None or figures.memory_bytes <= limit

    def keeps_arithmetic(figures: Measured) -> bool:
        levers = () if figures.recipe is None else figures.recipe.levers
        return figures.recipe is not None and all(
            lever.arithmetic == "exact" or (lever.name == "precision" and lever.value in rounding) for lever in levers
        )

    def as_asked(row: Row, figures: Measured) -> bool:
        return row.settings.get("precision", "auto") in ("auto", figures.precision)  # fp8 may have run in bf16

    ours = [
        (each.measured.samples_per_s, each.row)
        for each in found
        if each.measured is not None and each.row.side == "brimful" and each.row.name != RECOMMENDED
        and not LEARNED & each.row.settings.keys() and keeps_arithmetic(each.measured) and fits(each.measured)
        and as_asked(each.row, each.measured)
    ]  # fmt: skip
    return max(ours, key=lambda each: each[0])[1] if ours else None


def is_final(row: BenchRow) -> bool:
    """False for a row that the next call tries again: one that was cut short, that failed, as a package may be missing,
    or that somebody killed."""
    if row.status == "measured":
        return not row.cut_short
    return row.status == "out_of_memory" and not (row.reason or "").startswith(KILLED)


def waited_less(one: Measured, other: Measured) -> bool:
    """True where the threads of `one` waited less for cores than those of `other`, or, where the system does not say
    so, had more of them."""
    if one.waiting is not None and other.waiting is not None:
        return one.waiting < other.waiting
    return (one.cores or 0.0) > (other.cores or 0.0)


def with_mfu(found: Sequence[BenchRow], work: Workload) -> list[BenchRow]:
    """The rows with MFU, but where one of the same precision is above 1: the machine was busy when its products were
    measured."""
    shares = [None if each.measured is None else _share(each.measured, work) for each in found]
    wrong = {
        each.measured.precision
        for each, share in zip(found, shares, strict=True)
        if each.measured is not None and (share or 0.0) > 1.0
    }
    return [
        each
        if each.measured is None
        else dataclasses.replace(
            each, measured=dataclasses.replace(each.measured, mfu=None if each.measured.precision in wrong else share)
        )
        for each, share in zip(found, shares, strict=True)
    ]


def _share(figures: Measured, work: Workload) -> float | None:
    return over(figures.flops_per_s, work.rates.get(figures.products))


def over(rate: float | None, peak: float | None) -> float | None:
    """A rate over the peak; None where one of the two is unknown."""
    return None if rate is None or not peak else rate / peak
