"""The equivalence check at load: a model runs packed because its packed forward equals the plain Hugging Face one.

On a copy with one layer of each kind, one more above them, and the model's own weights, in eval mode, then in train
mode with dropout off. The reference is eager attention in fp32 on the CPU:

    1  plain, alone = plain, in company            otherwise batches are never split; in train mode too; rows of one
                                                   length may share a batch where these are independent
    2  packed with reference attention = plain     forward in fp32; finds the pooling, the first position, and
                                                   if the last layer can run on pooled tokens alone
    3  the same, each sequence alone in its row; and sequences that hold the padding token (`padding_tokens`)
    4  gradient of all parameters together         norm of the difference over the norm, in train mode
    5  each kernel = the reference                 call by call, in fp32 and in the run's precision
                                                   (`attention_check`)
    6  the model on these kernels                  in the run's precision: differences of rows, and gradient
    7  in fp8: fused layers, all products in fp8   lose no more than Linear layers with rounded operands

One sequence is longer than any attention window and than the largest distance of a relative bias. A window of hundreds
of tokens is short in the copy, and a text that exceeds the real one is computed once (`long_window`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from brimful.core.cache import read_cached, write_cached
from brimful.core.errors import ModelError, printable
from brimful.core.tolerances import TOLERANCES
from brimful.hardware.memory import is_out_of_memory, once_more
from brimful.hardware.process_settings import matmul_precision
from brimful.kernels import float8
from brimful.kernels.layout import Inputs
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.models.packed import equivalence_cache
from brimful.models.packed.after_attention import after_attention
from brimful.models.packed.alike_rows import alike_independent
from brimful.models.packed.check_inputs import (
    FEW,
    Kernel,
    make_sequences,
    many_sequences,
    one_layer_of_each_kind,
    packed_row,
    padded_rows,
    wake,
)
from brimful.models.packed.family_forms import has_form, recurrent_layers, uses_attention_interface
from brimful.models.packed.long_window import LongWindow
from brimful.models.packed.packed_forward import PackedForm, PackedModel, PaddedModel, Pooling
from brimful.models.packed.padding_tokens import with_padding_rule
from brimful.models.packed.short_rows import dependence_of_short_rows
from brimful.models.packed.training_check import draws_numbers, mixes_rows, without_dropout
from brimful.models.packed.tried_row import (
    HALF,
    TriedRow,
    error_of_all,
    gradients_of,
    in_tolerances,
    kernel_reason,
    relative_error,
    worse,
)


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Result of the check on one model.

    packed: it may run packed, in `form`. independent: rows of a batch do not influence one another, in eval mode,
    however many. alike_independent: rows of one length do not, which have no padding.
    mixes_in_training: in train mode they do. draws_in_training: it draws random numbers besides dropout, such as
    LayerDrop's, which differ from one part of a batch to the next.
    *_error: measured relative differences, None where the check did not get that far; kernel_error and float8_error are
    in units of the tolerance. half_weights: Linear weights may be stored in half precision.
    recorded: on a GPU, our kernels cover the layers, whose code can be recorded: they cost no compilation.
    float8_error: of fused layers in fp8; None if fp8 was not asked for or our kernels do not cover the layers.
    float8_shapes: (N, K) of the weights that can be multiplied in fp8. float8_activated: those followed by GELU.
    """

    packed: bool
    independent: bool
    reason: str
    mixes_in_training: bool = False
    draws_in_training: bool = False
    pooling: Pooling | None = None
    first_position: int | None = None
    short: bool = False
    skips_padding: bool = False
    alike_independent: bool = False
    forward_error: float | None = None
    gradient_error: float | None = None
    kernel_error: float | None = None
    half_weights: bool = False
    recorded: bool = False
    float8_error: float | None = None
    float8_shapes: tuple[tuple[int, int], ...] = ()
    float8_activated: tuple[tuple[int, int], ...] = ()

    @property
    def form(self) -> PackedForm | None:
        """Pooling and positions of the packed forward, None if the model does not run packed."""
        if self.pooling is None or self.first_position is None:
            return None
        return PackedForm(
            pooling=self.pooling,
            first_position=self.first_position,
            short=self.short,
            skips_padding=self.skips_padding,
        )

    def for_training(self) -> Equivalence:
        """The same for a model that learns: padded where train mode is not what was checked in eval mode."""
        if self.mixes_in_training:
            why = "in train mode the result of a row depends on the other rows of its batch (as in BatchNorm)"
            return replace(self, packed=False, independent=False, reason=why)
        if self.draws_in_training:
            why = "in train mode it draws random numbers of its own (as LayerDrop does), once for a whole batch or row"
            return replace(self, packed=False, reason=why)
        return self


