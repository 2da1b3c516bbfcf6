"""Figures of a row from the times at the edges of its blocks: both sides are counted alike."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from brimful.benchmarking.waiting import ThreadTimes, thread_times, waiting_share
from brimful.core.bench import LEAST_BLOCKS, Measured, Steps
from brimful.core.phases import process_began
from brimful.core.records import Arithmetic, PeakMemory, Recipe


@dataclass
class Blocks:
    """Readings of a row: `time.perf_counter()` at the edges of blocks, the losses of the last block, and the tokens
    that timed steps computed, padding counted. first_step_at: end of the very first step. until: `time.monotonic()` by
    which the last block is to end, None without such a time."""

    marks: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    threads: list[ThreadTimes] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    first_step_at: float | None = None
    until: float | None = None

    def mark(self) -> None:
        """Note an edge of a block: now."""
        self.marks.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        self.threads.append(thread_times())

    def done(self, steps: Steps) -> Steps:
        """Return the steps of a row without the blocks that were not made."""
        return dataclasses.replace(steps, repeats=len(self.marks) - 1)

    def is_over(self, steps: Steps) -> bool:
        """Return whether the row ends here: all blocks are made, or enough, and another one would not end in time."""
        seconds = [after - before for before, after in pairwise(self.marks)]
        if len(seconds) >= steps.repeats:
            return True
        if self.until is None or len(seconds) < LEAST_BLOCKS:
            return False
        return time.monotonic() + max(seconds) > self.until


def together(first: Measured, other: Measured) -> Measured:
    """Figures of a row that two processes have measured: medians over the blocks of both, and the most memory."""
    rates = (*first.block_rates, *other.block_rates)
    rate = median(rates)
    times = rate / first.samples_per_s

    def scaled(value: float | None) -> float | None:
        return None if value is None else times * value

    most = max(first, other, key=lambda each: each.memory_bytes or 0)
    return dataclasses.replace(
        first,
        samples_per_s=rate,
        block_rates=rates,
        step_s=first.step_s / times,
        tokens_per_s=first.tokens_per_s * times,
        flops_per_s=scaled(first.flops_per_s),
        mfu=scaled(first.mfu),
        datasheet_mfu=scaled(first.datasheet_mfu),
        peak_bytes=most.peak_bytes,
        nvml_bytes=most.nvml_bytes,
    )


def figures(
    blocks: Blocks, steps: Steps, *, lengths: npt.NDArray[np.int64], flops: float | None, precision: str,
    arithmetic: Arithmetic, peak: PeakMemory, recipe: Recipe | None = None,
) -> Measured:  # fmt: skip
    """Rates of the timed steps. lengths: tokens of all their rows; flops: their useful operations."""
    seconds = [after - before for before, after in pairwise(blocks.marks)]
    per_block = len(lengths) / steps.repeats
    rates = tuple(per_block / each for each in seconds)
    # Blocks differ in their rows' lengths: tokens and operations are of all of them, at the median rate of samples.
    rate = median(rates)
    per_sample_s = 1.0 / rate
    num_tokens = int(lengths.sum())
    finite = all(np.isfinite(blocks.losses)) and blocks.losses
    return Measured(
        samples_per_s=rate,
        block_rates=rates,
        step_s=per_block / steps.block * per_sample_s,
        tokens_per_s=num_tokens / len(lengths) * rate,
        precision=precision,
        arithmetic=arithmetic,
        flops_per_s=None if flops is None else flops / len(lengths) * rate,
        fill=num_tokens / blocks.computed_tokens if blocks.computed_tokens else None,
        loss=fmean(blocks.losses) if finite else None,
        peak_bytes=peak,
        cores=(blocks.cpu_s[-1] - blocks.cpu_s[0]) / sum(seconds),
        waiting=waiting_share(blocks.threads[0], blocks.threads[-1]),
        first_step_s=None if blocks.first_step_at is None else blocks.first_step_at - process_began(),
        recipe=recipe,
    )
