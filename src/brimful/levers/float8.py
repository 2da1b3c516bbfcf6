"""Products of layers in fp8: those that are faster so, measured on this device before the run begins.

fp8 doubles the rate of the matrix units, and operands must be cast to it, which takes memory's time: whether it pays
depends on shapes and device. Each product of each shape of weight is timed in bf16 and in fp8, casts included, and
taken in fp8 where it wins by a margin; the seconds are kept in the user's cache folder. Without gradients, a product
that GELU follows is timed with it, since in bf16 both may be one kernel.

Products in fp8 are those of layers on fused kernels. Heads, embeddings, norms and attention stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from brimful.core.cache import cache_path, read_cached, write_cached
from brimful.core.records import Arithmetic
from brimful.kernels.float8 import Plan, Products, Shape, cast, product
from brimful.kernels.forward_context import ForwardContext
from brimful.levers.execution import ExecutionMode
from brimful.levers.facts import equivalence_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.token_budget import TokenBudget, cuts_windows
from brimful.measurement.peaks import median_seconds
from brimful.models.packed.equivalence import Equivalence

#: fp8 must be faster by this factor: the same buffers again and again lie in caches as those of a step do not.
MARGIN = 1.05
#: With so many times fewer tokens than products are timed with, none is in fp8: of the first tokens alone, for one.
_FEWER = 8
#: Seconds that timing one product may take.
_WITHIN_S = 0.02
#: Raised when the kernels change, so that old timings are not believed.
_REVISION = 2

#: Seconds of a layer's three products, (bf16, fp8) each, by the names of `Products`.
Timing = Mapping[str, tuple[float, float]]
Call = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Float8(Lever):
    """Products of fused layers in fp8. plan: which ones, None where none is.

    timings: by shape of the weight, by which they were chosen.
    """

    name = "fp8"
    source = "Micikevicius et al. 2022, arXiv 2209.05433; rowwise scales as in torchao.float8"
    plan: Plan | None = None
    timings: Mapping[Shape, Timing] = field(default_factory=dict)

    @property
    def arithmetic(self) -> Arithmetic:
        """`rounding`, where any product is in it."""
        return "exact" if self.plan is None else "rounding"

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether our fused kernels cover the model's layers, and lose no more than is allowed in fp8."""
        fused = assembly.lever(ExecutionMode).compiled and (assembly.training or cuts_windows(assembly))
        return supports_float8(assembly.fact(equivalence_of), fused=fused)

    @classmethod
    def choose(cls, assembly: Assembly) -> Float8 | None:
        """Choose the products that are faster so, where fp8 was asked for."""
        if assembly.precision.value != "fp8":
            return None
        equivalence, forward_only = assembly.fact(equivalence_of), not assembly.training
        verdict = cls.supports(assembly)
        if not verdict.ok:
            return cls(value="off", reason=f"fp8 was asked for, but {verdict.because}")
        assembly.lever(TokenBudget)
        return choose_products(assembly.device, equivalence, num_tokens=assembly.budget, forward_only=forward_only)

    def cost(self, work: StepWork) -> Cost:
        """Copies of weights in 8 bits, rows and columns for training, and seconds against those in bf16."""
        num_bytes, step_s = 0, 0.0
        for (rows, columns), timing in self.timings.items():
            chosen, count = faster_products(timing), work.token_matrices[rows, columns]
            num_bytes += count * rows * columns * (chosen.output + chosen.input_gradient)
            step_s += count * sum(timing[name][1] - timing[name][0] for name in timing if getattr(chosen, name))
        return Cost(resident_bytes=num_bytes, step_s=step_s)

    def apply(self, assembly: Assembly) -> None:
        """Have passes follow the plan, or run in bf16, which is said, where no product is faster in fp8."""
        if self.plan is None:
            assembly.precision = replace(assembly.precision, value="bf16", reason=self.reason)
            assembly.warn(f"products run in bf16: {self.reason}")
        else:
            assembly.precision = replace(assembly.precision, plan=self.plan)


def supports_float8(equivalence: Equivalence, *, fused: bool) -> Verdict:
    """Return the verdict on a model. fused: whether its layers are to run on fused kernels."""
    error = equivalence.float8_error
    if not equivalence.packed:
        return Verdict(ok=False, because="the model does not run packed")
    if not fused:
        return Verdict(ok=False, because="its products are those of fused layers, which this execution does not have")
    if error is None:
        return Verdict(ok=False, because="our fused kernels do not cover the model's layers")
    return Verdict(ok=error <= 1.0, because=f"the model loses {error:.1f} times what is allowed in it")