class _KernelsFailedError(Exception):
    """Kernels that fail on their device. found: what is known of the model without them."""

    def __init__(self, found: Equivalence) -> None:
        super().__init__(found.reason)
        self.found = found


def check_equivalence(
    model: Any,
    *,
    max_length: int,
    device: torch.device,
    precision: str,
    typical_length: int | None = None,
    attention: str | None = None,
    cache: bool = True,
) -> Equivalence:
    """Check if `model` may run packed on `device` in `precision` with sequences of up to `max_length` tokens.

    typical_length: mean length of the sequences, which chooses the kernel. attention: the kernel's name, if chosen.
    The model is not changed. Results are cached in the user's cache folder by architecture, weights, versions, device
    and precision, unless `cache=False`.
    """
    kernel = (typical_length, attention)
    path = equivalence_cache.path_of(model, max_length, device, precision, kernel) if cache else None
    if path is not None and (known := _read(path)) is not None:
        return known
    was = model.config._attn_implementation
    try:
        with torch.random.fork_rng([]):  # some models draw numbers that they then do not use
            equivalence = once_more(lambda: _check(model, max_length, device, precision, kernel), device)
    except _KernelsFailedError as failure:  # not cached: it may be the machine's
        return failure.found
    except Exception as failure:  # any failure of a model's code fails the check; not cached either
        why = f"{model.config.model_type} could not be tried: {type(failure).__name__}: {printable(failure)}"
        return Equivalence(packed=False, independent=False, reason=why)
    finally:
        model.config._attn_implementation = was
    if path is not None:
        write_cached(path, asdict(equivalence))
    return equivalence


def _check(model: Any, max_length: int, device: torch.device, precision: str, kernel: Kernel) -> Equivalence:
    small = one_layer_of_each_kind(model).to("cpu", torch.float32).eval().requires_grad_(True)
    wake(small)
    with matmul_precision("highest"):
        window = LongWindow.of(small, max_length)
        if window is not None:
            with window.short():
                found = _compare(small, max_length, device, precision, kernel)
            if found.independent:
                return _beyond(window, found, device, precision, kernel) if found.packed else found
        if (rows := dependence_of_short_rows(small, max_length)) is not None:
            return _dependent(alike=rows.alike, draws=rows.draws)
        return _compare(small, max_length, device, precision, kernel)


def _dependent(*, alike: bool, draws: bool) -> Equivalence:
    why = "the result of a row depends on the other rows of its batch, or on its padding"
    return Equivalence(packed=False, independent=False, alike_independent=alike, draws_in_training=draws, reason=why)


