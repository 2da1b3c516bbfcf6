"""Kinds of kernels, by name alone: a replayed CUDA graph tells nothing else.

The table of rules is read from the top, and the first pattern found in a name decides. Names that inductor makes list
the operators fused into a kernel, so their rules stand before those of libraries: `triton_poi_fused_addmm_gelu` is no
matrix product, it is what is done to one's result. On a CPU the names are those of torch's operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

from brimful.core.profile import Kernel, Part, PartName

#: Every part but idle, where kernels overlap, time belongs to the first of them.
PARTS: tuple[PartName, ...] = get_args(PartName)[:-1]

#: Part and what its names have in them. Read from the top; the first one found decides.
_RULES: tuple[tuple[PartName, str], ...] = (
    ("communication", r"(?i)^nccl|^c10d::|^gloo:|^clock_(start|stop)$"),
    # Kernels that inductor wrote.
    ("contractions", r"^triton_tem_(?!.*(flex_attention|sdpa))"),
    ("attention", r"^triton_\w*(flex_attention|scaled_dot_product|flash_attention|(varlen|relative)_attention)"),
    ("embedding", r"^triton_\w*(embedding_dense_backward|index_put)"),
    ("normalisation", r"^triton_\w*(layer_norm|rms_norm|rsqrt|var_mean|batch_norm)"),
    ("embedding", r"^triton_\w*embedding"),
    ("copies", r"^triton_poi_fused(_(_to_copy|_unsafe_view|clone|copy|permute|slice|t|transpose|view))+(_\d+)?$"),
    ("element-wise", r"^triton_(poi|red|per|spl|for)_"),
    # Kernels of our own: brimful's.
    ("attention", r"^(varlen|relative|first_token)_attention_"),
    ("embedding", r"^embedding_norm_(for|back)ward$"),
    ("contractions", r"^gelu_product$"),
    ("normalisation", r"^(pre)?norm_(for|back)ward$"),
    ("element-wise", r"^((gelu|gated|heads|selective_scan)_(for|back)ward|dropped|apply_dropout|partial_sums(_add)?)$"),
    ("copies", r"^(rows_cast|columns_(measure|cast))$"),
    ("optimizer", r"^(adamw_(norm|decide|update|part)|gather_gradients|part_sum|sum_(parts|with_own))$"),
    # Attention: FlashAttention, memory-efficient attention, cuDNN's; cutlass is inside, and so stands below.
    ("attention", r"(?i)flash_?(fwd|bwd|attn|attention|fprop|bprop)|fmha|efficient_attention|attention_kernel|sdpa"),
    ("attention", r"AttentionKernel|AttentionBackwardKernel|cudnn::fusion::|scaled_dot_product"),
    ("attention", r"softmax_warp_(for|back)ward<([^,]+, ){3}\d+, false|^aten::_softmax"),
    ("attention", r"(?<!Log)SoftmaxBackward|BmmBackward"),  # on a CPU: forward they are called by attention
    # The optimizer: fused updates, the gradient's norm, clearing gradients.
    ("copies", r"multi_tensor_apply_kernel<.*\bCopy<"),
    ("optimizer", r"(?i)adam|sgd|lp_?norm|multi_tensor_apply|foreach|vector_norm|amp_update_scale|NormTwoOps"),
    # Normalisation.
    ("normalisation", r"(?i)layer_?norm|rms_?norm|batch_?norm|GammaBeta|RowwiseMoments|ComputeGradInput"),
    # On a CPU rows are gathered for attention; an embedding's own look-up is inside aten::embedding.
    ("copies", r"^aten::index_(select|add_?)$|IndexSelectBackward"),
    # Embedding: the look-up, and the sorting and summing of its gradient.
    ("embedding", r"(?i)embedding|index_?select|indexFunc|index_add|vectorized_gather|gather_kernel|scatter|index_put"),
    ("embedding", r"compute_grad_weight|sum_and_scatter|krn_partial|partial_segment|segment_offsets|num_of_segments"),
    ("embedding", r"(?i)RadixSort|radix_sort|DeviceMerge|unique_by_key|at_cuda_detail::cub|thrust::"),
    # Contractions: cuBLAS (nvjet, xmma, cutlass, gemm and gemv kernels), MKL and oneDNN behind aten.
    ("contractions", r"(?i)nvjet|xmma|cutlass|cublas|gemm|gemv|splitKreduce|wgrad|dgrad|mkldnn_linear"),
    ("contractions", r"^aten::(addmm|mm|bmm|baddbmm|addbmm|linear|matmul|addmv|mv|dot)_?$"),
    # Copies: memory to memory, casts, fills.
    ("copies", r"(?i)^memcpy|^memset|copy_kernel|copy_device_to_device|CatArrayBatchedCopy|FillFunctor|convert_kernel"),
    ("copies", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_|zeros|zeros_like|ones|ones_like|full)$"),
    # Everything else that computes number by number, and sums over one dimension.
    ("element-wise", r"(?i)elementwise|element_wise|dropout|gelu|reduce_kernel|SoftMax|nll_loss|cross_entropy|mse"),
    ("element-wise", r"(?i)distribution_|bernoulli|philox|scan_kernel|CompareEq|where_kernel|arange|masked"),
    (
        "element-wise",
        r"^aten::(add|sub|mul|div|pow|exp|log|tanh|sigmoid|relu|silu|rsqrt|sqrt|neg|abs|sum|mean|where|clamp\w*|rsub|eq|ne"
        r"|lt|gt|le|ge|isfinite|bitwise_\w+|logical_\w+|native_dropout\w*|\w+_backward|_log_softmax|nll_\w+|all|any|max|min"
        r"|amax|tril|triu|arange|cos|sin|stack|threshold|bernoulli|reciprocal|square|index|empty_like|erf)_?$",
    ),
)  # fmt: skip
_COMPILED = tuple((part, re.compile(pattern)) for part, pattern in _RULES)


@cache
def part_of(name: str) -> PartName:
    """The class of a kernel or operator; `other` for one that no rule knows."""
    return next((part for part, pattern in _COMPILED if pattern.search(name)), "other")


@dataclass(frozen=True, kw_only=True)
class Span:
    """One kernel on the device, or one operator on the host: from `start_s` to `end_s` on the trace's own clock."""

    name: str
    start_s: float
    end_s: float


