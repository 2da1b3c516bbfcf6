"""Profile of one training step: the step that `train` would run, on the batches that it would run on.

It is warmed up until every shape has been met and captured, then timed without the profiler, then recorded with it.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DeviceError, OptionError, OutputError
from brimful.core.options import NOT_OF_A_STEP, ProfileOptions
from brimful.core.profile import Limits, Profile, Rates, StepTime, Work
from brimful.core.records import PeakMemory
from brimful.data.batches.batch import Batch, MicroBatch
from brimful.engine.assemble import Built, build
from brimful.engine.prepare import prepare
from brimful.engine.profiling.timing import run_steps, time_steps, warm_up
from brimful.engine.training.train import deterministic
from brimful.hardware.memory import MemoryWatch
from brimful.hardware.probe import choose_device, probe
from brimful.hardware.specs import datasheet_flops_per_s
from brimful.kernels.layout import PackedInputs
from brimful.levers.optimizer import asked_optimizer
from brimful.levers.precision import choose_precision
from brimful.measurement.bottleneck import reading_of
from brimful.measurement.kernels import Breakdown, breakdown, with_callers
from brimful.measurement.peaks import measure_limits
from brimful.measurement.trace import Trace, record
from brimful.models.model_stats import attention_of, layers_of, token_matrices
from brimful.models.packed.packed_forward import LeftOut, PackedModel
from brimful.step.precision import Precision

#: Passes over the batches to time them, the median taken batch by batch.
_ROUNDS = {"cuda": 3, "cpu": 1}
#: What to do about a trace that cannot be written.
_ELSEWHERE = "choose another --trace, or make this one writable"


def profile(options: ProfileOptions, callbacks: Callbacks) -> Profile:
    """Builds the step that `options` ask for, and says where its time goes. Nothing is trained that would be kept.

    Raises: InputError for what cannot be done as asked; DeviceError where the profiler sees nothing of the GPU.
    """
    trace = None if options.trace is None else _checked(Path(options.trace), options.data)
    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    prepared = prepare(options, callbacks)
    with precision.apply(), deterministic(options.deterministic):
        callbacks.stage("loading the model")
        built = build(options, prepared, precision, callbacks)
        callbacks.recipe(built.recipe)
        with closing(built.source):
            found = _measure(built, options.steps, callbacks)
        parameters = sum(parameter.numel() for parameter in built.step.update.parameters)
        work = _work(built, found.facts, asked_optimizer(options).moved_bytes(parameters, built.step.update.num_idle()))
    if trace is not None:
        _write(trace, found.trace.document)
        callbacks.note(f"trace of {options.steps} steps: {trace}")
    return _profile(options, built, found, work)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """One batch: samples, lengths of its sequences, and the tokens of each of its micro-batches."""

    lengths: tuple[int, ...]
    computed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Everything measured."""

    facts: tuple[_Facts, ...]
    limits: Limits
    time: StepTime
    trace: Trace
    breakdown: Breakdown
    peak: PeakMemory


def _measure(built: Built, steps: int, callbacks: Callbacks) -> _Found:
    device = built.step.device
    facts = tuple(_facts(batch) for batch in built.source.batches(1, steps + 1))
    callbacks.stage("measuring what the device can do")
    limits = _limits(built, round(statistics.median(tokens for each in facts for tokens in each.computed)))
    memory = MemoryWatch(device)
    callbacks.stage("warming up")
    warm_up(built, steps, callbacks)
    callbacks.stage(f"timing {steps} steps")
    rounds = [time_steps(built, steps) for _ in range(_ROUNDS[device.type])]
    peak = memory.peak()
    callbacks.stage(f"recording {steps} steps")
    recorded: list[float] = []
    trace = record(
        device,
        warm_up=lambda: run_steps(built, range(1)),
        steps=lambda: recorded.append(run_steps(built, range(1, steps + 1))),
    )
    if device.type == "cuda" and not trace.kernels:
        raise DeviceError(
            "torch's profiler saw no kernel on this GPU",
            hint="end other profilers; in a container, allow CUPTI to read the GPU",
        )
    per_batch = np.median([each.seconds for each in rounds], axis=0)
    step_s, recorded_s = float(per_batch.mean()), recorded[0] / steps
    if device.type == "cuda":
        found = breakdown(trace.kernels, trace.kernels, steps=steps, step_s=step_s)
    else:
        pieces, calls = with_callers(trace.operators)
        found = breakdown(pieces, calls, steps=steps, step_s=step_s, stretch=recorded_s / step_s)
    times = StepTime(
        mean_s=step_s,
        median_s=float(np.median(per_batch)),
        fastest_s=float(per_batch.min()),
        slowest_s=float(per_batch.max()),
        recorded_s=recorded_s,
        host_s=statistics.median(each.host_s for each in rounds),
        input_wait_s=statistics.median(each.input_wait_s for each in rounds),
    )
    return _Found(facts=facts, limits=limits, time=times, trace=trace, breakdown=found, peak=peak)


def _facts(batch: Batch) -> _Facts:
    lengths = [length for micro in batch.micro_batches for length in _lengths(micro)]
    return _Facts(lengths=tuple(lengths), computed=tuple(micro.inputs.num_tokens for micro in batch.micro_batches))


