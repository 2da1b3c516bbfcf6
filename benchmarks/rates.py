"""Operations of a model, and the best rates of this machine for them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_REPEATS, _INNER = 20, 10


def meta_model(folder: Path) -> Any:
    """The classifier of a folder without its weights: shapes only."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))


def attending_pairs(config: Any, lengths: np.ndarray) -> np.ndarray:
    """(layers, N) pairs of tokens that attend to one another in sequences of these lengths."""
    s = lengths.astype(np.float64)
    reach = getattr(config, "local_attention", 0) // 2  # tokens that a windowed layer sees on either side
    windowed = np.where(s <= reach + 1, s * s, s * (2 * reach + 1) - reach * (reach + 1))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return np.stack([windowed if kind == "sliding_attention" else s * s for kind in kinds])


def product_s(
    num_rows: int,
    num_out: int,
    num_in: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
) -> float:
    """Seconds of a linear layer's product; backward: and of its two products backward."""
    inputs_TI, weight_OI = (torch.randn(n, num_in, device=device).to(dtype) for n in (num_rows, num_out))
    outputs_TO = torch.randn(num_rows, num_out, device=device).to(dtype)
    found_TO = torch.empty_like(outputs_TO)
    seconds = median_s(lambda: torch.mm(inputs_TI, weight_OI.t(), out=found_TO), device)
    if not backward:
        return seconds
    inputs_gradient, weight_gradient = torch.empty_like(inputs_TI), torch.empty_like(weight_OI)
    seconds += median_s(lambda: torch.mm(outputs_TO, weight_OI, out=inputs_gradient), device)
    return seconds + median_s(lambda: torch.mm(outputs_TO.t(), inputs_TI, out=weight_gradient), device)


def copy_bytes_per_s(num_floats: int, device: torch.device) -> float:
    """Bytes that a copying kernel reads and writes in a second; a copy engine, which graphs would use, is slower."""
    source = torch.empty(num_floats, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: torch.mul(source, 1.0, out=target), device, inner=1)


def median_s(compute: Callable[[], object], device: torch.device, *, inner: int = _INNER) -> float:
    """Median seconds of one call; on a GPU of `inner` calls in one graph, so that no launch is counted."""
    if device.type != "cuda":
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            compute()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            compute()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.median(spans) / 1000 / inner
