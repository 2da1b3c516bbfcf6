"""Profile of one training step: the step that `train` would run, on the batches that it would run on.

It is warmed up until every shape has been met and captured, then timed without the profiler, then recorded with it.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from brimful.core import atomic_files
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DeviceError, OptionError, OutputError
from brimful.core.options.profile import NOT_OF_A_STEP, ProfileOptions
from brimful.core.place import check_tensor_parallel, find_place
from brimful.core.profile import Communication, Limits, Profile, Rates, StepTime, Work
from brimful.core.records import from_json, to_json
from brimful.data.batches.batch import Batch, MicroBatch
from brimful.data.readers.in_memory import Tables
from brimful.engine.assemble import Built, build
from brimful.engine.prepare import Prepared, prepare
from brimful.engine.profiling.timing import Round, run_steps, time_steps, warm_up
from brimful.engine.training.same_path import agree, build_led, met, path_of
from brimful.engine.training.shared_work import SharedWork
from brimful.hardware.asked import asked_of
from brimful.hardware.device_memory import device_memory
from brimful.hardware.meeting import coming, entered
from brimful.hardware.probe import choose_device, device_name, probe
from brimful.hardware.process_settings import deterministic
from brimful.hardware.ranks import Ranks, joined
from brimful.hardware.specs import datasheet_flops_per_s
from brimful.kernels.layout import PackedInputs
from brimful.levers.optimizer import asked_optimizer
from brimful.levers.precision import choose_precision
from brimful.measurement.bottleneck import reading_of
from brimful.measurement.kernels import Breakdown, breakdown, running_seconds, with_callers
from brimful.measurement.memory import MemoryWatch
from brimful.measurement.peaks import measure_limits
from brimful.measurement.trace import record
from brimful.models.model_stats import layers_of, token_matrices, token_operations, useful_attention
from brimful.models.packed.packed_forward import LeftOut, PackedModel
from brimful.step.precision import Precision

#: Passes over the batches to time them, the median taken batch by batch.
_ROUNDS = {"cuda": 3, "cpu": 1}
#: What to do about a trace that cannot be written.
_ELSEWHERE = "choose another --trace, or make this one writable"


def profile(options: ProfileOptions, callbacks: Callbacks, tables: Tables | None = None) -> Profile:
    """Builds the step that `options` ask for, and says where its time goes. Nothing is trained that would be kept.

    tables: data in memory, by the names that options have for them.
    Raises: InputError for what cannot be done as asked; DeviceError where the profiler sees nothing of the GPU.
    """
    place = find_place()
    with coming(place):
        if options.gpus not in (None, "1") and place.count == 1:
            hint = "start the script with torchrun --nproc-per-node N, and leave gpus out"
            raise OptionError(f"--gpus {options.gpus} is of the command line: a script is one process", hint=hint)
        trace = None if options.trace is None or not place.leads else _checked(Path(options.trace), options.data)
        check_tensor_parallel(place, options.tensor_parallel)
        device = choose_device("cuda" if options.gpus is not None else options.device, place.local_rank)
        precision = choose_precision(options.precision, device)
    with (
        deterministic(options.deterministic),
        entered(place, device_memory(device, options.memory_limit, options.allocator)),
        joined(
            place,
            device,
            note=callbacks.warning,
            asked=asked_of(options, device),
            tensor_parallel=options.tensor_parallel,
        ) as ranks,
    ):
        ranks.pulse.enter("profile")
        prepared = prepare(options, callbacks, tables=tables)
        if not ranks.leads:
            return _take_part(options, prepared, precision, ranks)
        callbacks.stage("loading the model")
        built = build(options, prepared, precision, callbacks, ranks=ranks)
        if ranks.reachable:
            ranks.spread(path_of(prepared, built))
            agree(ranks)
            built = met(built, callbacks)
        callbacks.recipe(built.recipe)
        with closing(built.source):
            result, document = _profile(built, options, callbacks)
        if ranks.reachable:
            built.step.release(together=False)
            ranks.spread(to_json(result))
    if trace is not None:
        atomic_files.write_bytes(trace, gzip.compress(document, compresslevel=6) if trace.suffix == ".gz" else document)
        callbacks.note(f"trace of {options.steps} steps: {trace}")
    return dataclasses.replace(result, reading=reading_of(result))


def _take_part(options: ProfileOptions, prepared: Prepared, precision: Precision, ranks: Ranks) -> Profile:
    """Take the same steps as the process that leads, and return its profile."""
    callbacks = Callbacks()
    built = build_led(ranks.spread(), options, prepared, precision, callbacks, None, ranks)
    with closing(built.source):
        warm_up(built, options.steps, callbacks)
        for _ in range(_ROUNDS[precision.device.type]):
            time_steps(built, options.steps)
        run_steps(built, range(1))
        run_steps(built, range(1, options.steps + 1))
    built.step.release(together=False)
    return from_json(Profile, ranks.spread())


def _profile(built: Built, options: ProfileOptions, callbacks: Callbacks) -> tuple[Profile, bytes]:
    """All but the reading, and the trace."""
    device, steps, packing = built.step.device, options.steps, built.packing
    batches = list(built.source.batches(1, steps + 1))
    sizes = [(_lengths(micro), micro.inputs.num_tokens) for batch in batches for micro in batch.micro_batches]
    lengths, computed = [length for each, _ in sizes for length in each], [num_tokens for _, num_tokens in sizes]
    callbacks.stage("measuring what the device can do")
    limits = _limits(built, num_tokens=round(statistics.median(computed)))
    memory = MemoryWatch(device, built.step.memory, limit=options.memory_limit)
    callbacks.stage("warming up")
    warm_up(built, steps, callbacks)
    callbacks.stage(f"timing {steps} steps")
    rounds = [time_steps(built, steps) for _ in range(_ROUNDS[device.type])]
    sent_s = statistics.mean(each.sent_s for each in rounds)
    hidden_s = max(0.0, sent_s - statistics.mean(each.blocked_s for each in rounds))
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
    time = _time(rounds, recorded[0] / steps)
    if device.type == "cuda":
        found = breakdown(trace.kernels, trace.kernels, steps=steps, step_s=time.mean_s)
        if not sent_s:  # of weights in parts: torch sends them
            sent_s = running_seconds(trace.kernels, "communication") / steps / found.stretch
            hidden_s = max(0.0, sent_s - next(p.seconds for p in found.parts if p.name == "communication"))
    else:
        pieces, calls = with_callers(trace.operators)
        found = breakdown(pieces, calls, steps=steps, step_s=time.mean_s, stretch=time.recorded_s / time.mean_s)
    update = built.step.update
    moved_bytes = asked_optimizer(options).moved_bytes(update.num_updated, update.num_idle())
    work = _work(built, lengths, computed, steps=steps, optimizer_bytes=moved_bytes)
    asked = {name: value for name, value in dataclasses.asdict(options).items() if name not in NOT_OF_A_STEP}
    result = Profile(
        model=options.model,
        options=asked,
        recipe=built.recipe,
        machine=probe(),
        packed=packing.packed,
        packed_reason=packing.reason,
        steps=steps,
        time=time,
        **vars(found),
        num_launches=None if trace.num_launches is None else trace.num_launches / steps,
        work=work,
        limits=limits,
        rates=_rates(time, limits, work, found),
        peak_bytes=peak,
        communication=_communication(batches, built.step.ranks, sent_s, hidden_s),
    )
    return result, trace.document


def _communication(batches: Iterable[Batch], ranks: Ranks, seconds: float, hidden_s: float) -> Communication | None:
    """Return what there is to say of sums between processes; None for one."""
    if ranks.count == 1:
        return None
    work = SharedWork(ranks)
    for batch in batches:
        work.add(batch)
    seen = seconds > 0  # sums of weights in parts are begun by torch, and their end is not told
    return Communication(
        processes=ranks.count,
        imbalance=work.imbalance,
        seconds=seconds if seen else None,
        hidden_s=hidden_s if seen else None,
    )


def _limits(built: Built, *, num_tokens: int) -> Limits:
    """Measure the device; a step in fp8 is held against the limits of bf16."""
    device, precision = built.step.device, built.precision
    with precision.apply():
        return measure_limits(
            device,
            precision.dtype,
            shapes=token_matrices(built.model) or {},
            num_tokens=num_tokens,
            datasheet_flops_per_s=datasheet_flops_per_s(device_name(device), precision.value.replace("fp8", "bf16")),
        )


def _time(rounds: Sequence[Round], recorded_s: float) -> StepTime:
    per_batch = np.median([each.seconds for each in rounds], axis=0)
    return StepTime(
        mean_s=float(per_batch.mean()),
        median_s=float(np.median(per_batch)),
        fastest_s=float(per_batch.min()),
        slowest_s=float(per_batch.max()),
        recorded_s=recorded_s,
        host_s=statistics.median(each.host_s for each in rounds),
        input_wait_s=statistics.median(each.input_wait_s for each in rounds),
    )


def _lengths(micro: MicroBatch) -> list[int]:
    """Lengths of the sequences of a micro-batch that is still on the host."""
    inputs, number = micro.inputs, len(micro.samples)
    sizes = inputs.segments.cu_seqlens_N.diff() if isinstance(inputs, PackedInputs) else inputs.mask_RL.sum(1)
    return [int(size) for size in sizes[:number]]


def _work(built: Built, lengths: Sequence[int], computed: Sequence[int], *, steps: int, optimizer_bytes: int) -> Work:
    """Work of a step. lengths: of all sequences. computed: tokens of each micro-batch, padding counted."""
    samples, tokens, computed_tokens = (number / steps for number in (len(lengths), sum(lengths), sum(computed)))
    per_token, attention = token_operations(built.model), useful_attention(built.model, np.array(lengths))
    among = None if attention is None else attention / steps
    execution, layers = built.step.execution, layers_of(built.model)
    skipped = execution.left_out if isinstance(execution, PackedModel) else LeftOut()
    whole_layers = 1.0 - 1.0 / len(layers) if skipped.attention and layers is not None else 1.0
    rows = skipped.parameters * (computed_tokens - samples)  # of the last layer, about: slots may be empty
    return Work(
        samples=samples,
        tokens=tokens,
        computed_tokens=computed_tokens,
        micro_batches=len(computed) / steps,
        product_flops=None if per_token is None else per_token * computed_tokens - 6 * rows,
        attention_flops=None if among is None else among * whole_layers,
        useful_flops=None if per_token is None or among is None else per_token * tokens + among,
        optimizer_bytes=optimizer_bytes,
    )


def _rates(time: StepTime, limits: Limits, work: Work, found: Breakdown) -> Rates:
    step_s, peak = time.mean_s, limits.datasheet_flops_per_s
    seconds = {part.name: part.seconds for part in found.parts}
    useful = None if work.useful_flops is None else work.useful_flops / step_s
    return Rates(
        samples_per_s=work.samples / step_s,
        tokens_per_s=work.tokens / step_s,
        fill=work.tokens / work.computed_tokens,
        contraction_flops_per_s=_per_s(work.product_flops, seconds["contractions"]),
        attention_flops_per_s=_per_s(work.attention_flops, seconds["attention"]),
        optimizer_bytes_per_s=_per_s(work.optimizer_bytes, seconds["optimizer"]),
        mfu=None if useful is None else useful / limits.matmul_flops_per_s,
        datasheet_mfu=None if useful is None or peak is None else useful / peak,
    )


def _per_s(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds == 0 else amount / seconds


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
