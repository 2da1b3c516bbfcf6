"""Operations of a step and rates of this chip: matmuls, copy, and the roofline of a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rates import attending_pairs, copy_bytes_per_s, meta_model, product_s
from works import Work, lengths_file, model_folder

from brimful.models.model_stats import layers_of, matmul_parameters

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
    return 12.0 * config.hidden_size * float(attending_pairs(config, lengths).sum())


def limits(inputs: Path, works: list[Work], *, smoke: bool) -> dict[str, Any]:
    """Rates of this machine, and the roofline of each work: seconds of its matmuls, attention and update alone.

    The floor: the matrix products of all layers, forward and backward, at the rate measured for their own shapes with
    the mean tokens of a batch; attention at the rate of the largest product; the optimizer's bytes at the copy rate.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = 256 if smoke else 8192
    matmul_flops_per_s = 2 * side**3 / product_s(side, side, side, device)
    copied_bytes_per_s = copy_bytes_per_s((1 << 16) if smoke else (1 << 30), device)
    floors = {}
    for work in works:
        lengths = np.load(lengths_file(inputs, work))
        num_tokens = round(float(lengths.mean()) * work.batch_size)
        model = meta_model(model_folder(inputs, work))
        layers = layers_of(model)
        assert layers is not None
        shapes = Counter(tuple(p.shape) for p in layers.parameters() if p.ndim == 2)
        matmul_s = sum(count * product_s(num_tokens, *shape, device, backward=True) for shape, count in shapes.items())
        attention = _attention_operations(model.config, lengths) * work.batch_size / len(lengths)
        num_parameters = sum(p.numel() for p in model.parameters())
        floors[work.name] = {
            "num_tokens": num_tokens,
            "matmul_s": matmul_s,
            "attention_s": attention / matmul_flops_per_s,
            "optimizer_s": _OPTIMIZER_BYTES * num_parameters / copied_bytes_per_s,
        }
    return {
        "matmul_flops_per_s": matmul_flops_per_s,
        "matmul_shape": [side] * 3,
        "copy_bytes_per_s": copied_bytes_per_s,
        "floors": floors,
    }