def exclusive_seconds(spans: Iterable[Span]) -> dict[PartName, float]:
    """Seconds in which each part was running, an instant that several share counted once, for the first of `PARTS`.

    Their sum is the length of the union of all spans.
    """
    edges: list[tuple[float, int, int]] = []
    for span in spans:
        place = PARTS.index(part_of(span.name))
        edges += [(span.start_s, 1, place), (span.end_s, -1, place)]
    edges.sort()
    running = [0] * len(PARTS)
    seconds = dict.fromkeys(PARTS, 0.0)
    before = 0.0
    for now, change, place in edges:
        first = next((index for index, count in enumerate(running) if count), None)
        if first is not None:
            seconds[PARTS[first]] += now - before
        running[place] += change
        before = now
    return seconds


def running_seconds(spans: Iterable[Span], part: PartName) -> float:
    """Seconds in which a part was running, whatever ran beside it."""
    total, end = 0.0, float("-inf")
    for span in sorted((each for each in spans if part_of(each.name) == part), key=lambda span: span.start_s):
        total += max(0.0, span.end_s - max(span.start_s, end))
        end = max(end, span.end_s)
    return total


def with_callers(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Nested operators of one thread as (pieces, calls): pieces do not overlap, and carry the name that time goes to.

    That is the outermost operator whose part is known, so that what attention or a look-up calls counts with it; else
    the innermost. calls: operators that were not called by a known one.
    """
    pieces: list[Span] = []
    calls: list[Span] = []
    inside: list[tuple[str, float]] = []  # what time goes to, and its end, from the outermost on
    at = 0.0

    def pass_until(now: float) -> None:
        nonlocal at
        while inside:
            name, end = inside[-1]
            if min(end, now) > at:
                pieces.append(Span(name=name, start_s=at, end_s=min(end, now)))
                at = min(end, now)
            if end > now:
                break
            inside.pop()
        at = now

    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        pass_until(span.start_s)
        known = inside and part_of(inside[-1][0]) != "other"
        if not known:
            calls.append(span)
        inside.append((inside[-1][0] if known else span.name, span.end_s))
    pass_until(float("inf"))
    return pieces, calls


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The step in parts, `stretch` and kernels as `core.profile.Profile` has them."""

    parts: tuple[Part, ...]
    kernels: tuple[Kernel, ...]
    stretch: float
    num_kernels: float


def breakdown(
    pieces: Sequence[Span], calls: Sequence[Span], *, steps: int, step_s: float, stretch: float | None = None
) -> Breakdown:
    """Parts and kernels of one step, out of what ran in `steps` of them.

    pieces: what time is counted by. calls: what launches are counted by; on a GPU both are its kernels.
    step_s: mean of a step without the profiler. What no piece fills of it is idle.
    stretch: what recording lengthens the pieces by, for which they are shortened. None: by nothing, unless together
    they are longer than the step.
    """
    seconds = {name: total / steps for name, total in exclusive_seconds(pieces).items()}
    busy_s = sum(seconds.values())
    stretch = stretch or max(1.0, busy_s / step_s)
    counts = dict.fromkeys(PARTS, 0)
    by_name: dict[str, list[float]] = {}
    for call in calls:
        counts[part_of(call.name)] += 1
        by_name.setdefault(call.name, [0.0, 0.0])[1] += 1
    for piece in pieces:
        by_name[piece.name][0] += piece.end_s - piece.start_s
    parts = [_part(name, seconds[name] / stretch, step_s, counts[name] / steps) for name in PARTS]
    parts.append(_part("idle", max(0.0, step_s - busy_s / stretch), step_s, 0.0))
    kernels = [
        Kernel(name=name, part=part_of(name), seconds=total / steps / stretch, count=count / steps)
        for name, (total, count) in sorted(by_name.items(), key=lambda item: -item[1][0])
    ]
    return Breakdown(parts=tuple(parts), kernels=tuple(kernels), stretch=stretch, num_kernels=len(calls) / steps)


def _part(name: PartName, seconds: float, step_s: float, count: float) -> Part:
    return Part(name=name, seconds=seconds, share=seconds / step_s, count=count)
