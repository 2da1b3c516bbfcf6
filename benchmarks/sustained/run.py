"""Rates that an NVIDIA GPU holds under load: matmuls and our kernels, with clock and power.

    python benchmarks/sustained/run.py [training] [inference]

The layers of a step, forward and backward, and those of a pass without gradients: both unless one is named.

Each call is repeated in a CUDA graph of 20 over four sets of random inputs, for 1.5 seconds; its time is the median of
the later half of the replays. "at once" is the faster of the first two replays, when the chip is cool.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml
import torch
from torch import Tensor

from brimful.kernels.layers import dropout_add_layernorm, gelu, matmul_gelu
from brimful.kernels.rng import row_seeds
from brimful.kernels.split_reduction import make_partial_sums

_SECONDS, _CALLS, _SETS = 1.5, 20, 4
BF16 = torch.bfloat16


def nvml_handle() -> Any:
    """The GPU that torch uses, whichever of the machine's that is."""
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


class Watch:
    """Reads clock, power and what limits the clock every 20 ms, while it is entered."""

    def __init__(self) -> None:
        self._handle = nvml_handle()
        self._read: list[tuple[int, float, int]] = []
        self._on = threading.Event()

    def __enter__(self) -> Watch:
        self._on.set()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on.clear()
        self._thread.join()

    def _watch(self) -> None:
        while self._on.is_set():
            clock = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
            power_w = pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
            self._read.append((clock, power_w, pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)))
            time.sleep(0.02)

    def said(self) -> str:
        later = self._read[len(self._read) // 3 :] or self._read
        clocks, powers, reasons = zip(*later, strict=True)
        limit = "power" if pynvml.nvmlClocksEventReasonSwPowerCap in reasons else "-"
        return f"{statistics.median(clocks):.0f} | {statistics.median(powers):.0f} | {limit}"


def sustain(name: str, call: Callable[[int], object], *, operations: float = 0.0, moved_bytes: float = 0.0) -> None:
    """Prints a row of the table. call: is given the number of the set of inputs."""
    for index in range(_SETS):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(_CALLS):
            call(index % _SETS)
    times_ms: list[float] = []
    watch, began = Watch(), time.monotonic()
    with watch:
        while time.monotonic() - began < _SECONDS:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end) / _CALLS)
    held, at_once = statistics.median(times_ms[len(times_ms) // 2 :]), min(times_ms[:2])
    work, unit = (operations, "TFLOP/s") if operations else (moved_bytes, "TB/s")
    digits = 0 if operations else 2
    rates = [f"{work / ms / 1e9:,.{digits}f}" for ms in (held, at_once)]
    print(f"| {name} | {held * 1e3:.1f} | {rates[0]} {unit} | {rates[1]} | {watch.said()} |", flush=True)


def random(rows: int, columns: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(_SETS)]


def layer(tokens: int, hidden: int) -> None:
    """The products of a layer, forward and backward, and the kernels between them."""
    rows, wide, threefold = random(tokens, hidden), random(tokens, 4 * hidden), random(tokens, 3 * hidden)
    by_width = {hidden: rows, 4 * hidden: wide, 3 * hidden: threefold}
    for name, outputs, inputs in (
        ("query, key, value", 3 * hidden, hidden),
        ("attention's output", hidden, hidden),
        ("up", 4 * hidden, hidden),
        ("down", hidden, 4 * hidden),
    ):
        weight = torch.randn(outputs, inputs, device="cuda", dtype=BF16) * 0.02
        x, g, operations = by_width[inputs], by_width[outputs], 2.0 * tokens * outputs * inputs
        for what, call in (
            ("outputs", lambda i, x=x, w=weight: x[i] @ w.t()),
            ("gradient of inputs", lambda i, g=g, w=weight: g[i] @ w),
            ("gradient of weights", lambda i, g=g, x=x: g[(i + 1) % _SETS].t() @ x[i]),
        ):
            sustain(f"{tokens} x {hidden}: {name}, {what}", call, operations=operations)
    bias, gain, shift = (torch.randn(hidden, device="cuda", dtype=d) for d in (BF16, torch.float32, torch.float32))
    seed, wide_bias = (
        row_seeds(torch.tensor(5, device="cuda"), tokens),
        torch.randn(4 * hidden, device="cuda", dtype=BF16),
    )
    for dtype in (torch.float32, BF16):
        kept, size = random(tokens, hidden, dtype), float(dtype.itemsize)
        half = dtype != BF16

        def forward(i: int, kept: list[Tensor] = kept, half: bool = half, dtype: torch.dtype = dtype) -> Tensor:
            return dropout_add_layernorm.fused_forward(
                rows[i], bias, kept[i], gain, shift, seed, 1, 1e-12, 0.1, half, dtype
            )[2]

        given = forward(0)

        def backward(i: int, kept: list[Tensor] = kept, given: Tensor = given) -> object:
            other = (i + 1) % _SETS
            return dropout_add_layernorm.fused_backward(
                kept[other], rows[other], rows[i], bias, kept[i], gain, given, seed, 1, 0.1
            )

        kind, numbers = f"{tokens} x {hidden}: norm, residuals of {8 * dtype.itemsize} bits", tokens * hidden
        sustain(f"{kind}, forward", forward, moved_bytes=numbers * (2 + 2 * size + 2 * half))
        sustain(f"{kind}, backward", backward, moved_bytes=numbers * (6 + 3 * size))
    numbers = tokens * 4 * hidden
    sustain(
        f"{tokens} x {hidden}: GELU, forward", lambda i: gelu.fused_forward(wide[i], wide_bias), moved_bytes=4 * numbers
    )
    sustain(
        f"{tokens} x {hidden}: GELU, backward",
        lambda i: gelu.fused_backward(wide[(i + 1) % _SETS], wide[i], wide_bias),
        moved_bytes=6 * numbers,
    )
    sustain(
        f"{tokens} x {hidden}: sums over rows of 3 x {hidden}", lambda i: make_partial_sums(threefold[i]),
        moved_bytes=6 * tokens * hidden,
    )  # fmt: skip


def forward_layer(tokens: int, hidden: int) -> None:
    """The kernels of a layer that differ without gradients."""
    rows, kept, kind = random(tokens, hidden), random(tokens, hidden), f"{tokens} x {hidden}"
    weight = torch.randn(4 * hidden, hidden, device="cuda", dtype=BF16) * 0.02
    bias, wide_bias = (torch.randn(width, device="cuda", dtype=BF16) for width in (hidden, 4 * hidden))
    gain, shift = (torch.randn(hidden, device="cuda") for _ in range(2))
    operations = 8.0 * tokens * hidden**2
    sustain(f"{kind}: up", lambda i: rows[i] @ weight.t(), operations=operations)
    sustain(
        f"{kind}: up and GELU, one after the other",
        lambda i: gelu.fused_forward(rows[i] @ weight.t(), wide_bias),
        operations=operations,
    )
    sustain(
        f"{kind}: up and GELU, one kernel",
        lambda i: matmul_gelu.fused(rows[i], weight, wide_bias),
        operations=operations,
    )
    sustain(
        f"{kind}: norm without dropout",
        lambda i: dropout_add_layernorm.fused_forward(
            rows[i], bias, kept[i], gain, shift, rows[i], 0, 1e-12, 0.0, False, BF16
        ),
        moved_bytes=6 * tokens * hidden,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="training, inference")
    parts = parser.parse_args().parts or ["training", "inference"]
    if not {"training", "inference"}.issuperset(parts):
        parser.error(f"parts are training and inference, not {' '.join(parts)}")
    pynvml.nvmlInit()
    handle = nvml_handle()
    limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
    most_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    print(f"{torch.cuda.get_device_name()}, {limit_w:.0f} W at the most, {most_mhz} MHz, torch {torch.__version__}\n")
    print("| | us | held | at once | MHz | W | held back by |\n|---|---|---|---|---|---|---|")
    a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(3))
    sustain("8192³, random", lambda _: torch.mm(a, b, out=c), operations=2.0 * 8192**3)
    a.zero_()
    sustain("8192³, zeros", lambda _: torch.mm(a, b, out=c), operations=2.0 * 8192**3)
    if "training" in parts:
        layer(13_056, 768)
        layer(16_384, 1024)
    if "inference" in parts:
        for hidden in (384, 768, 1024):
            forward_layer(32_768, hidden)


if __name__ == "__main__":
    main()
