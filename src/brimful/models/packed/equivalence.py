"""The equivalence check: a model runs packed because it was shown equal to its plain Hugging Face forward, not by its
name.

On a copy with one layer of each kind, one more to read them, and the model's own weights, in eval mode:

    1  plain, alone = plain, in company            else rows influence one another: batches are never split
    2  packed with reference attention = plain     forward in fp32; finds the pooling and the first position, and
                                                   whether the end of the last layer works on pooled tokens alone
    3  the same, each sequence alone in its row
    4  gradient of all parameters together         norm of the difference over the norm
    5  the chosen kernel = the reference           in the run's precision, forward and gradient
    6  in fp8: fused layers, all products in fp8   lose no more than Linear layers whose operands are rounded

One of the sequences is longer than any attention window that the run's lengths can reach, and than the distances that a
bias by distance tells apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule

from brimful.core.cache import cache_path, read_cached, write_cached
from brimful.core.errors import printable
from brimful.kernels.attention.dispatch import length_class
from brimful.kernels.layers import float8
from brimful.kernels.layout import Inputs, map_tensors
from brimful.kernels.residual_dtype import half_residuals
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.models.packed.check_inputs import (
    Kernel,
    make_sequences,
    one_layer_of_each_kind,
    packed_row,
    padded_rows,
    wake,
)
from brimful.models.packed.packed_forward import (
    PackedExecution,
    PackedForm,
    PaddedExecution,
    Pooling,
    what_follows_attention,
)
from brimful.models.packed.relative_bias import has_form

#: Largest relative difference (norm of the difference over the norm) that counts as equal, by dtype of the products.
FORWARD_TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 5e-3, "bf16": 5e-2, "fp16": 1e-2, "fp8": 1e-1}
GRADIENT_TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5, "tf32": 1e-2, "bf16": 1e-1, "fp16": 3e-2, "fp8": 2e-1}

#: Raised when packed execution or this equivalence check changes, so that what was proved of older code is not
#: believed.
_REVISION = 13


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """What was shown of one model.

    packed: it may run packed, in `form`. independent: rows of a batch do not influence one another.
    *_error: relative differences that were measured, None where the equivalence check did not get that far.
    half_weights: in half precision, it computes the same with its Linear weights kept in that precision.
    float8_error: what its fused layers lose in fp8, in units of what is allowed; None where fp8 was not asked for, or
    our kernels do not cover its layers. float8_shapes: (N, K) of the weights whose products can be in fp8.
    float8_activated: those among them whose output goes through GELU at once.
    """

    packed: bool
    independent: bool
    reason: str
    pooling: Pooling | None = None
    first_position: int | None = None
    short: bool = False
    forward_error: float | None = None
    gradient_error: float | None = None
    kernel_error: float | None = None
    half_weights: bool = False
    float8_error: float | None = None
    float8_shapes: tuple[tuple[int, int], ...] = ()
    float8_activated: tuple[tuple[int, int], ...] = ()

    @property
    def form(self) -> PackedForm | None:
        """How the model runs packed, None where it does not."""
        if self.pooling is None or self.first_position is None:
            return None
        return PackedForm(pooling=self.pooling, first_position=self.first_position, short=self.short)


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
    """Whether `model` may run packed on `device` in `precision` with sequences of up to `max_length` tokens.

    typical_length: mean length of the sequences to come, by which the kernel is chosen. attention: the kernel's name,
    if it was chosen already.

    The model is not changed. The result is kept in the user's cache folder by architecture, versions, device and
    precision; `cache=False` neither reads nor writes it.
    """
    kernel = (typical_length, attention)
    path = _cache_path(model, max_length, device, precision, kernel) if cache else None
    if path is not None and (known := _read(path)) is not None:
        return known
    was = model.config._attn_implementation
    try:
        equivalence = _check(model, max_length, device, precision, kernel)
    except Exception as failure:  # whatever a model does, it is not proved; not kept: it may be the machine's fault
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
    sequences = make_sequences(small.config, max_length)
    with _exact_fp32():
        padded = PaddedExecution(small, "eager")
        try:
            plain = padded(padded_rows(sequences, small.config))
            alone = torch.cat([padded(padded_rows([sequence], small.config)) for sequence in sequences])
        except (ValueError, RuntimeError, IndexError) as refusal:
            why = f"{small.config.model_type} does not take short sequences: {str(refusal).splitlines()[0][:100]}"
            return Equivalence(packed=False, independent=False, reason=why)
        if not relative_error(plain.detach(), alone.detach()) <= FORWARD_TOLERANCE["fp32"]:
            why = "the result of a row depends on the other rows of its batch, or on its padding"
            return Equivalence(packed=False, independent=False, reason=why)
        plain_gradient = _gradient(small, plain)
        form, error, why = _find_form(small, sequences, alone.detach(), max_length)
        if form is None:
            return Equivalence(packed=False, independent=True, reason=why, forward_error=error)
        row = packed_row(sequences, small.config, max_length, kernel)
        gradient = _gradient(small, PackedExecution(small, form, plain=True)(row)[: len(sequences)])
        gradient_error = relative_error(gradient, plain_gradient)
    if not gradient_error <= GRADIENT_TOLERANCE["fp32"]:
        why = f"its packed gradient differs from the plain one by {gradient_error:.1e}"
        return Equivalence(
            packed=False, independent=True, reason=why, forward_error=error, gradient_error=gradient_error
        )
    case = (form, row, plain.detach(), plain_gradient)
    around = "bf16" if precision == "fp8" else precision  # what is not a product of a layer
    kernel_error = _kernel_error(small.to(device), *case, around)
    passed = kernel_error <= 1.0
    half_weights = passed and _takes_half_weights(small, *case, around)
    float8_error, shapes = _float8_error(small, *case, around) if passed and precision == "fp8" else (None, {})
    return Equivalence(
        packed=passed,
        independent=True,
        reason=f"equal to the plain forward within {error:.1e}, gradient within {gradient_error:.1e}"
        if passed
        else f"the attention kernel in {precision} is {kernel_error:.1f} times over its tolerance",
        pooling=form.pooling,
        first_position=form.first_position,
        short=form.short,
        forward_error=error,
        gradient_error=gradient_error,
        kernel_error=kernel_error,
        half_weights=half_weights,
        float8_error=float8_error,
        float8_shapes=tuple(shapes),
        float8_activated=tuple(shape for shape, activated in shapes.items() if activated),
    )


def _find_form(
    small: Any, sequences: Sequence[np.ndarray], plain: Tensor, max_length: int
) -> tuple[PackedForm | None, float | None, str]:
    """The pooling and first position under which packed equals plain; else None, the smallest error and why."""
    if not getattr(small, "_supports_attention_backend", True) and not has_form(small.config):
        return None, None, f"attention of {small.config.model_type} cannot be told where sequences end"
    padding_id = getattr(small.config, "pad_token_id", None)
    offsets = [0] if padding_id is None else [0, padding_id + 1]
    poolings: tuple[Pooling, ...] = ("first", "last", "mean")
    best, failure = float("inf"), "no pooling and position gives the plain logits"
    for first_position, pooling in product(offsets, poolings):
        form = PackedForm(pooling=pooling, first_position=first_position)
        try:
            error = _form_error(small, form, sequences, plain, max_length)
        except _REFUSALS as refusal:
            failure = f"{small.config.model_type} does not run on one row: {str(refusal).splitlines()[0][:100]}"
            continue
        best = min(best, error)
        if error <= FORWARD_TOLERANCE["fp32"]:
            return _shortened(small, form, sequences, plain, max_length), error, ""
    if best < float("inf"):
        failure = f"its packed logits differ from the plain ones by {best:.1e}"
    return None, best if best < float("inf") else None, failure


#: What a model raises that does not run in a form.
_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)


def _form_error(small: Any, form: PackedForm, sequences: Sequence[np.ndarray], plain: Tensor, max_length: int) -> float:
    """Difference of packed logits from the plain ones, of all sequences in one row and of each alone in its own."""
    with torch.no_grad():
        run = PackedExecution(small, form, plain=True)
        together = run(packed_row(sequences, small.config, max_length))[: len(sequences)]
        error = relative_error(together, plain)
        if error <= FORWARD_TOLERANCE["fp32"]:
            apart = [run(packed_row([s], small.config, max_length))[:1] for s in sequences]
            error = _worse(error, relative_error(torch.cat(apart), plain))
    return error


def _shortened(
    small: Any, form: PackedForm, sequences: Sequence[np.ndarray], plain: Tensor, max_length: int
) -> PackedForm:
    """The form with a short last layer, where that gives the plain logits too."""
    short = replace(form, short=True)
    if form.pooling == "mean" or what_follows_attention(small) is None:
        return form
    try:
        error = _form_error(small, short, sequences, plain, max_length)
    except _REFUSALS:
        return form
    return short if error <= FORWARD_TOLERANCE["fp32"] else form


def _kernel_error(small: Any, form: PackedForm, row: Inputs, plain: Tensor, gradient: Tensor, precision: str) -> float:
    """Differences of the chosen kernel in the run's precision from fp32, in units of what is allowed; the larger one.

    Allowed is the tolerance, or three times what the reference attention itself loses in that precision: what a model's
    other layers round away is not the kernel's fault.
    """
    lost, found = (
        _errors(small, form, row, plain, gradient, precision, reference=reference) for reference in (True, False)
    )
    return _in_tolerances(found, lost, precision)


def _in_tolerances(found: tuple[float, float], lost: tuple[float, float], precision: str) -> float:
    """The worse of two errors, forward and gradient, in units of what is allowed where a plain model loses `lost`."""
    forward = found[0] / max(FORWARD_TOLERANCE[precision], 3 * lost[0])
    return _worse(forward, found[1] / max(GRADIENT_TOLERANCE[precision], 3 * lost[1]))


def _float8_error(
    small: Any, form: PackedForm, row: Inputs, plain: Tensor, gradient: Tensor, around: str
) -> tuple[float | None, dict[float8.Shape, bool]]:
    """What fused layers lose with all products in fp8, in units of what is allowed, and the shapes of these products'
    weights, with whether what comes out is activated at once.

    Allowed is the tolerance, or three times what the plain model loses if its layers' operands are rounded to fp8.
    around: the precision of all else.
    """
    rounded, fused = copy.deepcopy(small), copy.deepcopy(small)
    layers, form = layers_of(fused), replace(form, short=False)  # compiled layers run whole
    if layers is None:
        return None, {}
    for module in layers_of(rounded).modules():  # type: ignore[union-attr]
        if type(module) is nn.Linear:
            module.forward = partial(_rounded_linear, module)  # type: ignore[method-assign]
    covered: list[bool] = []
    for layer in layers:
        layer.compile(dynamic=True, backend=partial(_fused_or_not, covered))
    plan = float8.Plan()
    try:
        with plan.active():
            found = _errors(fused, form, row, plain, gradient, around, reference=False)
    except (RuntimeError, TypeError, ValueError):  # neither dynamo nor the matrix units need take every layer
        return None, {}
    shapes = {shape: activated for shape, activated in plan.met.items() if float8.fits(shape)}
    if not covered or not all(covered) or not shapes:
        return None, {}
    lost = _errors(rounded, form, row, plain, gradient, around, reference=True)
    return _in_tolerances(found, lost, "fp8"), shapes


def _rounded_linear(module: nn.Linear, x: Tensor) -> Tensor:
    return float8.linear(x, module.weight, module.bias)


def _fused_or_not(covered: list[bool], graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of torch.compile that notes whether our kernels cover a layer."""
    from brimful.models.fusion import fuse  # it needs Triton, which is missing beside torch for CPUs

    fused = fuse(graph)
    covered.append(fused is not None)
    return graph if fused is None else fused