def _compare(small: Any, max_length: int, device: torch.device, precision: str, kernel: Kernel) -> Equivalence:
    """Return what is found of a copy, which is then on `device`."""
    sequences = make_sequences(small.config, max_length)
    with without_dropout(small, only_of_numbers=True):
        padded = PaddedModel(small, "eager")
        try:
            plain = padded(padded_rows(sequences, small.config)).logits.detach()
            alone = torch.cat([padded(padded_rows([sequence], small.config)).logits for sequence in sequences]).detach()
        except (ModelError, ValueError, RuntimeError, IndexError) as refusal:
            said = str(refusal.__cause__ or refusal).strip().splitlines()[:1] or [type(refusal).__name__]
            why = f"{small.config.model_type} does not take short sequences: {said[0][:100]}"
            alike = alike_independent(padded, sequences)
            return Equivalence(packed=False, independent=False, alike_independent=alike, reason=why)
        mixes, draws = _training_only(padded, sequences, max_length)
        if not relative_error(plain, alone) <= TOLERANCES["fp32"].logits or _mixes_many(padded, max_length):
            alike = not draws and alike_independent(padded, sequences)
            return _dependent(alike=alike, draws=draws)
        small.train(not (mixes or draws))
        plain = padded(padded_rows(sequences, small.config)).logits
        plain_gradient = gradients_of(small, plain)
        small.eval()
        form, error, why = _find_form(small, sequences, alone, max_length)
        found = Equivalence(
            packed=False, independent=True, mixes_in_training=mixes, draws_in_training=draws, reason=why,
            forward_error=error,
        )  # fmt: skip
        if form is None:
            return found
        row = packed_row(sequences, small.config, max_length, kernel)
        small.train(not (mixes or draws))
        for tried in (form, replace(form, short=False)):
            gradient = gradients_of(small, PackedModel(small, form := tried, plain=True)(row).logits[: len(sequences)])
            if (gradient_error := error_of_all(gradient, plain_gradient)) <= TOLERANCES["fp32"].gradient:
                break
        found = replace(found, gradient_error=gradient_error)
        if not gradient_error <= TOLERANCES["fp32"].gradient:
            return replace(found, reason=f"its packed gradient differs from the plain one by {gradient_error:.1e}")
        case = TriedRow(
            form=form, row=row, num_tokens=sum(map(len, sequences)), plain=plain.detach(), gradient=plain_gradient,
            precision=_around(precision),
        )  # fmt: skip
        with _kernels_tried(found):
            return _on_device(small.to(device), case, found, precision)


def _around(precision: str) -> str:
    """The precision of what is not a product of a layer."""
    return "bf16" if precision == "fp8" else precision


@contextmanager
def _kernels_tried(found: Equivalence) -> Iterator[None]:
    """Within, kernels run. Raises: _KernelsFailedError with what was found where they fail for want of anything but
    memory."""
    try:
        yield
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        why = f"kernels could not be tried: {type(failure).__name__}: {printable(failure)}"
        raise _KernelsFailedError(replace(found, reason=why)) from failure


def _beyond(
    window: LongWindow, found: Equivalence, device: torch.device, precision: str, kernel: Kernel
) -> Equivalence:
    """Return what was found with a short window, or a refusal where texts that exceed the real one tell otherwise."""
    form = found.form
    assert form is not None
    refused = replace(
        found, packed=False, half_weights=False, recorded=False, float8_error=None, float8_shapes=(),
        float8_activated=(),
    )  # fmt: skip
    error = window.forward_error(form)
    if not error <= TOLERANCES["fp32"].logits:
        why = f"its packed logits differ from the plain ones by {error:.1e} at a window of {window.real} tokens"
        return replace(refused, forward_error=error, reason=why)
    found = replace(found, forward_error=max(error, found.forward_error or 0.0))
    with _kernels_tried(replace(refused, forward_error=found.forward_error)):
        kernel_error, worst = window.kernel_error(form, kernel, _around(precision), device)
    if not kernel_error <= 1.0:
        return replace(refused, kernel_error=kernel_error, reason=kernel_reason(precision, kernel_error, worst))
    found = replace(found, kernel_error=max(kernel_error, found.kernel_error or 0.0))
    return replace(found, reason=_passed_reason(found))


def _many_rows(config: Any, max_length: int) -> tuple[Inputs, list[Inputs]]:
    """Many short rows, as one batch and as batches of few."""
    sequences = many_sequences(config, max_length)
    parts = [padded_rows(sequences[start : start + FEW], config) for start in range(0, len(sequences), FEW)]
    return padded_rows(sequences, config), parts


def _mixes_many(padded: PaddedModel, max_length: int) -> bool:
    """Return whether the results of many rows are others than those of the same rows, a few at a time."""
    many, parts = _many_rows(padded.model.config, max_length)
    with torch.no_grad():
        together, apart = padded(many).logits, torch.cat([padded(part).logits for part in parts])
    return not relative_error(together, apart) <= TOLERANCES["fp32"].logits