def _lengths(micro: MicroBatch) -> list[int]:
    """Lengths of the sequences of a micro-batch that is still on the host."""
    inputs, number = micro.inputs, len(micro.samples)
    sizes = inputs.segments.cu_seqlens_N.diff() if isinstance(inputs, PackedInputs) else inputs.mask_RL.sum(1)
    return [int(size) for size in sizes[:number]]


def _limits(built: Built, num_tokens: int) -> Limits:
    device, precision = built.step.device, built.precision
    return measure_limits(
        device,
        precision.dtype,
        shapes=token_matrices(built.model) or {},
        num_tokens=num_tokens,
        datasheet_flops_per_s=_datasheet(device, precision),
    )


def _datasheet(device: torch.device, precision: Precision) -> float | None:
    if device.type != "cuda":
        return None
    measured = "bf16" if precision.value == "fp8" else precision.value  # a step in fp8 is held against bf16's limits
    return datasheet_flops_per_s(torch.cuda.get_device_name(device), measured)


def _work(built: Built, facts: Sequence[_Facts], optimizer_bytes: int) -> Work:
    steps = len(facts)
    tokens = sum(sum(each.lengths) for each in facts) / steps
    computed = sum(sum(each.computed) for each in facts) / steps
    found = token_matrices(built.model)
    per_token = None if found is None else 6 * sum(count * rows * columns for (rows, columns), count in found.items())
    attention = attention_of(built.model)
    among = None if attention is None else attention.flops(np.concatenate([each.lengths for each in facts])) / steps
    samples = sum(len(each.lengths) for each in facts) / steps
    execution, layers = built.step.execution, layers_of(built.model)
    skipped = execution.left_out if isinstance(execution, PackedModel) else LeftOut()
    whole_layers = 1.0 - 1.0 / len(layers) if skipped.attention and layers is not None else 1.0
    rows = skipped.parameters * (computed - samples)  # of the last layer, about: slots may be empty
    return Work(
        samples=samples,
        tokens=tokens,
        computed_tokens=computed,
        micro_batches=sum(len(each.computed) for each in facts) / steps,
        product_flops=None if per_token is None else per_token * computed - 6 * rows,
        attention_flops=None if among is None else among * whole_layers,
        useful_flops=None if per_token is None or among is None else per_token * tokens + among,
        optimizer_bytes=optimizer_bytes,
    )


def _rates(found: _Found, work: Work) -> Rates:
    step_s = found.time.mean_s
    seconds = {part.name: part.seconds for part in found.breakdown.parts}
    useful = None if work.useful_flops is None else work.useful_flops / step_s
    peak = found.limits.datasheet_flops_per_s
    return Rates(
        samples_per_s=work.samples / step_s,
        tokens_per_s=work.tokens / step_s,
        fill=work.tokens / work.computed_tokens,
        contraction_flops_per_s=_per_s(work.product_flops, seconds["contractions"]),
        attention_flops_per_s=_per_s(work.attention_flops, seconds["attention"]),
        optimizer_bytes_per_s=_per_s(work.optimizer_bytes, seconds["optimizer"]),
        mfu=None if useful is None else useful / found.limits.matmul_flops_per_s,
        datasheet_mfu=None if useful is None or peak is None else useful / peak,
    )


def _per_s(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds == 0 else amount / seconds


def _profile(options: ProfileOptions, built: Built, found: _Found, work: Work) -> Profile:
    packing, launches = built.packing, found.trace.num_launches
    asked = {name: value for name, value in dataclasses.asdict(options).items() if name not in NOT_OF_A_STEP}
    result = Profile(
        model=options.model,
        options=asked,
        recipe=built.recipe,
        machine=probe(),
        packed=packing.packed,
        packed_reason=packing.reason,
        steps=options.steps,
        time=found.time,
        parts=found.breakdown.parts,
        stretch=found.breakdown.stretch,
        kernels=found.breakdown.kernels,
        num_kernels=found.breakdown.num_kernels,
        num_launches=None if launches is None else launches / options.steps,
        work=work,
        limits=found.limits,
        rates=_rates(found, work),
        peak_bytes=found.peak,
    )
    return dataclasses.replace(result, reading=reading_of(result))


def _checked(path: Path, data: str) -> Path:
    """Raises: OptionError for a trace that would be a folder or the data; OutputError where it cannot be written."""
    if path.is_dir():
        raise OptionError(f"--trace {atomic_files.path_text(path)} is a folder", hint="give the name of a file")
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise OptionError(f"--trace {atomic_files.path_text(path)} is the file that is read", hint="give another name")
    try:
        atomic_files.make_folder(path.parent)
    except OutputError as error:
        raise OutputError(str(error), hint=_ELSEWHERE) from error
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"--trace {atomic_files.path_text(path)} cannot be written", hint=_ELSEWHERE)
    return path


def _write(path: Path, document: bytes) -> None:
    atomic_files.write_bytes(path, gzip.compress(document, compresslevel=6) if path.suffix == ".gz" else document)
