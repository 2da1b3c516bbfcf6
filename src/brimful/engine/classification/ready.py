"""A model that is loaded, compared with the plain one, and spread over the GPUs that a pass uses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from brimful.core.callbacks import Callbacks
from brimful.core.classification import AnswerEquivalence
from brimful.core.options.classify import ClassifyOptions
from brimful.engine.classification.gpu_process import GpuProcess, begin_processes
from brimful.engine.classification.gpu_workers import GpuWorkers, Job, job_of
from brimful.engine.classification.inputs import Given, expected_rows
from brimful.engine.classification.request import Asked, Request
from brimful.engine.classification.runner import Runner
from brimful.engine.classification.verify import rows_to_compare, verified_runner
from brimful.hardware.probe import num_gpus_of
from brimful.hardware.ranks import ALONE, Ranks
from brimful.models.model_stats import matmul_parameters
from brimful.step.recovery import OutOfMemoryLog

#: Seconds of one GPU from which all others help, and operations a second that it reaches, to guess them.
_LONG_S, _REACHED = 60.0, 300e12


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A runner and what was found on the way to it.

    fallback: why a slower path runs than was planned. verify_s: seconds of the comparison. log: hears of each time that
    memory ran out. job: for other processes to make the same runner. ranks: those that share the rows.
    """

    runner: Runner
    equivalence: AnswerEquivalence | None
    fallback: str | None
    verify_s: float | None
    gpu_workers: GpuWorkers
    log: OutOfMemoryLog
    job: Job
    ranks: Ranks = ALONE


def make_ready(
    options: ClassifyOptions, given: Given, request: Request, sample: Asked, stack: ExitStack, callbacks: Callbacks,
    ranks: Ranks = ALONE, processes: Sequence[GpuProcess] = (),
) -> Ready:  # fmt: skip
    """Load the model, compare it, and start a process for each other GPU, which `stack` ends.

    processes: as of `begun_processes`.
    """
    callbacks.stage("loading the model, and checking whether it runs packed")
    log, begun = (
        OutOfMemoryLog(warn=callbacks.warning),
        begun_processes(options.gpus, given.precision.device, stack, processes),
    )
    mean_tokens = float(sample.num_tokens_N.mean()) if len(sample.num_tokens_N) else 0.0
    num_tokens = int(expected_rows(given) * mean_tokens)
    checked = verified_runner(
        *(given.checked, options, given.precision, request, given.sample),
        asked=sample,
        num_compared=rows_to_compare(options.verify, given.precision.device.type, num_tokens, mean_tokens),
        num_tokens=num_tokens,
        callbacks=callbacks,
        hear=log,
    )
    callbacks.recipe(checked.runner.recipe)
    seconds = 2.0 * matmul_parameters(checked.runner.model) * num_tokens / _REACHED
    several = seconds > _LONG_S and not options.claim and ranks.count == 1  # the others have GPUs of their own
    job = job_of(checked.runner, options, sample.sequences, num_tokens)
    begun = begun or begun_processes("all" if several and options.gpus is None else None, given.precision.device, stack)
    workers = stack.enter_context(gpu_workers(checked.runner, job, begun, callbacks, log))
    if ranks.count > 1:
        callbacks.note(f"{ranks.count} processes share the rows")
    return Ready(
        runner=checked.runner,
        equivalence=checked.equivalence,
        fallback=checked.fallback,
        verify_s=checked.seconds,
        gpu_workers=workers,
        log=log,
        job=job,
        ranks=ranks,
    )


def begun_processes(
    gpus: str | None, device: torch.device, stack: ExitStack, processes: Sequence[GpuProcess] = ()
) -> list[GpuProcess]:
    """Begin a process for each GPU but the first of as many as `gpus` says; none for None. `stack` ends them.

    processes: those that a command has begun for `gpus`, and ends; then these.
    """
    if processes:
        return list(processes)
    return begin_processes(1 if gpus is None else num_gpus_of(device) if gpus == "all" else int(gpus), stack)


def gpu_workers(
    runner: Runner, job: Job, processes: Sequence[GpuProcess], callbacks: Callbacks, log: OutOfMemoryLog
) -> GpuWorkers:
    """This process's runner, and processes that make the same."""
    if processes:
        callbacks.note(f"{1 + len(processes)} GPUs, a process each")
    return GpuWorkers(runner, job, processes, log)