def choose_products(
    device: torch.device, equivalence: Equivalence, *, num_tokens: int, forward_only: bool = False
) -> Float8:
    """Choose by timing each product of each shape of weight, in bf16 and in fp8.

    num_tokens: of the largest micro-batch. forward_only: for a model that is only read, which has no gradients'
    products.
    """
    activated = frozenset(equivalence.float8_activated if forward_only else ())
    timings = time_shapes(device, equivalence.float8_shapes, num_tokens, activated=activated)
    if forward_only:
        timings = {shape: {"output": timing["output"]} for shape, timing in timings.items()}
    chosen = {shape: faster_products(timing) for shape, timing in timings.items()}
    number, total = sum(sum(products) for products in chosen.values()), sum(map(len, timings.values()))
    if not number:
        reason = f"fp8 was asked for, but no product is faster in it here: {_factors(timings)} at {num_tokens:,} tokens"
        return Float8(value="off", reason=reason)
    left = {
        shape: {name: pair for name, pair in timing.items() if not getattr(chosen[shape], name)}
        for shape, timing in timings.items()
    }
    reason = f"asked for; these products of layers are faster in it here at {num_tokens:,} tokens"
    return Float8(
        value=f"{number} of {total} products",
        reason=f"{reason}; bf16 stays in {_factors(left)}" if any(left.values()) else reason,
        plan=Plan(chosen, fewest=num_tokens // _FEWER),
        timings=timings,
    )


def faster_products(timing: Timing) -> Products:
    """Those that are faster in fp8 by the margin."""
    return Products(**{name: bf16_s > MARGIN * fp8_s for name, (bf16_s, fp8_s) in timing.items()})


def time_shapes(
    device: torch.device, shapes: tuple[Shape, ...], num_tokens: int, *, activated: Set[Shape] = frozenset(),
    cache: bool = True,
) -> dict[Shape, Timing]:  # fmt: skip
    """Timings of each shape of weight, (N, K), read from the cache where they are known. activated: those whose output
    is timed with bias and GELU, without gradients."""
    timings: dict[Shape, Timing] = {}
    for shape in shapes:
        path = timing_path(device, shape, num_tokens, activated=shape in activated) if cache else None
        known = None if path is None else read_cached(path)
        if known is not None and known.keys() == set(Products._fields):
            timings[shape] = {name: (float(bf16_s), float(fp8_s)) for name, (bf16_s, fp8_s) in known.items()}
            continue
        timings[shape] = time_products(device, shape, num_tokens, activated=shape in activated)
        if path is not None:
            write_cached(path, timings[shape])
    return timings


def timing_path(device: torch.device, shape: Shape, num_tokens: int, *, activated: bool = False) -> Path | None:
    """Cache file of one shape's timing, by device, versions, shape, tokens and following op."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    import triton

    versions = [torch.__version__, torch.version.cuda, triton.__version__, _REVISION]
    return cache_path("float8", [name, versions, list(shape), num_tokens, activated])


def time_products(device: torch.device, shape: Shape, num_tokens: int, *, activated: bool = False) -> Timing:
    """Seconds of the products with one weight, casts included. That of the weight is paid once a step, and is counted
    as if every micro-batch paid it, unless the output is `activated`."""
    rows, columns = shape
    random = torch.Generator(device).manual_seed(0)
    x_TK, w_NK, g_TN = (
        torch.randn(*size, device=device, generator=random).to(torch.bfloat16)
        for size in ((num_tokens, columns), (rows, columns), (num_tokens, rows))
    )
    pairs = _pairs(x_TK, w_NK, g_TN)
    if activated:
        pairs["output"] = _activated(x_TK, w_NK)
    timing = {}
    for name, (in_bf16, in_fp8) in pairs.items():
        bf16_s, fp8_s = (median_seconds(device, call, within_s=_WITHIN_S) for call in (in_bf16, in_fp8))
        timing[name] = (bf16_s, fp8_s)
    return timing


def _pairs(x_TK: Tensor, w_NK: Tensor, g_TN: Tensor) -> dict[str, tuple[Call, Call]]:
    """The three products in bf16 and in fp8, as fused layers take them."""
    bf16, transposed = torch.bfloat16, partial(cast, transposed=True)
    return {
        "output": (lambda: x_TK @ w_NK.t(), lambda: product(cast(x_TK), cast(w_NK), bf16, quick=True)),
        "input_gradient": (lambda: g_TN @ w_NK, lambda: product(cast(g_TN), transposed(w_NK), bf16)),
        "weight_gradient": (lambda: g_TN.t() @ x_TK, lambda: product(transposed(g_TN), transposed(x_TK), bf16)),
    }


def _activated(x_TK: Tensor, w_NK: Tensor) -> tuple[Call, Call]:
    """The output with bias and GELU in bf16 and in fp8, as a layer without gradients takes it."""
    from brimful.kernels.layers.postnorm_ops import linear_gelu

    bias_N, all_in_fp8 = w_NK.new_zeros(len(w_NK)), Plan()

    def in_bf16() -> Tensor:
        with torch.no_grad():
            return linear_gelu(x_TK, w_NK, bias_N)

    def in_fp8() -> Tensor:
        with ForwardContext(float8=all_in_fp8).active():
            return in_bf16()

    return in_bf16, in_fp8


def _factors(timings: Mapping[Shape, Timing]) -> str:
    """Speed-up of fp8 over bf16: `768x768 output 0.91x, input gradient 0.88x; 3072x768 output 1.2x`."""
    return "; ".join(
        f"{shape[0]}x{shape[1]} "
        + ", ".join(f"{name.replace('_', ' ')} {bf16_s / fp8_s:.2g}x" for name, (bf16_s, fp8_s) in timing.items())
        for shape, timing in timings.items()
        if timing
    )