def _training_only(padded: PaddedModel, sequences: Sequence[np.ndarray], max_length: int) -> tuple[bool, bool]:
    """Return whether rows influence one another in train mode, and whether the model draws random numbers there."""
    small = padded.model
    whole, *twice = (padded_rows(rows, small.config) for rows in (sequences, *([one, one] for one in sequences)))

    def run(inputs: Inputs) -> Tensor:
        return padded(inputs).logits

    tolerance, buffers = TOLERANCES["fp32"].logits, [(buffer, buffer.clone()) for buffer in small.buffers()]
    small.train()
    try:
        draws = draws_numbers(partial(run, whole))
        batches = ((whole, twice, 1), (*_many_rows(small.config, max_length), FEW))
        mixes = any(mixes_rows(run, all_of, apart, tolerance, rows=rows) for all_of, apart, rows in batches)
    finally:
        small.eval()
        for buffer, value in buffers:
            buffer.copy_(value)
    return mixes, draws


def _on_device(small: Any, case: TriedRow, found: Equivalence, precision: str) -> Equivalence:
    """Return what was found, completed by what the chosen kernels do on their device."""
    attention_error, worst = case.attention_error(small)
    kernel_error = worse(attention_error, case.kernel_error(small))
    passed = kernel_error <= 1.0
    reason = _passed_reason(found)
    if not passed:
        reason = kernel_reason(precision, kernel_error, worst if not attention_error <= 1.0 else "")
    half_weights = passed and _takes_half_weights(small, case)
    float8_error, shapes = _float8_error(small, case) if passed and precision == "fp8" else (None, {})
    return replace(
        found,
        packed=passed,
        reason=reason,
        pooling=case.form.pooling,
        first_position=case.form.first_position,
        short=case.form.short,
        skips_padding=case.form.skips_padding,
        kernel_error=kernel_error,
        half_weights=half_weights,
        recorded=passed and _is_recorded(small, case),
        float8_error=float8_error,
        float8_shapes=tuple(shapes),
        float8_activated=tuple(shape for shape, activated in shapes.items() if activated),
    )


def _passed_reason(found: Equivalence) -> str:
    return f"equal to the plain forward within {found.forward_error:.1e}, gradient within {found.gradient_error:.1e}"


def _find_form(
    small: Any, sequences: Sequence[np.ndarray], plain: Tensor, max_length: int
) -> tuple[PackedForm | None, float | None, str]:
    """Return the form under which packed equals plain, or None; the smallest error; the reason of a refusal."""
    if recurrent_layers(small.config):
        return None, None, f"layers of {small.config.model_type} carry a state from token to token, across sequences"
    if not has_form(small.config) and not uses_attention_interface(small):
        return None, None, f"attention of {small.config.model_type} cannot be told where sequences end"
    padding_id = getattr(small.config.get_text_config(), "pad_token_id", None)
    offsets = [0] if padding_id is None else [0, padding_id + 1]
    poolings: tuple[Pooling, ...] = ("first", "last", "mean", "late")
    error_of = partial(_form_error, small, sequences, plain, max_length)
    best, failure = float("inf"), "no pooling and position gives the plain logits"
    for first_position, pooling in product(offsets, poolings):
        form = PackedForm(pooling=pooling, first_position=first_position)
        try:
            error = error_of(form)
        except _REFUSALS as refusal:
            failure = f"{small.config.model_type} does not run on one row: {str(refusal).splitlines()[0][:100]}"
            continue
        best = min(best, error)
        if error <= TOLERANCES["fp32"].logits:
            ruled = with_padding_rule(small, form, max_length, _equal)
            if ruled is None:
                return None, error, "a text that holds the padding token is read otherwise by the plain forward"
            return _shortened(small, ruled, error_of), error, ""
    if best < float("inf"):
        failure = f"its packed logits differ from the plain ones by {best:.1e}"
    return None, best if best < float("inf") else None, failure


#: Exceptions of a model that cannot run in a form.
_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)


def _form_error(small: Any, sequences: Sequence[np.ndarray], plain: Tensor, max_length: int, form: PackedForm) -> float:
    """Relative error of packed logits: all sequences in one row, and each alone in its own."""
    with torch.no_grad():
        run = PackedModel(small, form, plain=True)
        together = run(packed_row(sequences, small.config, max_length)).logits[: len(sequences)]
        error = relative_error(together, plain)
        if error <= TOLERANCES["fp32"].logits:
            apart = [run(packed_row([s], small.config, max_length)).logits[:1] for s in sequences]
            error = worse(error, relative_error(torch.cat(apart), plain))
    return error