def _takes_half_weights(
    small: Any, form: PackedForm, row: Inputs, plain: Tensor, gradient: Tensor, precision: str
) -> bool:
    """Whether the model computes the same with Linear weights in half precision."""
    dtype = _HALF.get(precision)
    if dtype is None:
        return False
    halved = copy.deepcopy(small)
    copied = linear_parameters(halved)
    for parameter in halved.parameters():
        if id(parameter) in copied:
            parameter.data = parameter.data.to(dtype)
    try:
        return _kernel_error(halved, form, row, plain, gradient, precision) <= 1.0
    except (RuntimeError, TypeError, ValueError):  # it looks at its weights in another way
        return False


def _worse(error: float, other: float) -> float:
    """The larger error, NaN if either is: `max` keeps a number and drops the NaN behind it."""
    return float(np.maximum(error, other))


def _errors(
    small: Any, form: PackedForm, row: Inputs, plain: Tensor, gradient: Tensor, precision: str, *, reference: bool
) -> tuple[float, float]:
    """Relative differences of logits and gradient from fp32, with the reference attention or the chosen kernel."""
    device = next(small.parameters()).device
    dtype = _HALF.get(precision)
    half = nullcontext() if dtype is None else half_residuals()
    with _exact_fp32(), torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None), half:
        execution = PackedExecution(small, form, plain=reference)
        logits = execution(map_tensors(row, lambda t: t.to(device)))[: len(plain)].float()
    forward = relative_error(logits.detach().cpu(), plain)
    return forward, relative_error(_gradient(small, logits).cpu(), gradient)


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN if anything is not finite."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def _gradient(model: nn.Module, logits: Tensor) -> Tensor:
    """Gradient of all parameters together, (P,), for a fixed random direction in the logits."""
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((logits * direction).sum(), parameters, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten().float()
            if g is None
            else g.flatten().to(torch.promote_types(g.dtype, torch.float32))
            for p, g in zip(parameters, found, strict=True)
        ]
    )


@contextmanager
def _exact_fp32() -> Iterator[None]:
    """fp32 products in full fp32, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _cache_path(model: Any, max_length: int, device: torch.device, precision: str, kernel: Kernel) -> Path | None:
    """Where the equivalence check of this model is kept, None for a user without a home. Remote code has its hash in
    the module."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_ARCHITECTURE}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [torch.__version__, transformers.__version__, _REVISION]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    chosen_by = None
    if device.type == "cuda":
        typical_length, attention = kernel
        chosen_by = [None if typical_length is None else length_class(typical_length), attention]
    return cache_path("proofs", [kind, config, max_length, name, precision, chosen_by, versions])


_NOT_ARCHITECTURE = frozenset({"_name_or_path", "id2label", "label2id", "transformers_version", "dtype", "torch_dtype"})


def _read(path: Path) -> Equivalence | None:
    try:
        kept = read_cached(path) or {}
        for name in ("float8_shapes", "float8_activated"):
            kept[name] = tuple((rows, columns) for rows, columns in kept.get(name, ()))
        return Equivalence(**kept)
    except (TypeError, ValueError, AttributeError):
        return None
