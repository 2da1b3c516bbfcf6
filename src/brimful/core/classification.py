"""The record of one classification of a file: counts, speed, and equivalence with the plain model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from brimful.core.records import LabelSpace, Machine, OutOfMemory, PeakMemory, Recipe

StageName = Literal["read", "tokenise", "compute", "write"]

#: Rows with an error that the record names; the output names all of them.
FEW_ERRORS = 5
#: Upper ends of the histogram bins of token lengths; the last bin is open.
LENGTH_ENDS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
#: Histogram bins of confidence, of equal width from 0 to 1.
CONFIDENCE_BINS = 20


@dataclass(frozen=True, kw_only=True)
class RowError:
    """Error of one row: the file, the row's number in it (from 1, header not counted), and the message."""

    file: str
    row: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of rows that were classified. Counts of parts add up to those of the whole.

    num_empty: rows without text, or without a token that the model knows. num_unlabelled: of zero-shot, rows with text
    and without candidate labels. num_errors: rows with an error beside.
    first_errors: the first of these rows, FEW_ERRORS at the most.
    token_budget: most tokens of a micro-batch since memory ran out, None if it never did.
    num_tokenizer_fallback: rows tokenised without the word-piece cache, after `tokenizers` had given other ids.
    labels: how often each label was given. lengths: texts by number of tokens, a bin per end in LENGTH_ENDS and one
    beyond. confidences: texts by their highest probability, in CONFIDENCE_BINS; empty for a regression.
    """

    num_rows: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_empty: int = 0
    num_unlabelled: int = 0
    num_errors: int = 0
    num_tokenizer_fallback: int = 0
    token_budget: int | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = (0,) * (len(LENGTH_ENDS) + 1)
    confidences: tuple[int, ...] = ()
    first_errors: tuple[RowError, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            first_errors=(self.first_errors + other.first_errors)[:FEW_ERRORS],
            token_budget=min(filter(None, (self.token_budget, other.token_budget)), default=None),
            labels=dict(Counter(self.labels) + Counter(other.labels)),
            lengths=_added(self.lengths, other.lengths),
            confidences=_added(self.confidences, other.confidences),
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name[:4] == "num_"},
        )


def _added(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True)) if left and right else tuple(left or right)


@dataclass(frozen=True, kw_only=True)
class AnswerEquivalence:
    """The fast path against the plain fp32 Hugging Face model, on some of the user's own rows.

    agreement: share of rows with the same label. largest_difference: of any probability (regression: relative, of any
    output). num_near_ties: rows whose two best labels are, in fp32, closer than tolerance. num_flips: rows whose label
    differs. num_unexplained: flips that are no near-ties. passed: no difference above `tolerance`, no unexplained flip.
    """

    num_rows: int
    precision: str
    tolerance: float
    agreement: float
    largest_difference: float
    num_near_ties: int
    num_flips: int
    num_unexplained: int
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the pipeline. busy_s: seconds it worked, without waiting for other stages."""

    name: StageName
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class GpuShare:
    """Work of one of several GPUs of a machine in a pass.

    number: among those that the pass was given, from 0. num_windows: that it computed. busy_s: seconds that they took
    by its own clock. joined_s: seconds from the first row read until it was given its first window.
    """

    number: int
    num_windows: int
    busy_s: float
    joined_s: float


@dataclass(frozen=True, kw_only=True)
class ClaimWorker:
    """A process that classified files by --claim. work_s: seconds that it spent on files whose results are kept."""

    host: str
    pid: int
    device: str
    num_files: int
    num_rows: int
    work_s: float


@dataclass(frozen=True, kw_only=True)
class ClaimedFiles:
    """Files of a classification by --claim, and the processes that did them.

    num_taken_over: files that were claimed again, after a process was killed or stopped, or had left.
    """

    num_files: int
    num_taken_over: int
    workers: tuple[ClaimWorker, ...]


@dataclass(frozen=True, kw_only=True)
class Classification:
    """One pass of a classifier over a file: everything needed to repeat and to explain it.

    labels: what answers can be; of zero-shot the candidate labels, where each row has its own those that were given.
    wall_s: seconds from the first row read to the last one written. start_s: seconds before it: loading and checking;
    verify_s: of these, comparing with the plain model, None without a comparison.
    gpus: where several of this machine took part, in their order. limit: the slowest stage. mfu: FLOPs of real tokens
    over the datasheet's peak.
    notes: what was guessed of the model, decided about the input's files and left out of them (keys of JSON), since
    this process began.
    equivalence: None with --verify 0, and where no row could be compared.
    fallback: why a slower path runs than was planned, None if none does. out_of_memory: each time that memory ran out.
    max_length: longest sequence in tokens, where longer ones were cut, and its reason.
    claimed: by --claim, files and processes; there is no wall_s then, nor what depends on it, for clocks of machines
    differ. None otherwise.
    """

    model: str
    data: str
    output: str | None
    command: str
    options: Mapping[str, Any]
    labels: LabelSpace
    recipe: Recipe
    machine: Machine
    counts: Counts = Counts()
    equivalence: AnswerEquivalence | None = None
    fallback: str | None = None
    out_of_memory: tuple[OutOfMemory, ...] = ()
    max_length: int | None = None
    max_length_reason: str | None = None
    notes: tuple[str, ...] = ()
    start_s: float | None = None
    verify_s: float | None = None
    wall_s: float | None = None
    texts_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    stages: tuple[Stage, ...] = ()
    gpus: tuple[GpuShare, ...] = ()
    limit: StageName | None = None
    peak_bytes: PeakMemory = field(default_factory=PeakMemory)
    resumed_rows: int = 0
    claimed: ClaimedFiles | None = None
    schema: int = 1
