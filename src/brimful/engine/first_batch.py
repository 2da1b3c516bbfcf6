"""Before the first step: rows of the first batch go through the very step that will run, and through the plain model.

Captured, compiled, with fused layers and a shortened last one, dropout off: each row's loss, and the gradient as a
whole and of each parameter, against the plain Hugging Face model on padded rows, with eager attention in fp32, by the
weights that are in memory. What the plain model itself loses in the precision of the run is measured beside it.

    compiled -> captured -> eager -> padded rows with eager attention     the way down where something differs
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from brimful.core.callbacks import Callbacks
from brimful.core.errors import HalfPrecisionError, printable
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import FirstBatch
from brimful.core.tolerances import TOLERANCES
from brimful.data.batches.batch import Batch, make_batch
from brimful.engine.assemble import Assembled, Built, build
from brimful.engine.plain_pass import Rows, plain
from brimful.engine.prepare import Prepared
from brimful.hardware.memory import is_out_of_memory, release_unused
from brimful.hardware.ranks import ALONE, Ranks
from brimful.levers.precision import choose_precision, supports
from brimful.models.packed.narrow_windows import NarrowWindows
from brimful.models.packed.refusals import raise_without_half
from brimful.step.precision import Precision
from brimful.step.step import Probed

A = TypeVar("A", bound=Assembled)

#: Numbers of a gradient that are on the device at once, where gradients are compared.
_SLICE = 1 << 22
#: Times what the plain model loses in a precision that all parameters together may differ by, and one alone.
_MARGIN, _MARGIN_OF_ONE = 3.0, 6.0


def checked(
    make: Callable[[TrainOptions, Precision, bool], A], options: TrainOptions, precision: Precision, rows: Rows,
    callbacks: Callbacks, made: A | None = None,
) -> tuple[A, FirstBatch]:  # fmt: skip
    """Assemble a run whose first batch is the plain model's, on slower paths where it must be, and say so.

    make: assembles with options, a precision, and whether padded rows must have eager attention. made: what it made
    with the options that were asked for, if it did already. Raises: HalfPrecisionError unless the precision is `auto`.
    """
    eager, fallbacks = False, tuple[str, ...]()
    while True:
        made = made or make(options, precision, eager)
        refusal = None
        try:
            found = replace(compare(made, rows), fallbacks=fallbacks)
        except HalfPrecisionError as error:
            if options.precision != "auto":
                raise
            refusal = str(error)
        if refusal is not None:  # the error is gone by now, and the frames whose memory it kept
            options, precision = _wider(options, precision.device)
            said = f"{refusal}; {precision.value} runs"
        elif found.passed is not False or eager:
            _tell(found, callbacks)
            return made, found
        else:
            slower = _slower(made, options, precision)
            said = f"{_name(made)} differs from the plain model on the first batch: {found.reason}; {slower[-1]} runs"
            options, precision, eager, _ = slower
        callbacks.warning(said)
        fallbacks = (*fallbacks, said)
        made.step.release(together=False)
        made = None
        gc.collect()  # graphs, and a copy of the weights
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _wider(options: TrainOptions, device: torch.device) -> tuple[TrainOptions, Precision]:
    """Options and precision of a model that has no half precision here."""
    options = replace(options, precision="tf32" if supports("tf32", device).ok else "fp32")
    precision = choose_precision(options.precision, device)
    return options, replace(precision, reason="the model's own code has no half precision here")


def checked_build(
    options: TrainOptions, prepared: Prepared, precision: Precision, callbacks: Callbacks, phases: Phases,
    ranks: Ranks = ALONE,
) -> tuple[Built, FirstBatch]:  # fmt: skip
    """Build a run, on slower paths where its first batch is not the plain model's."""

    def make(asked: TrainOptions, chosen: Precision, eager: bool) -> Built:
        return build(asked, prepared, chosen, callbacks, phases, eager_attention=eager, ranks=ranks)

    training, samples = prepared.training, prepared.order.samples(0)
    ids, types = training.tokens.sequences(samples)
    weights_N = training.examples.weights
    rows = Rows(
        ids=ids,
        types=types,
        targets_N=training.targets_N[samples],
        weights_N=None if weights_N is None else weights_N[samples],
    )
    return checked(make, options, precision, rows, callbacks)


