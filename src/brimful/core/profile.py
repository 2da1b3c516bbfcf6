"""Profile of one training step: what was measured, per step, and what it is measured against.

Seconds are of one step, the mean over the steps that were timed. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from brimful.core.records import Machine, PeakMemory, Recipe

#: What a step's time is spent on. communication: between processes, with nothing else beside it. idle: no kernel runs;
#: on a CPU, the host is outside torch's operators.
PartName = Literal[
    "contractions",
    "attention",
    "normalisation",
    "element-wise",
    "optimizer",
    "embedding",
    "copies",
    "other",
    "communication",
    "idle",
]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One class of work: time in which it alone, or first among those that overlap, was running.

    share: of the step. count: kernels of it in one step; on a CPU, operators. Both 0 for idle's count.
    """

    name: PartName
    seconds: float
    share: float
    count: float


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel. seconds: of a step, their durations added up. count: launches in a step."""

    name: str
    part: PartName
    seconds: float
    count: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the timed steps.

    mean_s: what everything else is divided by. median_s, fastest_s, slowest_s: over the batches.
    recorded_s: mean while the profiler was recording; as much longer than mean_s as the profiler costs.
    host_s: what the host needs to launch a step. input_wait_s: what it waited for a batch that was not ready.
    """

    mean_s: float
    median_s: float
    fastest_s: float
    slowest_s: float
    recorded_s: float
    host_s: float
    input_wait_s: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a step, mean over the timed steps.

    tokens: of the sequences. computed_tokens: with the tails of token budgets, or padding.
    product_flops: of forward and backward products of all computed tokens with the model's matrices.
    attention_flops: of real tokens with one another. Of a last layer that leaves out what the head does not read, both
    count what it computes. useful_flops: of both kinds, for real tokens alone, as the plain model computes them.
    optimizer_bytes: that an update must read and write at least, the gradient's norm included.
    """

    samples: float
    tokens: float
    computed_tokens: float
    micro_batches: float
    product_flops: float | None
    attention_flops: float | None
    useful_flops: float | None
    optimizer_bytes: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured peaks of this device in the run's precision.

    matmul_flops_per_s: a large square product. model_matmul_flops_per_s: the model's own products, forward and
    backward, one after another, over the tokens of a micro-batch. copy_bytes_per_s: a large copy, bytes read and
    written. datasheet_flops_per_s: dense, by the maker; None for a chip that is not in the table.
    """

    matmul_flops_per_s: float
    model_matmul_flops_per_s: float | None
    copy_bytes_per_s: float
    datasheet_flops_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that the step achieved.

    fill: real tokens over computed tokens. contraction_flops_per_s, attention_flops_per_s, optimizer_bytes_per_s: while
    kernels of that part run. mfu: useful_flops over the step's time and the measured rate of a large square product.
    datasheet_mfu: over the maker's figure instead.
    """

    samples_per_s: float
    tokens_per_s: float
    fill: float
    contraction_flops_per_s: float | None
    attention_flops_per_s: float | None
    optimizer_bytes_per_s: float | None
    mfu: float | None
    datasheet_mfu: float | None


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Sums between several processes in a step, as the one that is profiled sees them.

    imbalance: tokens of the process that has the most in a step, over the mean of all. seconds: in which sums were on
    their way, processes that come late waited for. hidden_s: of these, beside other work. Both are None where the host
    does not see it: on a CPU, with weights in parts.
    """

    processes: int
    imbalance: float
    seconds: float | None
    hidden_s: float | None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Time of one training step, by kind of kernel.

    steps: how many were timed, and then recorded. parts: add up to the mean step, idle last. stretch: what recorded
    kernels were shortened by where together they were longer than the step without the profiler, else 1.
    kernels: by time, longest first. num_kernels, num_launches: in one step; launches are the host's calls, None where
    the profiler does not see them. communication: None for one process; else all work is that of this process's part.
    """

    model: str
    options: Mapping[str, Any]
    recipe: Recipe
    machine: Machine
    packed: bool
    packed_reason: str | None
    steps: int
    time: StepTime
    parts: tuple[Part, ...]
    stretch: float
    kernels: tuple[Kernel, ...]
    num_kernels: float
    num_launches: float | None
    work: Work
    limits: Limits
    rates: Rates
    peak_bytes: PeakMemory = field(default_factory=PeakMemory)
    reading: str = ""
    communication: Communication | None = None
    schema: int = 1

    def part(self, name: PartName) -> Part:
        """The part of this name; every one is there."""
        return next(part for part in self.parts if part.name == name)
