"""Measured peaks of the device: matrix products and copies. Takes about a second on a GPU.

Everything is repeated on the same buffers and the median taken. Small ones stay in caches, so a step, which meets
others each time, may fall a little short of what is measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from brimful.core.profile import Limits
from brimful.hardware.capture import capture

#: Sides of the square product: large enough to fill the device, small enough to take milliseconds.
_SIDE = {"cuda": 8192, "cpu": 1024}
#: Bytes of the copied tensor: more than caches hold.
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
#: Seconds that each measurement may take, and its trials.
_SECONDS, _TRIALS = 0.15, 5
#: Calls of one trial at most: a graph of more is slow to make.
_MOST_REPEATS = 500
#: Shapes of the model's products that are measured: the ones with the most operations.
_MOST_SHAPES = 6

Shape = tuple[int, int]


def measure_limits(
    device: torch.device,
    dtype: torch.dtype,
    *,
    shapes: Mapping[Shape, int],
    num_tokens: int,
    datasheet_flops_per_s: float | None = None,
) -> Limits:
    """Limits of `device` for products of `dtype` operands, at the fp32 precision that torch is set to.

    shapes: (rows, columns) of the model's matrices -> how many there are; none for a model where they are not known.
    num_tokens: that each is multiplied with at once.
    """
    return Limits(
        matmul_flops_per_s=product_rate(device, dtype),
        model_matmul_flops_per_s=_model_rate(device, dtype, shapes, num_tokens),
        copy_bytes_per_s=_copy_rate(device),
        datasheet_flops_per_s=datasheet_flops_per_s,
    )


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product of `dtype` operands."""
    side = _SIDE[device.type]
    for _ in range(2):  # once to bring the clocks up, once to measure
        square_s = _seconds_of_products(device, dtype, side, side, side, backward=False)
    return 2 * side**3 / square_s


def _model_rate(device: torch.device, dtype: torch.dtype, shapes: Mapping[Shape, int], num_tokens: int) -> float | None:
    """Operations per second of all products with the model's matrices, as often as they come in a step."""
    most = sorted(shapes, key=lambda shape: -shapes[shape] * shape[0] * shape[1])[:_MOST_SHAPES]
    flops = seconds = 0.0
    for rows, columns in most:
        count = shapes[rows, columns]
        flops += count * 6 * num_tokens * rows * columns
        seconds += count * _seconds_of_products(device, dtype, num_tokens, rows, columns, backward=True)
    return flops / seconds if seconds else None


def _seconds_of_products(
    device: torch.device, dtype: torch.dtype, num_tokens: int, rows: int, columns: int, *, backward: bool
) -> float:
    """The product of (tokens, columns) with a (rows, columns) matrix transposed; with the two of its backward pass."""
    random: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    x = torch.randn(num_tokens, columns, **random)
    weight = torch.randn(rows, columns, **random)
    gradient = torch.randn(num_tokens, rows, **random)

    def products() -> None:
        torch.mm(x, weight.t())
        if backward:
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)

    return median_seconds(device, products)


def _copy_rate(device: torch.device) -> float:
    num_bytes = _COPIED_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.zeros(max(num_bytes // 4, 1), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(device, lambda: torch.mul(source, 1.0, out=target))


def median_seconds(
    device: torch.device, call: Callable[[], object], *, within_s: float = _SECONDS, replayed: bool = True
) -> float:
    """Seconds of one `call`, the median of a few trials of many. within_s: what all trials together may take, about.

    replayed: on a GPU it becomes a graph, so that launching costs nothing: the call must be one that can be captured.
    """
    _trial(device, call, 1)  # loads, allocates
    once = _trial(device, call, 1)
    repeats = max(1, min(_MOST_REPEATS, int(within_s / _TRIALS / max(once, 1e-7))))
    trials = _TRIALS if once < within_s else 1
    if device.type == "cuda" and replayed:
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            for _ in range(repeats):
                call()
        graph.replay()
        return statistics.median(_trial(device, graph.replay, 1) for _ in range(trials)) / repeats
    return statistics.median(_trial(device, call, repeats) for _ in range(trials))


def _trial(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Mean seconds of a call in one trial."""
    if device.type == "cuda":
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        began.record()
        for _ in range(repeats):
            call()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / 1000 / repeats
    began_s = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began_s) / repeats