def _shortened(small: Any, form: PackedForm, error_of: Callable[[PackedForm], float]) -> PackedForm:
    """Return the form with a short last layer if that gives the plain logits too."""
    short = replace(form, short=True)
    if form.pooling in ("mean", "late") or after_attention(small) is None:
        return form
    try:
        return short if error_of(short) <= TOLERANCES["fp32"].logits else form
    except _REFUSALS:
        return form


def _float8_error(small: Any, case: TriedRow) -> tuple[float | None, dict[float8.Shape, bool]]:
    """Error of fused layers with all products in fp8, in units of the tolerance; shapes of their weights, and if GELU
    follows.

    The tolerance is at least three times what the plain model loses if the operands of its Linear layers are rounded to
    fp8. Everything else is in the precision of the case.
    """
    rounded, fused = copy.deepcopy(small), copy.deepcopy(small)
    layers, case = layers_of(fused), replace(case, form=replace(case.form, short=False))  # compiled layers run whole
    if layers is None:
        return None, {}
    for module in layers_of(rounded).modules():  # type: ignore[union-attr]
        if type(module) is nn.Linear:
            rounding = partial(float8.linear, weight=module.weight, bias=module.bias)
            module.forward = rounding  # type: ignore[method-assign]
    covered: list[bool] = []
    from brimful.models.fusion import fuse  # it needs Triton, which is missing beside torch for CPUs
    from brimful.models.fusion.recording import record_calls

    def cover(graph: GraphModule, inputs: Sequence[Any] = ()) -> Callable[..., Any]:
        fused = fuse(graph)
        covered.append(fused is not None)
        return graph if fused is None else fused

    record_calls(layers, cover, backend=cover)
    plan = float8.Plan()
    try:
        found = case.errors(fused, reference=False, plan=plan)
    except (RuntimeError, TypeError, ValueError):  # neither dynamo nor the matrix units need take every layer
        return None, {}
    shapes = {shape: activated for shape, activated in plan.met.items() if float8.fits(shape)}
    if not covered or not all(covered) or not shapes:
        return None, {}
    return in_tolerances(found, case.errors(rounded, reference=True), "fp8"), shapes


def _is_recorded(small: Any, case: TriedRow) -> bool:
    """Return whether the layers can be recorded, and our kernels cover them. None of these runs."""
    layers, covered = layers_of(copied := copy.deepcopy(small)), list[bool]()
    if layers is None or next(small.parameters()).device.type != "cuda":
        return False
    try:
        from brimful.models.fusion import fuse
        from brimful.models.fusion.recording import Recorded
    except ImportError:  # without Triton
        return False

    def cover(graph: GraphModule) -> Callable[..., Any]:
        covered.append(fuse(graph) is not None)
        return graph

    def uncovered(layer: nn.Module) -> Callable[..., Any]:
        covered.append(False)
        return layer._call_impl

    for layer in layers:
        layer._compiled_call_impl = Recorded(layer, cover, uncovered)
    try:
        with torch.no_grad():
            case.logits(copied, PackedModel(copied, replace(case.form, short=False)))
    except Exception:  # nothing of the model is known by it: it runs as it did
        return False
    return bool(covered) and all(covered)


def _takes_half_weights(small: Any, case: TriedRow) -> bool:
    """True if the model computes the same with Linear weights in half precision."""
    dtype = HALF.get(case.precision)
    if dtype is None:
        return False
    halved = copy.deepcopy(small)
    copied = linear_parameters(halved)
    for parameter in halved.parameters():
        if id(parameter) in copied:
            parameter.data = parameter.data.to(dtype)
    try:
        return case.kernel_error(halved) <= 1.0
    except (RuntimeError, TypeError, ValueError):  # its code needs fp32 weights
        return False


def _equal(found: Tensor, expected: Tensor) -> bool:
    return relative_error(found, expected) <= TOLERANCES["fp32"].logits


def _read(path: Path) -> Equivalence | None:
    try:
        kept = read_cached(path) or {}
        for name in ("float8_shapes", "float8_activated"):
            kept[name] = tuple((rows, columns) for rows, columns in kept.get(name, ()))
        return Equivalence(**kept)
    except (TypeError, ValueError, AttributeError):
        return None