def _slower(made: Assembled, options: TrainOptions, precision: Precision) -> tuple[TrainOptions, Precision, bool, str]:
    """Options, precision, whether padded rows have eager attention, and the name of the next slower path."""
    mode = made.recipe.value("execution")
    if made.precision.plan is not None:
        return options, precision.in_bf16("its first batch was not the plain model's"), False, "bf16"
    if mode == "compiled":
        return replace(options, execution="captured"), precision, False, "the captured step"
    if mode in ("captured", "fused"):
        return replace(options, execution="eager"), precision, False, "the eager step"
    return replace(options, execution="eager", packing="off"), precision, True, "the plain model on padded rows"


def _name(made: Assembled) -> str:
    rows = "packed" if made.packing.packed else "padded"
    return f"the step ({made.recipe.value('execution')}, {rows}, {made.precision.value})"


def _tell(found: FirstBatch, callbacks: Callbacks) -> None:
    if found.num_left_out:
        whole = found.num_rows + found.num_left_out
        callbacks.warning(
            f"memory ran out while the first batch was compared: {found.num_rows:,} of {whole:,} rows were, and the"
            " step has the budget that it had"
        )
    if found.passed is None:
        callbacks.warning(f"the first batch could not be compared with the plain model: {found.reason}")
    elif not found.passed:
        callbacks.warning(f"the first batch differs from the plain model's even on the plain path: {found.reason}")
    else:
        callbacks.note(
            f"first batch: losses of {found.num_rows:,} rows within {found.loss_error:.1e} of the plain model's,"
            f" gradient within {found.gradient_error:.1e} ({found.seconds:.1f} s)"
        )


