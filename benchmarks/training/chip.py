"""What the arithmetic of a step asks for, and what this chip gives: matrix rates, copy rate, the floor of a step."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from works import Work, lengths_file, model_folder

from brimful.models.anatomy import layers_of, matmul_parameters

_REPEATS, _INNER = 20, 10
#: AdamW in fp32 reads weight, gradient and two states, and writes all but the gradient.
_OPTIMIZER_BYTES = 28


def operations(model: Any, lengths: np.ndarray) -> float:
    """Operations of one forward and backward pass over sequences of these lengths, without padding, counted as a
    product and a sum each: 6 a matrix parameter and token (of the head: and sequence), 12 a hidden unit and pair of
    tokens that attend to one another in each layer."""
    layers = layers_of(model)
    assert layers is not None
    body = matmul_parameters(layers)
    head = matmul_parameters(model) - body
    return 6.0 * (body * lengths.sum() + head * len(lengths)) + _attention_operations(model.config, lengths)


def _attention_operations(config: Any, lengths: np.ndarray) -> float:
    s = lengths.astype(np.float64)
    reach = getattr(config, "local_attention", 0) // 2  # tokens that a windowed layer sees on either side
    windowed = np.where(s <= reach + 1, s * s, s * (2 * reach + 1) - reach * (reach + 1))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    pairs = sum((windowed if kind == "sliding_attention" else s * s).sum() for kind in kinds)
    return 12.0 * config.hidden_size * float(pairs)


def limits(inputs: Path, works: list[Work], *, smoke: bool) -> dict[str, Any]:
    """Rates of this machine, and the floor of each work: seconds of one step that does nothing but what it must.

    The floor: the matrix products of all layers, forward and backward, at the rate measured for their own shapes with
    the mean tokens of a batch; attention at the rate of the largest product; the optimizer's bytes at the copy rate.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = 256 if smoke else 8192
    matmul_flops_per_s = 2 * side**3 / _products_s(side, side, side, device, only_forward=True)
    copy_bytes_per_s = _copy_bytes_per_s((1 << 16) if smoke else (1 << 30), device)
    floors = {}
    for work in works:
        lengths = np.load(lengths_file(inputs, work))
        num_tokens = round(float(lengths.mean()) * work.batch_size)
        model = _meta_model(model_folder(inputs, work))
        layers = layers_of(model)
        assert layers is not None
        shapes = Counter(tuple(p.shape) for p in layers.parameters() if p.ndim == 2)
        matmul_s = sum(count * _products_s(num_tokens, *shape, device) for shape, count in shapes.items())
        attention = _attention_operations(model.config, lengths) * work.batch_size / len(lengths)
        num_parameters = sum(p.numel() for p in model.parameters())
        floors[work.name] = {
            "num_tokens": num_tokens,
            "matmul_s": matmul_s,
            "attention_s": attention / matmul_flops_per_s,
            "optimizer_s": _OPTIMIZER_BYTES * num_parameters / copy_bytes_per_s,
        }
    return {
        "matmul_flops_per_s": matmul_flops_per_s,
        "matmul_shape": [side] * 3,
        "copy_bytes_per_s": copy_bytes_per_s,
        "floors": floors,
    }


def _copy_bytes_per_s(num_floats: int, device: torch.device) -> float:
    """Bytes that a copying kernel reads and writes in a second; a copy engine, which graphs would use, is slower."""
    source = torch.empty(num_floats, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: torch.mul(source, 1.0, out=target), device, inner=1)


def _meta_model(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))


def _products_s(
    num_tokens: int, num_out: int, num_in: int, device: torch.device, *, only_forward: bool = False
) -> float:
    """Seconds of a linear layer's product in bf16, and of its two products backward."""
    inputs_TI, weight_OI = (torch.randn(n, num_in, device=device).bfloat16() for n in (num_tokens, num_out))
    outputs_TO = torch.randn(num_tokens, num_out, device=device).bfloat16()
    found_TO = torch.empty_like(outputs_TO)
    seconds = _median_s(lambda: torch.mm(inputs_TI, weight_OI.t(), out=found_TO), device)
    if only_forward:
        return seconds
    inputs_gradient, weight_gradient = torch.empty_like(inputs_TI), torch.empty_like(weight_OI)
    seconds += _median_s(lambda: torch.mm(outputs_TO, weight_OI, out=inputs_gradient), device)
    return seconds + _median_s(lambda: torch.mm(outputs_TO.t(), inputs_TI, out=weight_gradient), device)


def _median_s(compute: Callable[[], object], device: torch.device, *, inner: int = _INNER) -> float:
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
