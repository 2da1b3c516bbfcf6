"""The record of a comparison: runs or benches side by side, what differs, and how sure that is. Unknown is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from brimful.core.evaluation import Metric

Kind = Literal["run", "evaluation", "bench"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One folder. name: short, different from the others'.

    status: of a run, `finished`, `running` or `planned`. metrics: of the saved model where it was evaluated, else of
    the last evaluation. peak_bytes: the whole of the peak; memory: its components. losses, evaluated: step and value,
    of the training's loss and of the main metric; curves are thinned. recommended: row of a bench whose settings are.
    """

    name: str
    folder: str
    kind: Kind
    status: str | None = None
    device: str | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    num_rows: int | None = None
    steps: int | None = None
    train_s: float | None = None
    wall_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    losses: tuple[tuple[int, float], ...] = ()
    evaluated: tuple[tuple[int, float], ...] = ()
    recommended: str | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that is not the same everywhere: as text of each folder, None where it is not set or not known.

    part: `learned` for what decides what is learned, of evaluations `evaluated`, `run` for how it was run, `machine`
    for where. ` (chosen)` stands behind a value that nobody asked for.
    """

    name: str
    values: tuple[str | None, ...]
    part: Literal["learned", "evaluated", "run", "machine"]


@dataclass(frozen=True, kw_only=True)
class PairedMetric:
    """Difference of a metric, of the other folder less the first, on the same rows; and its interval."""

    name: str
    difference: float
    low: float | None = None
    high: float | None = None

    @property
    def is_clear(self) -> bool:
        """True where the interval lies to one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two folders' answers to the same rows, by their places among the folders: `first` and `other`.

    only_first, only_other: rows that one alone has right, and p_value: of McNemar's exact test, that the two are right
    equally often. None of a regression.
    """

    first: int
    other: int
    num_rows: int
    metrics: tuple[PairedMetric, ...]
    only_first: int | None = None
    only_other: int | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class RowFigures:
    """One row of one bench. low, high: slowest and fastest repeat. reason: of a row without figures.

    disturbed: others were busy on the machine, and the speed says little. cut_short: by a budget, to fewer repeats.
    """

    samples_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    reason: str | None = None
    disturbed: bool = False
    cut_short: bool = False


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A row that benches have in common or not, by its name: figures of each bench, None where it has no such row."""

    name: str
    figures: tuple[RowFigures | None, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two or more folders side by side; ratios and differences are against the first.

    main_metric: of the task, None of benches. warnings: why ratios are not what they seem. notes: what could not be
    compared, and why.
    """

    compared: tuple[Compared, ...]
    main_metric: str | None = None
    differences: tuple[Difference, ...] = ()
    paired: tuple[Paired, ...] = ()
    rows: tuple[ComparedRow, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    resamples: int = 0
    seed: int = 0
    command: str | None = None
    schema: int = 1