def compare(made: Assembled, rows: Rows) -> FirstBatch:
    """Compare the step of an assembled run with the plain model. passed is None where there is nothing to hold it to:
    memory does not suffice for one row, or the plain model differs from itself.

    Where memory runs out, by the plain model or by the step, half of the rows are compared. Raises: HalfPrecisionError.
    """
    began, device = time.perf_counter(), made.step.device
    rows = rows.some(device.type, NarrowWindows(made.model).plain_length)
    if made.step.update.gathers_weights:
        why = "weights are in parts of several processes; packing was checked on a copy of one layer of each kind"
        if made.recipe.value("tensor_parallel") is not None:
            why += ", and so are cut layers beside whole ones"
        return FirstBatch(num_rows=0, num_tokens=0, precision=made.precision.value, reason=why)
    release_unused(device)  # of weights that were moved, and kept in less
    try:
        found, wanted = _compared(made, rows), len(rows.ids)
        while found is None and len(rows.ids) > 1:
            release_unused(device)
            rows = rows.first(len(rows.ids) // 2)
            found = _compared(made, rows)
    except BaseException:
        made.step.cancel_compiling()
        raise
    finally:
        release_unused(device)  # it would count as the run's
        made.step.update.restore_states()
    found = found or replace(_nothing_yet(made, rows), reason="memory does not suffice for one row of it")
    return replace(found, num_left_out=wanted - len(rows.ids), seconds=time.perf_counter() - began)


def _nothing_yet(made: Assembled, rows: Rows) -> FirstBatch:
    num_tokens = sum(len(each) for each in rows.ids)
    return FirstBatch(num_rows=len(rows.ids), num_tokens=num_tokens, precision=made.precision.value)


def _compared(made: Assembled, rows: Rows) -> FirstBatch | None:
    """The comparison on all of some rows; None if memory ran out in it."""
    found, device = _nothing_yet(made, rows), made.step.device
    try:
        given = (rows.ids, rows.types, rows.targets_N, made.step.task, made.layout)
        batch = make_batch(0, np.arange(len(rows.ids)), *given, weights_N=rows.weights_N)
        batch = batch.sent(device) if device.type == "cuda" else batch
        _begin_compiling(made, batch)
        release_unused(device)  # of that pass: the plain one would come on top
        made.step.update.put_states_aside()
        expected = plain(made, rows, choose_precision("fp32", device))
        if not (expected.losses_N.isfinite().all() and _norms(device, expected.gradients).isfinite().all()):
            return replace(found, reason="the plain model's own loss or gradient is not finite")
        lost = None
        if made.precision.value not in ("fp32", "fp64"):
            lost = plain(made, rows, replace(made.precision, plan=None))
        made.step.update.restore_states()
        found = _judged(found, made, _probed(made, batch), expected, lost)
        if not found.passed:
            again = plain(made, rows, choose_precision("fp32", device))
            if _errors(again, expected, device)[1] > TOLERANCES["fp32"].step:
                found = replace(found, passed=None, reason="the plain model differs from itself from pass to pass")
    except HalfPrecisionError:
        raise
    except _StepError as failure:
        return replace(found, passed=False, reason=f"it ended in {failure}")
    except Exception as failure:  # memory, or a model's own code: if it is the step's too, the run will say so
        raise_without_half(made.model.config.model_type, failure)
        return None if is_out_of_memory(failure) else replace(found, passed=None, reason=_said(failure))
    return found


class _StepError(Exception):
    """The step cannot do what the plain model did."""


def _begin_compiling(made: Assembled, batch: Batch) -> None:
    """Have the step's kernels compiled while the plain model computes. What fails here is tried by the step again."""
    try:
        made.step.begin_compiling(batch)
    except Exception as failure:
        if is_out_of_memory(failure):
            raise


def _probed(made: Assembled, batch: Batch) -> Probed:
    """Losses and gradient of the step. Raises: _StepError for a failure of any kind but for want of memory, or of half
    precision."""
    try:
        return made.step.probe(batch)
    except HalfPrecisionError:
        raise
    except Exception as failure:  # a model's own code on a packed row, a compiler
        if is_out_of_memory(failure):
            raise
        raise_without_half(made.model.config.model_type, failure)
        raise _StepError(_said(failure)) from failure


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {printable(failure, 120)}"


def _judged(found: FirstBatch, made: Assembled, ours: Probed, expected: Probed, lost: Probed | None) -> FirstBatch:
    """Complete what was found by errors, and by whether they are within what the precision loses."""
    tolerance = TOLERANCES[made.precision.value if made.precision.plan is None else "fp8"].step
    device = made.step.device
    of_ours, of_lost = _errors(ours, expected, device), None if lost is None else _errors(lost, expected, device)
    loss_error, gradient_error, each_P = of_ours
    loss_lost, gradient_lost, lost_P = of_lost or (0.0, 0.0, torch.zeros_like(each_P))
    norms_P = _norms(device, expected.gradients)
    total = float(norms_P.norm())
    # A parameter may differ by what rounding does to it, or by what is nothing beside the whole gradient.
    allowed_P = torch.maximum(tolerance * norms_P, _MARGIN_OF_ONE * lost_P)
    allowed_P = allowed_P.clamp_min(tolerance * total / math.sqrt(len(norms_P)) + 1e-30)
    ratio_P = torch.nan_to_num(each_P / allowed_P, nan=math.inf)
    worst = int(ratio_P.argmax())
    name = list(made.step.update.named)[worst]
    worst_error = float(each_P[worst] / norms_P[worst].clamp_min(1e-30))
    reasons = []
    if not loss_error <= max(tolerance, _MARGIN * loss_lost):
        reasons.append(f"losses of rows are off by {loss_error:.1e}")
    if not gradient_error <= max(tolerance, _MARGIN * gradient_lost):
        reasons.append(f"the gradient is off by {gradient_error:.1e}")
    if not float(ratio_P[worst]) <= 1.0:
        reasons.append(f"the gradient of {printable(name)} is off by {worst_error:.1e}")
    return replace(
        found,
        passed=not reasons,
        reason=", ".join(reasons) or None,
        loss=_known(ours.losses_N.mean()),
        plain_loss=_known(expected.losses_N.mean()),
        loss_error=_known(loss_error),
        gradient_error=_known(gradient_error),
        gradient_lost=_known(gradient_lost) if lost is not None else None,
        worst_parameter=name,
        worst_error=_known(worst_error),
    )


def _known(value: Tensor | float) -> float | None:
    """A number that a record can have: None for one that is not finite."""
    return float(value) if math.isfinite(value) else None


def _errors(ours: Probed, expected: Probed, device: torch.device) -> tuple[float, float, Tensor]:
    """Relative error of the rows' losses and of the gradient, and (P,) norms of each parameter's difference."""
    off = (ours.losses_N - expected.losses_N).norm() / expected.losses_N.norm().clamp_min(1e-30)
    each_P = _norms(device, ours.gradients, expected.gradients)
    whole = each_P.norm() / _norms(device, expected.gradients).norm().clamp_min(1e-30)
    return float(off), float(whole), each_P


def _norms(device: torch.device, tensors: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> Tensor:
    """(P,) fp64 on the host: of each tensor, or of its difference from the other one, a slice at a time on the device:
    a table's gradient may be larger than all that is free there."""
    norms = []
    for tensor, other in zip(tensors, others or tensors, strict=True):
        slices = (each.reshape(-1).split(_SLICE) for each in (tensor, other))
        parts = [
            (one.to(device) if others is None else one.to(device) - two.to(device)).norm()
            for one, two in zip(*slices, strict=True)
        ]
        norms.append(parts[0] if len(parts) == 1 else torch.stack(parts).norm())
    return torch.stack(norms).double().cpu()
