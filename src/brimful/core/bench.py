"""Records of `bench`: rows of settings that were measured side by side, each in a process of its own.

A bench's folder holds `results.json`, a `Bench`. Unknown is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from brimful.core import atomic_files
from brimful.core.errors import OutputError
from brimful.core.records import Arithmetic, Machine, PeakMemory, Recipe, from_json

Side = Literal["trainer", "brimful"]
#: measured: there are figures. out_of_memory, failed: it was begun and could not end, and `reason` says why.
#: unsupported: it cannot run here. left: there was no time for it. not_reached: the bench was stopped before its end.
Status = Literal["measured", "out_of_memory", "failed", "unsupported", "left", "not_reached"]

#: File of a bench's folder with its record.
RESULTS = "results.json"
#: The work that its rows are of, and the folder of finished ones: what a bench leaves that measured none.
SETUP, ROWS = "bench.json", "rows"
#: Fewest blocks whose median is a row's speed, where nobody asks for fewer.
LEAST_BLOCKS = 3
#: Share of waiting for a core above which a row's speed says little.
_WAITING = 0.1
#: Name of the last row: the fastest recipe of brimful that changes no arithmetic, measured once more.
RECOMMENDED = "recommended"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train. settings: by the names of TrainOptions, or of transformers' TrainingArguments.

    base: key of the row that it differs from by one lever, if there is one. needs_gpu: the setting that only a GPU has.
    """

    side: Side
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    needs_gpu: str | None = None

    @property
    def key(self) -> str:
        """The row's name, with whose it is."""
        return f"{self.side}: {self.name}"

    @property
    def identity(self) -> str:
        """Key of what is measured, whatever its name. The recommended row measures anew, and is no other one."""
        return json.dumps([self.side, dict(self.settings), self.name == RECOMMENDED], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of every row: `repeats` blocks of `block`, after `warm_up` that are not timed."""

    warm_up: int
    repeats: int
    block: int

    @property
    def total(self) -> int:
        """All steps of a row."""
        return self.warm_up + self.repeats * self.block


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work that all rows do: the same rows in the same batches from the same weights.

    rows: sequences to draw batches from; rows_left_out: others, as they fill no batch. median_tokens, longest_tokens:
    of a sequence. data_fingerprint: of the rows. parameters: of the model. rates: measured FLOP/s of a large square
    matrix product by precision; rates_waiting: share of the time in which its threads waited for a core; datasheet: the
    maker's rates. num_threads: of the process, for products on the CPU. step_s: seconds of a plain padded step of
    transformers, by which the number of steps was chosen.
    """

    device: str
    task: str
    labels: int
    rows: int
    batch_size: int
    median_tokens: int
    longest_tokens: int
    data_fingerprint: str
    model_type: str
    parameters: int
    machine: Machine
    rates: Mapping[str, float] = field(default_factory=dict)
    datasheet: Mapping[str, float] = field(default_factory=dict)
    num_threads: int | None = None
    step_s: float | None = None
    rows_left_out: int = 0
    rates_waiting: Mapping[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """True on a GPU."""
        return self.device != "CPU"

    @property
    def cores_text(self) -> str | None:
        """Threads and cores in words, as `1 thread of 2 cores`; None where neither is known."""
        cores, threads = self.machine.num_cores, self.num_threads
        known = [f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in ((threads, "thread"), (cores, "core")) if n]
        return " of ".join(known) or None

    def disturbed(self, figures: Measured) -> bool:
        """True for a row on a CPU while which others were busy: its speed says little."""
        return not self.on_gpu and is_disturbed(figures.cores, self.num_threads, figures.waiting)

    def rate_disturbed(self, figures: Measured) -> bool:
        """True for a row whose MFU is over a rate on a CPU that was measured while others were busy."""
        waiting = self.rates_waiting.get(figures.products)
        return not self.on_gpu and is_disturbed(None, None, waiting)

    @property
    def rows_text(self) -> str:
        """Rows in words, and how many are left out."""
        left = f" ({self.rows_left_out:,} beyond whole batches are left out)" if self.rows_left_out else ""
        return f"{self.rows:,} rows{left}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures of one row.

    samples_per_s, step_s: medians over the blocks; block_rates: samples/s of each, in their order. tokens_per_s: real
    tokens, without padding. flops_per_s: of the useful operations. mfu: those over the measured rate of matrix products
    in the row's precision; datasheet_mfu: over the maker's. nvml_bytes: most that the driver counted beyond what was
    used before the row. loss: mean over the last block, after `Steps.total` steps. fill: real over computed tokens.
    cores: CPU seconds of the process in a second of timed steps. waiting: share of the time in which its threads could
    have run and waited for a core. arithmetic: the least exact class of the settings.
    first_step_s: from the start of the process to the end of its first step.
    """

    samples_per_s: float
    block_rates: tuple[float, ...]
    step_s: float
    tokens_per_s: float
    precision: str
    arithmetic: Arithmetic
    flops_per_s: float | None = None
    mfu: float | None = None
    datasheet_mfu: float | None = None
    fill: float | None = None
    loss: float | None = None
    peak_bytes: PeakMemory = field(default_factory=PeakMemory)
    nvml_bytes: int | None = None
    cores: float | None = None
    waiting: float | None = None
    first_step_s: float | None = None
    recipe: Recipe | None = None

    @property
    def products(self) -> str:
        """Precision whose rate of products `mfu` is over."""
        return self.precision.replace("fp8", "bf16")

    @property
    def spread(self) -> float | None:
        """Slowest to fastest block, over the median; None of one alone."""
        if len(self.block_rates) < 2:
            return None
        return (max(self.block_rates) - min(self.block_rates)) / self.samples_per_s

    @property
    def memory_bytes(self) -> int | None:
        """Peak memory to compare rows by: the driver's on a GPU, resident memory of the process on a CPU."""
        return self.nvml_bytes if self.nvml_bytes is not None else self.peak_bytes.nvml or self.peak_bytes.resident


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One row, and its figures or the reason that there are none. notes: warnings of the process. wall_s: of it.

    cut_short: its figures are of fewer blocks than the others', as `reason` says: the next call measures it again.
    """

    row: Row
    status: Status
    measured: Measured | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()
    wall_s: float | None = None
    cut_short: bool = False


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All rows of a bench. recommended: key of the row whose settings are recommended, None if there is none.

    options: as they were given. command: to repeat it. needs_budget_s: seconds of --budget-s that one of the rows
    which are left needs, where the one given was enough for none.
    """

    model: str
    data: str | None
    options: Mapping[str, Any]
    command: str
    workload: Workload
    steps: Steps
    rows: tuple[BenchRow, ...]
    recommended: str | None = None
    needs_budget_s: float | None = None
    schema: int = 1

    def measured(self) -> list[tuple[Row, Measured]]:
        """Rows with figures, in their order."""
        return [(each.row, each.measured) for each in self.rows if each.measured is not None]

    def ratio(self, figures: Measured) -> float | None:
        """Samples/s over those of the first row; None if that has none."""
        first = self.rows[0].measured if self.rows else None
        return None if first is None else figures.samples_per_s / first.samples_per_s


def is_disturbed(cores: float | None, num_threads: int | None, waiting: float | None) -> bool:
    """True where threads waited for a core in more than a tenth of the time in which they could have run.

    cores: CPU seconds in one: where the system does not say how long they waited, less than six tenths of what the
    threads could use.
    """
    if waiting is not None:
        return waiting > _WAITING
    return cores is not None and num_threads is not None and cores < 0.6 * num_threads


def frontier(points: list[tuple[float, float]]) -> list[int]:
    """Numbers of the points (memory, speed) that no other one beats in one and equals in the other, by memory.

    Of equal points the first counts.
    """
    best, found = float("-inf"), []
    for number in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if points[number][1] > best:
            best = points[number][1]
            found.append(number)
    return found


def is_begun_bench(path: Path) -> bool:
    """True for the folder of a bench, of one that has no row yet, too."""
    return (path / ROWS).is_dir() and any((path / name).is_file() for name in (SETUP, atomic_files.LOCK))


def read_bench(path: Path) -> Bench | None:
    """The record of a bench's folder, or of its results.json; None where there is none. Raises: OutputError."""
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        return None
    try:
        return from_json(Bench, file.read_text("utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{atomic_files.path_text(file)} is no record of a bench", hint="run it again") from error
